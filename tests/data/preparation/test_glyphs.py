"""The Glyphs dataset: its letters, their drawings and records."""

import collections
import itertools

import pytest

from hypjax.data.preparation import fonts, glyphs


@pytest.fixture(scope="module")
def classes():
    return fonts.glyph_classes()


@pytest.fixture(scope="module")
def class_of(classes):
    return {chr(codepoint): c for c in classes for codepoint in c.codepoints}


@pytest.mark.slow
def test_classes_are_distinct_letters_in_ten_or_more_faces(classes, class_of):
    assert 1240 <= len(classes) <= 1280
    members = [*itertools.chain.from_iterable(c.codepoints for c in classes)]
    assert len({*members}) == len(members)
    assert all(len({glyph.face for glyph in c.glyphs}) == len(c.glyphs) >= 10 for c in classes)
    assert len({(c.base, c.script) for c in classes}) == len({c.base for c in classes})
    assert len({c.name for c in classes}) == len(classes)
    assert class_of["é"].name == "é LATIN SMALL LETTER E WITH ACUTE"
    assert {glyph.codepoint for glyph in class_of["А"].glyphs} == {ord("A")}  # Cyrillic A, too.


def test_wrong_character_maps_are_left_out(classes, class_of):
    used = {glyph.face for c in classes for glyph in c.glyphs}
    assert used.isdisjoint(fonts.MISMAPPED_FACES)
    assert not any("STIXSiz" in face or "Display" in face for face in used)
    codepoints = {g.codepoint for c in classes for g in c.glyphs if g.face.startswith("cm")}
    assert {chr(c) for c in codepoints} == set(map(chr, [*range(65, 91), *range(97, 123)]))
    assert "DejaVuSansMono-Oblique" not in {glyph.face for glyph in class_of["Ӌ"].glyphs}


def test_letters_are_one_class_if_they_are_drawn_alike(class_of):
    for letters in ("AΑА", "oοо", "ÅÅ", "έέ", "ΠП"):
        assert len({class_of[letter] for letter in letters}) == 1, letters
    for letters in ("cC", "eé", "Kќ", "mт", "ŎǑ", "lI", "ıi", "иn"):
        assert len({class_of[letter] for letter in letters}) == 2, letters


def test_train_and_test_classes_are_disjoint_and_complete(classes):
    train, test = glyphs.split_classes(classes)
    assert len(test) >= 300
    assert "D LATIN CAPITAL LETTER D" in {c.name for c in test}  # README searches with one.
    assert set(train).isdisjoint(test) and set(train) | set(test) == set(classes)
    assert (train, test) == glyphs.split_classes(classes)
    written = collections.Counter(example.class_name for example in glyphs.examples(test[:10]))
    assert written == {c.name: len(c.glyphs) for c in test[:10]}  # In all their faces.
