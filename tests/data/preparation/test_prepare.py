"""Preparing datasets: what is written, what is rejected, and what a failure leaves behind."""

import io
import re
import zlib

import fsspec
import numpy as np
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from hypjax import prepare as the_command
from hypjax.config import load_config
from hypjax.data import pixels, records
from hypjax.data.preparation import prepare as preparation
from hypjax.data.preparation.export import export
from hypjax.data.preparation.prepare import prepare, prepared_folder
from hypjax.errors import UserError
from hypjax.runs.images import open_splits
from tests.helpers import official_files
from tests.helpers.pictures import encoded
from tests.helpers.system_limits import small_disk

FIRST, SECOND = (f"images/001.Bird_1/Bird_1_000{i}.jpg" for i in range(2))


@pytest.fixture
def complete(monkeypatch):
    """Makes a small copy count as the complete dataset."""

    def complete(name, written):
        counts = {
            split: records.Count(len(part), len({image.label for image in part}))
            for split, part in written.items()
        }
        dataset, declared = preparation.declared(name), preparation.declared
        dataset = dataset._replace(counts=counts)
        monkeypatch.setattr(
            preparation, "declared", lambda other: dataset if other == name else declared(other)
        )
        return written

    return complete


@pytest.fixture
def cub(tmp_path, complete):
    """Writes a small CUB that counts as complete; some files may be replaced."""

    def cub(broken=None, **kwargs):
        folder = tmp_path / "files"
        return complete("cub200", official_files.write_cub(folder, broken=broken, **kwargs))

    return cub


def prepared(tmp_path, name="cub200", **kwargs):
    return prepare(
        name, data_dir=str(tmp_path / "data"), manual_dir=str(tmp_path / "files"), **kwargs
    )


def contents(dataset):
    return [dataset.content(i) for i in range(len(dataset))]


def left(data_dir):
    """Returns what is left of the dataset, besides locks."""
    return sorted(path.relative_to(data_dir).as_posix() for path in data_dir.glob("cub200/[!.]*"))


def test_records_hold_the_files_and_the_index_describes_them(tmp_path, complete):
    written = complete("inshop", official_files.write_inshop(tmp_path / "files"))
    folder = prepared(tmp_path, "inshop")
    assert list(folder.splits) == list(written)
    assert preparation.notes(folder) == ()
    numbers = {}
    for split, files in written.items():
        found = records.open_records(folder, split)
        assert contents(found) == [file.content for file in files]
        assert found.names.tolist() == [file.name for file in files]
        assert found.class_names.tolist() == [file.label for file in files]
        assert found.groups.tolist() == [file.superlabel for file in files]
        for label, name in zip(found.labels, found.class_names, strict=True):
            assert numbers.setdefault(name, label) == label  # In all splits.
        index = pyarrow.parquet.read_table(folder.path / f"index-{split}.parquet")
        assert index["checksum"].to_pylist() == [zlib.crc32(file.content) for file in files]
        sizes = [Image.open(io.BytesIO(file.content)).size[::-1] for file in files]
        assert list(map(tuple, found.sizes)) == sizes
        builder = tfds.builder_from_directory(folder.path)
        raw = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        label_names = builder.info.features["label"].names
        assert [(x["image"], label_names[x["label"]], x["name"].decode()) for x in raw] == [
            (file.content, file.label, file.name) for file in files
        ]


def unusual_images():
    picture = Image.fromarray(np.arange(12 * 10 * 3, dtype=np.uint8).reshape(10, 12, 3))
    deep = Image.fromarray(np.arange(120, dtype=np.uint16).reshape(10, 12) * 500)
    return {
        "greyscale": encoded(picture.convert("L"), "JPEG"),
        "cmyk": encoded(picture.convert("CMYK"), "JPEG"),
        "rgba": encoded(picture.convert("RGBA"), "PNG"),
        "palette": encoded(picture.convert("P"), "PNG"),
        "16 bits": encoded(deep, "PNG"),
        "animated": encoded(picture, "GIF", save_all=True, append_images=[picture.rotate(90)] * 2),
        "1x1": encoded(picture.resize((1, 1)), "JPEG"),
    }


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_unusual_images_are_kept_unchanged(tmp_path, cub, monkeypatch):
    """Also large ones, of which Pillow warns."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    names = [f"images/001.Bird_1/Bird_1_000{i}.jpg" for i in range(7)]
    images = dict(zip(names, unusual_images().items(), strict=True))
    cub({name: content for name, (_, content) in images.items()}, classes=(1,), images=7)
    folder = prepared(tmp_path)
    assert list(folder.splits) == ["train"]  # A split without images is left out.
    found = records.open_records(folder, "train")
    for name, image, size in zip(found.names, contents(found), found.sizes, strict=True):
        kind, content = images[name]
        assert image == content
        assert tuple(size) == ((1, 1) if kind == "1x1" else (10, 12))


def test_photos_may_search_pictures_of_products_that_were_trained_on(tmp_path, complete):
    folder = tmp_path / "files"
    written = complete("grocery_icons", official_files.write_grocery(folder, icons=True))
    stored = prepared(tmp_path, "grocery_icons")
    labels = {n: set(records.open_records(stored, n).class_names) for n in written}
    assert labels["train"] | labels["query"] == labels["gallery"] and len(labels["gallery"]) == 9
    assert not labels["train"] & labels["query"]
    # Both tasks have the same photos for training and as queries, so they share their caches.
    complete("grocery", official_files.write_grocery(folder))
    prepared(tmp_path, "grocery")
    fields = [f"run.data_dir={tmp_path / 'data'}", "data.validation_classes=0"]
    shop, icons = (
        open_splits(load_config("grocery:lite", [*fields, f"data.name={name}"]))
        for name in ("grocery", "grocery_icons")
    )
    assert (shop.train.source, shop.test.source) == (icons.train.source, icons.test.source)
    assert len({shop.train.source, shop.test.source, icons.gallery.source}) == 3
    assert shop.fingerprint != icons.fingerprint


@pytest.fixture
def bucket(tmp_path, cub):
    """A bucket with a prepared dataset."""
    cub()
    folder = prepared(tmp_path)
    storage = fsspec.filesystem("memory")
    storage.put(f"{folder.path}/", "/bucket/data/cub200/2.0.0/", recursive=True)
    yield storage
    storage.rm("/", recursive=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hypjax/datasets"


def test_a_dataset_in_the_cloud_is_copied_once(tmp_path, bucket, cache):
    with pytest.raises(UserError, match="memory://nowhere/sop/2.0.0 holds no"):
        prepared_folder("sop", "memory://nowhere")
    here = prepared_folder("cub200", str(tmp_path / "data"))
    there = prepared_folder("cub200", "memory://bucket/data")
    assert there.path.is_relative_to(cache)
    one, two = (records.open_records(folder, "test") for folder in (here, there))
    assert contents(one) == contents(two)
    bucket.rm("/bucket", recursive=True)
    assert prepared_folder("cub200", "memory://bucket/data/").path == there.path


def test_images_that_cannot_be_read_are_named_and_left_out_on_request(tmp_path, cub, capsys):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    jpeg = encoded(picture, "JPEG")
    broken = {FIRST: jpeg[: len(jpeg) // 2], SECOND: b"text"}
    reasons = "is truncated", "not an image"
    cub(broken)
    with pytest.raises(UserError, match=r"2 of 12 images cannot be read .* --skip_corrupt"):
        prepared(tmp_path)
    lines = re.findall(r"cannot read .*", capsys.readouterr().err)
    for line, name, reason in zip(lines, broken, reasons, strict=True):
        assert line.startswith(f"cannot read {name} (") and reason in line
    assert left(tmp_path / "data") == []
    folder = prepared(tmp_path, skip_corrupt=True)
    skipped = (folder.path / "skipped.tsv").read_text().splitlines()
    assert skipped[0] == "name\treason" and skipped[2] == f"{SECOND}\tnot an image"
    assert len(skipped) == 3 and SECOND not in records.open_records(folder, "train").names
    assert preparation.notes(folder) == ("a partial copy of cub200: train 4 of 6 images",)


def test_a_part_is_cut_to_boxes_and_every_result_says_so(tmp_path):
    written = official_files.write_half_cars(tmp_path / "files", box=(3, 2, 18, 12))
    with pytest.raises(UserError, match="no part 'half'; --part is one of train, train_boxes"):
        prepared(tmp_path, "cars196", part="half")
    options = {"part": "train_boxes", "allow_partial": True}
    folder = prepared(tmp_path, "cars196", **options)
    note, partial = preparation.notes(prepared_folder("cars196", str(tmp_path / "data")))
    assert note.startswith("the training half of Cars-196 (8144 of 16185 photos), cut to their box")
    assert "train 4 of 4052 images in 2 of 98 classes, test 4 of 4092 images in 2 of 98" in partial
    found = records.open_records(folder, "test")
    assert found.sizes.tolist() == [[11, 16]] * 4
    for i, image in enumerate(written["test"]):  # Pixels 3 to 18 and 2 to 12, counted from 1.
        whole = np.asarray(pixels.decode(image.content, 3), np.int32)[1:12, 2:18]
        cut = np.asarray(pixels.decode(found.content(i), 3), np.int32)
        assert np.abs(whole - cut).mean() < 3
    with pytest.raises(UserError, match="holds the part train_boxes"):
        prepared(tmp_path, "cars196", allow_partial=True)


def test_a_partial_copy_is_rejected_or_described(tmp_path, capsys, monkeypatch):
    official_files.write_cub(tmp_path / "files", classes=(1, 101), images=3)
    counted = (
        "train 3 of 5864 images in 1 of 100 classes, test 3 of 5924 images in 1 of 100 classes"
    )
    with monkeypatch.context() as patch:  # Before any image is read.
        patch.setattr(pixels, "decode", lambda *_, **__: pytest.fail("read an image"))
        with pytest.raises(UserError, match=f"{counted}.*use --allow_partial"):
            prepared(tmp_path)
    folders = [f"--manual_dir={tmp_path / 'files'}", f"--data_dir={tmp_path / 'data'}"]
    the_command.FLAGS(["prepare", "--dataset=cub200", *folders, "--allow_partial"])
    the_command.main()
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["train", "3", "images,", "1", "classes"]
    assert shown[3].startswith(f"  a partial copy of cub200: {counted}")
    prepared(tmp_path)
    assert "already prepared" in capsys.readouterr().err


def test_classes_in_both_splits_are_rejected(tmp_path):
    files = tmp_path / "files"
    official_files.write_omniglot(files, small=True)
    for small, large in (("small1", "background"), ("small2", "evaluation")):
        (files / f"images_background_{small}").rename(files / f"images_{large}")
    with pytest.raises(UserError, match="Greek/character01 is in both train and test"):
        prepared(tmp_path, "omniglot", allow_partial=True)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, cub):
    cub(images=20)
    with small_disk(tmp_path / "data", "64k") as disk:
        with pytest.raises(UserError, match="cannot write.*No space left on device.* --data_dir"):
            prepared(tmp_path)
        assert left(disk) == []


def test_a_dataset_that_is_unknown_or_not_prepared_is_named(tmp_path):
    with pytest.raises(UserError, match="no dataset is named 'cub'; did you mean cub200?"):
        prepared_folder("cub", str(tmp_path))
    command = f"run python -m hypjax.prepare --dataset=cub200 --data_dir={tmp_path} "
    with pytest.raises(UserError, match=command):
        prepared_folder("cub200", str(tmp_path))


def test_damaged_datasets_are_reported(tmp_path, cub):
    image = cub()["train"][0].content
    folder = prepared(tmp_path).path

    def spoil(path):
        content = path.read_bytes()
        found = content.find(image) + 30 if image in content else len(content) // 3
        path.write_bytes(content[:found] + bytes([content[found] ^ 255]) + content[found + 1 :])

    folder_is_damaged = "damaged .*remove that folder.*--dataset=cub200"
    for file, damage, message in (
        ("index-train.parquet", spoil, folder_is_damaged),
        ("cub200-train.array_record-00000-of-00001", spoil, "cannot read images/001"),
        ("dataset.json", lambda path: path.write_text("{"), folder_is_damaged),
    ):
        intact = (folder / file).read_bytes()
        damage(folder / file)
        with pytest.raises(UserError, match=message):
            found = records.open_records(prepared_folder("cub200", str(tmp_path / "data")), "train")
            assert all(found.image(i, 3) for i in range(len(found)))
        (folder / file).write_bytes(intact)


def test_exported_files_are_the_prepared_ones(tmp_path, cub):
    gif = unusual_images()["animated"]
    written = cub({FIRST: gif})
    prepared(tmp_path)
    assert export("cub200", tmp_path / "out", str(tmp_path / "data")) == 12
    files = sorted((tmp_path / "out/train/001.Bird_1").iterdir())
    assert [file.suffix for file in files] == 3 * [".jpg"]
    assert [file.read_bytes() for file in files] == [f.content for f in written["train"][:3]]
