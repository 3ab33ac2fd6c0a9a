"""Datasets of particular objects: their lists, and how they are prepared and opened."""

import dataclasses
import os
import pickle

import numpy as np
import pytest

from hypjax.assemble import open_splits
from hypjax.config import default_config
from hypjax.data.ground_truth import read_ground_truth
from hypjax.data.preparation.prepare import prepare
from hypjax.data.records import VERSION
from hypjax.errors import UserError
from hypjax.types import View
from tests.helpers import object_files


def prepared(name, manual_dir, data_dir):
    return prepare(name, data_dir=str(data_dir), manual_dir=str(manual_dir), allow_partial=True)


def opened(name, data_dir, run=None, **evaluation):
    config = default_config()
    config.data.name, config.run.data_dir = name, str(data_dir)
    config.run.update(run or {})
    config.eval.update(evaluation)
    return open_splits(config)


def oxford(folder, data_dir, missing=(), run=None, **judged):
    """Writes a small Oxford, perhaps with another truth on the first query; opens it prepared."""
    folder = object_files.write_roxford(folder, missing)
    path = folder / "gnd_roxford5k.pkl"
    truth = pickle.loads(path.read_bytes())
    truth["gnd"][0].update(judged)
    path.write_bytes(pickle.dumps(truth))
    prepared("roxford5k", folder, data_dir)
    return opened("roxford5k", data_dir, run)


def test_revisited_is_opened_with_boxes_and_its_ground_truth(tmp_path):
    splits = oxford(tmp_path, tmp_path / "data")
    assert splits.train is None and splits.validation is None and splits.name == "roxford5k"
    assert [len(splits.test), len(splits.gallery)] == [2, 6]
    assert splits.test.boxes.tolist() == 2 * [[2, 3, 16, 12]]
    lists = [[items.tolist() for items in part] for part in splits.ground_truth]
    assert lists == [[[0], [1]], [[2, 5], []], [[4], [4]]]
    assert "query 2 of 70 images, gallery 6 of 4993" in splits.notes[0]
    assert splits.test.describe() == "2 images"
    partial = oxford(tmp_path / "b", tmp_path / "less", ["keble_000001", "oxford_000000"])
    names = [partial.gallery.name(i) for i in partial.ground_truth.hard[0]]
    assert names == ["oxford_000002", "oxford_000005"]
    assert [items.tolist() for items in partial.ground_truth.easy] == [[]]


@pytest.mark.parametrize("cache", ["none", "host"])
def test_a_query_is_cut_to_its_box_before_it_is_viewed(tmp_path, cache):
    run = {"cache": cache, "cache_dir": str(tmp_path / "cache")}
    queries = oxford(tmp_path, tmp_path / "data", run=run).test
    full = dataclasses.replace(queries, boxes=None).image(0, 3)
    cut = full.crop((2.4, 3, 15.6, 12))  # Pillow rounds the box.
    width = int(8 * cut.width / cut.height)
    left = round((width - 8) / 2)
    centre = cut.resize((width, 8), 3).crop((left, 0, left + 8, 8))
    for view, expected in (("squash", cut.resize((8, 8), 3)), ("centre_crop", centre)):
        np.testing.assert_array_equal(queries.test_view(0, View(8, 8, 3, view)), expected)


def test_benchmarks_join_a_dataset_and_distractors_their_galleries(tmp_path):
    object_files.write_roxford(tmp_path)
    object_files.write_sfm(tmp_path)
    far = tmp_path / "revisitop1m/jpg"
    far.mkdir(parents=True)
    for name in ("a", "b"):
        (far / f"{name}.jpg").write_bytes(object_files.picture(name, name))
    for name in ("roxford5k", "sfm120k", "revisitop1m"):
        prepared(name, tmp_path, tmp_path / "data")
    options = {"benchmarks": ("roxford5k",), "distractors": True}
    splits = opened("sfm120k", tmp_path / "data", **options)
    assert list(splits.tasks) == ["sfm120k", "roxford5k+1m"]
    gallery = splits.tasks["roxford5k+1m"].gallery
    assert gallery.names[5:].tolist() == ["oxford_000005", "jpg/a.jpg", "jpg/b.jpg"]
    assert opened("sfm120k", tmp_path / "data").fingerprint == splits.fingerprint
    assert list(splits.fingerprints) == ["images", "images of roxford5k+1m"]


def test_sfm_lists_clusters_and_pairs(tmp_path):
    missing = object_files.sfm_names("train")[1]
    object_files.write_sfm(tmp_path, missing=[missing])
    prepared("sfm120k", tmp_path, tmp_path / "data")
    splits = opened("sfm120k", tmp_path / "data")
    train = splits.train
    assert (len(train), len(splits.test), train.num_classes) == (11, 12, 4)
    names = [[train.name(i) for i in pair] for pair in train.pairs]
    every = object_files.sfm_names("train")
    expected = [[every[3 * c + i], every[3 * c + i + 1]] for c in range(4) for i in range(2)]
    assert names == [pair for pair in expected if missing not in pair]
    assert train.class_name(0) == "train cluster 0"


def test_relations_are_part_of_the_fingerprint_and_are_protected(tmp_path):
    before = oxford(tmp_path, tmp_path / "data").fingerprint
    assert oxford(tmp_path / "b", tmp_path / "second", easy=[1]).fingerprint != before
    table = tmp_path / "data/roxford5k" / VERSION / "judgements.parquet"
    table.write_bytes(table.read_bytes()[:-10])
    with pytest.raises(UserError, match="is damaged .*judgements.parquet"):
        opened("roxford5k", tmp_path / "data")


def test_a_damaged_or_malicious_list_is_refused(tmp_path):
    folder = object_files.write_sfm(tmp_path)
    path = folder / "retrieval-SfM-120k.pkl"
    lists = pickle.loads(path.read_bytes())
    for changed, keyword in (
        ({"more": os.mkdir}, "could run code"),
        ({"pidxs": []}, "needs train"),
    ):
        path.write_bytes(pickle.dumps(lists | {"train": lists["train"] | changed}))
        with pytest.raises(UserError, match=keyword):
            prepared("sfm120k", folder, tmp_path / "data")
    assert not (tmp_path / "data/sfm120k" / VERSION).exists()


FIRST = {"bbx": [1.5, 2, 30, 40], "easy": np.array([0]), "hard": [1], "junk": np.array([], int)}
SECOND = {"bbx": np.array([0, 0, 3, 4.0]), "easy": [], "hard": np.array([3], ">i2"), "junk": [2]}
CONTENTS = {"imlist": [*"abcd"], "qimlist": [*"qr"], "gnd": [FIRST, SECOND]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gnd": os.system}, "gnd.pkl .*system in it could run code"),
        ({"qimlist": ["q"]}, "is not a ground truth"),
        ({"gnd": [FIRST, FIRST | {"easy": [0.5]}]}, "is not a ground truth"),
        ({"gnd": [FIRST, FIRST | {"junk": [4]}]}, "is damaged"),
        (None, "cannot read"),  # Half a file.
    ],
)
def test_what_is_no_ground_truth_is_refused(tmp_path, changed, message):
    path, content = tmp_path / "gnd.pkl", pickle.dumps(CONTENTS | (changed or {}))
    path.write_bytes(content if changed else content[: len(content) // 2])
    with pytest.raises(UserError, match=message):
        read_ground_truth(path)
