"""Preparing datasets: what is written, and what is rejected."""

import functools

import fsspec
import numpy as np
import pytest
from PIL import Image

from hypjax.assemble import open_splits
from hypjax.config import load_config
from hypjax.data import pixels, records
from hypjax.data.preparation import prepare as preparation
from hypjax.data.preparation.export import export
from hypjax.data.preparation.prepare import prepare, prepared_folder
from hypjax.errors import UserError
from tests.helpers import commands, official_files
from tests.helpers.pictures import encoded

FIRST, SECOND = (f"images/001.Bird_1/Bird_1_000{i}.jpg" for i in range(2))


@pytest.fixture
def cub(tmp_path):
    """Writes a small CUB, some of whose files may be replaced."""
    return functools.partial(official_files.write_cub, tmp_path / "files")


def prepared(tmp_path, name="cub200", allow_partial=True, **kwargs):
    folders = {"data_dir": str(tmp_path / "data"), "manual_dir": str(tmp_path / "files")}
    return prepare(name, **folders, allow_partial=allow_partial, **kwargs)


def test_photos_may_search_pictures_of_products_that_were_trained_on(tmp_path):
    written = official_files.write_grocery(tmp_path / "files", icons=True)
    stored = prepared(tmp_path, "grocery_icons")
    labels = {n: set(records.open_records(stored, n).class_names) for n in written}
    assert labels["train"] | labels["query"] == labels["gallery"] and len(labels["gallery"]) == 9
    assert not labels["train"] & labels["query"]
    # Both tasks have the same photos for training and as queries, so they share their caches.
    prepared(tmp_path, "grocery")
    fields = [f"run.data_dir={tmp_path / 'data'}", "data.validation_classes=0"]
    shop = open_splits(load_config("grocery:lite", fields))
    icons = open_splits(load_config("grocery:lite", [*fields, "data.name=grocery_icons"]))
    tables = shop.train, shop.test, icons.train, icons.test, icons.gallery
    train, test, *same, gallery = (table.records_fingerprint for table in tables)
    assert same == [train, test] and len({train, test, gallery}) == 3
    assert shop.fingerprint != icons.fingerprint


def test_images_that_cannot_be_read_are_named_and_left_out_on_request(tmp_path, cub):
    cub(broken={FIRST: encoded(Image.new("RGB", (64, 64)), "JPEG")[:300], SECOND: b"text"})
    with pytest.raises(UserError, match=r"2 of 12 images cannot be read .* --skip_corrupt"):
        prepared(tmp_path)
    folder = prepared(tmp_path, skip_corrupt=True)
    skipped = (folder.path / "skipped.tsv").read_text().splitlines()
    assert skipped[0] == "name\treason" and skipped[2] == f"{SECOND}\tnot an image"
    assert len(skipped) == 3 and SECOND not in records.open_records(folder, "train").names


def test_a_partial_copy_is_rejected_or_described(tmp_path, cub):
    cub(classes=(1, 101))
    counted = "train 3 of 5864 images in 1 of 100 classes, test 3 of 5924 images in 1 of 100"
    with pytest.raises(UserError, match=f"{counted}.*use --allow_partial"):
        prepared(tmp_path, allow_partial=False)
    folders = [f"--manual_dir={tmp_path / 'files'}", f"--data_dir={tmp_path / 'data'}"]
    commands.call("prepare", "--dataset=cub200", *folders, "--allow_partial")
    (note,) = preparation.notes(prepared(tmp_path, allow_partial=False))
    assert note.startswith(f"a partial copy of cub200: {counted}")


def test_classes_in_both_splits_are_rejected(tmp_path):
    official_files.write_omniglot(tmp_path / "files")
    alphabets = tmp_path / "files/images_evaluation"
    (alphabets / "Greek2").rename(alphabets / "Greek")
    with pytest.raises(UserError, match="Greek/character01 is in both train and test"):
        prepared(tmp_path, "omniglot")


def test_a_dataset_in_the_cloud_is_copied(tmp_path, cub, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cub()
    here, storage = prepared(tmp_path), fsspec.filesystem("memory")
    storage.put(f"{here.path}/", f"/bucket/data/cub200/{records.VERSION}/", recursive=True)
    there = prepared_folder("cub200", "memory://bucket/data")
    assert there.path.is_relative_to(tmp_path / "cache")
    a, b = (records.open_records(folder, "test") for folder in (here, there))
    assert [a.content(i) for i in range(len(a))] == [b.content(i) for i in range(len(b))]
    storage.rm("/", recursive=True)


def test_exported_files_have_short_distinct_names_and_classes_have_folders(tmp_path, monkeypatch):
    images = {  # Classes and names by file.
        "4_a/1.png": ("a", "x y/1.png"),
        "4_a/2_3.png": ("a", "x y/2 3.png"),
        "3_B/2_1.png": ("B", "p/1.png"),
        "3_B/3_1.PNG": ("B", "q/1.PNG"),
        "5_b/1.png": ("b", "1"),
        "1_A B/5_p.png": ("A/B", "p"),
        "1_A B/6_p.png": ("A/B", "p.png"),
        "2_A B/p_.png": ("A:B", "p .png"),
        "0_/png.png": ("?", ".png"),
    }
    picture = encoded(Image.new("RGB", (4, 4)))
    examples = [records.Example(picture, 4, 4, name, label) for label, name in images.values()]
    contents = records.Contents({"query": examples[1:], "gallery": examples}, 17, {})
    monkeypatch.setattr(preparation, "declared", lambda name: lambda: contents)
    assert export("glyphs", tmp_path / "out", str(tmp_path)) == 17
    files = [*(tmp_path / "out/gallery").glob("*/*")]
    assert {file.read_bytes() for file in files} == {picture}
    assert {str(file.relative_to(tmp_path / "out/gallery")) for file in files} == images.keys()
    folders = {path.name for path in (tmp_path / "out/query").iterdir()}
    assert folders == {file.split("/")[0] for file in images}


def test_larger_photos_of_in_shop_are_noted_in_all_results(tmp_path):
    official_files.write_inshop(tmp_path / "files", photos="img_highres")
    note, partial = preparation.notes(prepared(tmp_path, "inshop"))
    assert "larger photos of img_highres" in note and partial.startswith("a partial copy")


def test_a_part_is_cut_to_boxes_and_every_result_says_so(tmp_path):
    written = official_files.write_cars_halves(tmp_path / "files", halves=("cars_train",))
    with pytest.raises(UserError, match="no part 'half'; --part is one of train, train_boxes"):
        prepared(tmp_path, "cars196", part="half")
    folder = prepared(tmp_path, "cars196", part="train_boxes")
    note, partial = preparation.notes(prepared_folder("cars196", str(tmp_path / "data")))
    assert note.startswith("the training half of Cars-196 (8144 of 16185 photos), cut to their box")
    assert "train 4 of 4052 images in 2 of 98 classes, test 4 of 4092 images in 2 of 98" in partial
    test = records.open_records(folder, "test")
    assert test.sizes.tolist() == [[11, 16]] * 4
    for i, image in enumerate(written["test"]):  # Pixels 3 to 18 and 2 to 12, counted from 1.
        whole = np.asarray(pixels.decode(image.content, 3), np.int32)[1:12, 2:18]
        cut = np.asarray(pixels.decode(test.content(i), 3), np.int32)
        assert np.abs(whole - cut).mean() < 3
    with pytest.raises(UserError, match="holds the part train_boxes"):
        prepared(tmp_path, "cars196")
