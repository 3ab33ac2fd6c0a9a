"""The Scenes dataset: its objects, their pictures, pairs and judgements."""

import io
import itertools
import pickle

import numpy as np
import pytest
from PIL import Image

from hypjax.data import records
from hypjax.data.preparation import fonts, scenes


@pytest.fixture(scope="module")
def objects():
    return scenes.choose_objects(fonts.glyph_classes())


def test_sizes_and_names(objects):
    """No letter is in two parts."""
    sizes = {part: len(things) for part, things in objects.items()}
    assert sizes == {"train": 600, "query": 70, "distractor": 300}
    splits = scenes.split_views(objects)
    assert [len(splits[name]) for name in ("train", "query", "gallery")] == [6000, 70, 1140]
    things = list(itertools.chain.from_iterable(objects.values()))
    views = list(itertools.chain.from_iterable(splits.values()))
    assert len({thing.name for thing in things}) == len(things)
    assert len({view.name for view in views}) == len(views)
    letters = [{thing.letter.base for thing in part} for part in objects.values()]
    assert len(set.union(*letters)) == sum(map(len, letters))


def test_letters_that_differ_only_in_size_are_not_two_objects(objects):
    things = list(itertools.chain.from_iterable(objects.values()))
    for alike in ("cC", "oO", "sS", "vV", "wW", "xX", "zZ"):
        small, large = ({t.glyph.face for t in things if t.letter.base == a} for a in alike)
        assert small.isdisjoint(large), alike


def test_boxes_frame_the_letter(objects):
    """So a picture cut to its box resembles one of the letters' dataset."""
    correlations = []
    for thing in objects["query"][:20]:
        pixels, box = scenes.View(thing, "easy", 0).render()
        clean = fonts.draw(thing.glyph).resize((32, 32))
        seen = Image.fromarray(pixels).crop(box).resize((32, 32))
        correlations.append(np.corrcoef(np.ravel(clean), np.ravel(seen))[0, 1])
    assert np.mean(correlations) > 0.5, np.mean(correlations)


def test_a_prepared_dataset_has_its_relations_and_opens_without_drawing(
    objects, tmp_path, monkeypatch
):
    few = {part: things[:4] for part, things in objects.items()}
    monkeypatch.setattr(scenes, "choose_objects", lambda classes: few)
    records.write_records(tmp_path / "scenes", "scenes", scenes.contents(), None)
    view = scenes.split_views(few)["query"][1]
    pixels, box = view.render()
    monkeypatch.setattr(fonts, "draw", lambda glyph: pytest.fail("drew a glyph"))
    folder = records.open_folder("scenes", tmp_path / "scenes")
    splits = "train", "query", "gallery"
    train, query, gallery = (records.open_records(folder, split) for split in splits)
    assert pickle.loads(pickle.dumps(query)).content(3) == query.content(3)
    assert len({*train.labels, *query.labels, *gallery.labels}) == 3 * 4
    pairs = records.read_pairs(folder, train.names)
    assert len({tuple(pair) for pair in pairs}) == len(pairs) == 4 * 5 * 9
    assert np.array_equal(*train.labels[pairs.T]) and (pairs[:, 0] != pairs[:, 1]).all()
    assert all("/easy" in name for name in train.names[pairs[:, 0]])
    boxes, truth = records.read_judgements(folder, query.names, gallery.names)
    assert np.array_equal(Image.open(io.BytesIO(query.content(1))), pixels)
    assert tuple(boxes[1]) == box and query.class_names[1] == view.shown.name
    for label, *lists in zip(query.labels, *truth, strict=True):
        assert np.array_equal(np.flatnonzero(gallery.labels == label), np.concatenate(lists))
        for (level, number), items in zip(scenes.GALLERY_VIEWS.items(), lists, strict=True):
            assert sum(f"/{level}" in name for name in gallery.names[items]) == len(items) == number
