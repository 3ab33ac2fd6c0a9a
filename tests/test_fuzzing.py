"""Damaged files of others are read, or refused in one sentence."""

import pathlib

import h5py
import numpy as np
import pytest
from PIL import Image

from hypjax.data import records
from hypjax.data.opening import Decoding, HeldOutClasses, open_photos
from hypjax.data.photos import find_images
from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings, open_gallery
from hypjax.geometry import PoincareBall
from tests.helpers import galleries, small_runs
from tests.helpers.pictures import encoded, write_pictures, write_table

ROWS = [{"path": f"{x}.png", "label": x, "split": "train"} for x in "ab"]


def write_features(path):
    with h5py.File(path, "w") as file:
        file["features"] = np.random.default_rng(0).normal(size=(9, 4))
        file["y"] = np.array([b"a", b"b", b"c"] * 3)


def read_images(path):
    train = open_photos(str(path.parents[1]), Decoding(3, False, None), HeldOutClasses(2, 0, 0))
    return [train.train.image(i, 3) for i in range(len(train.train))]


@pytest.mark.hygiene
@pytest.mark.parametrize(
    "name", ["table.csv", "table.parquet", "l.txt", "g.npz", "f.h5", "a/1.jpg", "a/1.png"]
)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    path, rng = tmp_path / name, np.random.default_rng(0)
    images = [f"{label}/{i}.{name[-3:]}" for label in "abcd" for i in (1, 2)]
    if name.startswith("a/"):
        write_pictures(tmp_path, images)
        read = read_images
    else:
        read = Embeddings.load if name in ("g.npz", "f.h5") else lambda path: find_images(str(path))
        lines = "".join(f"{row['path']} {row['label']}\n" for row in ROWS)
        write = {"l.txt": lambda path: path.write_text(lines), "f.h5": write_features}
        write["g.npz"] = small_runs.write_features
        write.get(name, lambda path: write_table(path, ROWS))(path)
    content = path.read_bytes()
    read(path)
    for _ in range(60):
        at, length = rng.integers(len(content)), rng.integers(40)
        path.write_bytes(content[:at] + rng.bytes(length) + content[at + rng.integers(40) :])
        try:
            read(path)
        except UserError as error:
            assert str(error) and "\n" not in str(error)


def facts_of(gallery):
    """All that a search depends on."""
    arrays = (np.asarray(x).tolist() for x in (gallery.vectors, gallery.ids, gallery.labels))
    return *arrays, str(gallery.space), gallery.fingerprint, gallery.model


def read_prepared(folder):
    opened = records.open_folder("letters", folder)
    images = records.open_records(opened, "train")
    names = images.names.tolist(), images.class_names.tolist(), images.labels.tolist()
    return opened.splits, *names, [images.image(i, 3).tobytes() for i in range(len(images))]


@pytest.mark.hygiene
@pytest.mark.parametrize("kind", ["npz", "ann", "prepared"])
def test_a_changed_byte_is_refused_or_changes_nothing(kind, tmp_path):
    folder, rng = tmp_path / f"g.{kind}", np.random.default_rng(0)
    ball = PoincareBall(0.1, 2.3)
    saved = galleries.embeddings(galleries.points(ball, 0, 8), ball)
    if kind == "npz":
        saved.save(folder)
    elif kind == "ann":
        ann = pytest.importorskip("hypjax.integrations.ann", reason="needs the ann extra")
        ann.export_ann(saved, folder)
    else:
        picture = encoded(Image.new("RGB", (4, 4)))
        examples = [records.Example(picture, 4, 4, f"{x}/1", x, "vowels") for x in "aeiou"]
        records.write_records(folder, "letters", records.Contents({"train": examples}, 5, {}), None)
    facts = read_prepared if kind == "prepared" else lambda path: facts_of(open_gallery(path))
    expected = facts(folder)
    for path in [folder] if folder.is_file() else filter(pathlib.Path.is_file, folder.rglob("*")):
        content = path.read_bytes()
        for at in rng.integers(len(content), size=100):
            changed = bytes([content[at] ^ (1 << rng.integers(8))])
            path.write_bytes(content[:at] + changed + content[at + 1 :])
            try:
                assert facts(folder) == expected
            except UserError as error:
                assert str(error) and "\n" not in str(error)
        path.write_bytes(content)
