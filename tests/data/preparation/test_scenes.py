"""The Scenes dataset: its objects, their pictures, pairs and judgements."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from hypjax.data.preparation import fonts, glyphs, scenes
from hypjax.data.records import (
    open_folder,
    open_records,
    read_judgements,
    read_pairs,
    write_records,
)
from tests.helpers.process_pair import python


@pytest.fixture(scope="module")
def objects():
    return scenes.choose_objects(fonts.glyph_classes())


@pytest.fixture(scope="module")
def few(objects):
    return {part: found[:4] for part, found in objects.items()}


@pytest.fixture
def plain(monkeypatch):
    """Pictures of nothing but ink on one grey."""
    monkeypatch.setattr(scenes, "NOISE", 0)
    monkeypatch.setattr(
        scenes,
        "_background",
        lambda rng, ground, limits: np.full((scenes.SIDE, scenes.SIDE), ground, np.float32),
    )


def resemblance(view):
    """Correlation of an object's box with a clean drawing."""
    rendered = view.render()
    clean = fonts.draw(view.thing.glyph).resize((32, 32))
    seen = Image.fromarray(rendered.pixels).crop(rendered.box).resize((32, 32))
    return np.corrcoef(np.ravel(clean), np.ravel(seen))[0, 1]


def test_sizes_and_names(objects):
    """No letter is in two parts."""
    sizes = {part: len(found) for part, found in objects.items()}
    assert sizes == {"train": 600, "query": 70, "distractor": 300}
    splits = scenes.split_views(objects)
    assert [len(splits[name]) for name in ("train", "query", "gallery")] == [6000, 70, 1140]
    things = list(itertools.chain.from_iterable(objects.values()))
    views = list(itertools.chain.from_iterable(splits.values()))
    assert len({thing.name for thing in things}) == len(things)
    assert len({view.name for view in views}) == len(views)
    letters = [{thing.letter.base for thing in part} for part in objects.values()]
    assert len(set.union(*letters)) == sum(map(len, letters))


def test_letters_that_differ_in_size_only_are_not_two_objects(objects):
    things = list(itertools.chain.from_iterable(objects.values()))
    for alike in ("cC", "oO", "sS", "vV", "wW", "xX", "zZ"):
        small, large = ({t.glyph.face for t in things if t.letter.base == a} for a in alike)
        assert small.isdisjoint(large), alike


@pytest.mark.slow
def test_another_process_renders_the_same(objects):
    glyph = objects["query"][0].glyph
    program = (
        f"from hypjax.data.preparation import fonts, glyphs, scenes; glyph = fonts.{glyph!r};"
        "print(scenes.render(glyph, 'hard0', 'hard').pixels.tobytes().hex());"
        "print(glyphs.render(glyph).tobytes().hex())"
    )
    shown = python("-c", program, PYTHONHASHSEED="7").stdout.split()
    rendered = scenes.render(glyph, "hard0", "hard").pixels, glyphs.render(glyph)
    assert shown == [pixels.tobytes().hex() for pixels in rendered]


def test_boxes_frame_the_letter_inside_the_picture(objects, plain):
    """So a picture cut to its box resembles one of the letters' dataset."""
    views = [thing.views(query=1, easy=1, hard=3, junk=3) for thing in objects["query"][:10]]
    assert np.mean([resemblance(view) for part in views for view in part[:2]]) > 0.8
    for view in itertools.chain.from_iterable(views):
        _, (left, top, right, bottom), shown = view.render()
        assert 0 <= left <= right <= scenes.SIDE and 0 <= top <= bottom <= scenes.SIDE
        assert view.difficulty != "junk" or shown <= 0.2


@pytest.mark.parametrize("effect", scenes.HARD_EFFECTS)
def test_effects_of_hard_views(objects, plain, monkeypatch, effect):
    """One is certain; without any, ink on one grey is sharp, whole and in contrast."""
    monkeypatch.setattr(scenes, "HARD_EFFECTS", (effect,))

    def properties(view):
        pixels, _, shown = view.render()
        levels = pixels.astype(int)
        steepest = max(np.abs(np.diff(levels, axis=axis)).max() for axis in (0, 1))
        return {"blur": steepest / np.ptp(levels), "cover": shown, "fade": np.ptp(levels) / 255}

    low, high = {"blur": (0.6, 0.65), "cover": (0.999, 1), "fade": (0.36, 0.5)}[effect]
    for thing in objects["query"][:10]:
        hard, easy = (scenes.View(thing, level, 0) for level in ("hard", "easy"))
        assert properties(hard)[effect] < low < high <= properties(easy)[effect]


def test_a_prepared_dataset_has_its_relations_and_opens_without_drawing(few, tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "choose_objects", lambda classes: few)
    write_records(tmp_path / "scenes", "scenes", scenes.contents(), None)
    view = scenes.split_views(few)["query"][1]
    rendered = view.render()
    monkeypatch.setattr(fonts, "draw", lambda glyph: pytest.fail("drew a glyph"))
    folder = open_folder("scenes", tmp_path / "scenes")
    train, query, gallery = (open_records(folder, s) for s in ("train", "query", "gallery"))
    assert len({*train.labels, *query.labels, *gallery.labels}) == 3 * 4
    pairs = read_pairs(folder, train.names)
    assert len({tuple(pair) for pair in pairs}) == len(pairs) == 4 * 5 * 9
    assert np.array_equal(*train.labels[pairs.T]) and (pairs[:, 0] != pairs[:, 1]).all()
    assert all("/easy" in name for name in train.names[pairs[:, 0]])
    boxes, judgements = read_judgements(folder, query.names, gallery.names)
    assert np.array_equal(Image.open(io.BytesIO(query.content(1))), rendered.pixels)
    assert tuple(boxes[1]) == rendered.box and query.class_names[1] == view.thing.name
    for label, *items in zip(query.labels, *judgements, strict=True):
        assert [len(found) for found in items] == [5, 5, 2]
        assert np.array_equal(np.flatnonzero(gallery.labels == label), np.concatenate(items))
        for level, found in zip(scenes.GALLERY_VIEWS, items, strict=True):
            assert all(f"/{level}" in name for name in gallery.names[found])
