"""Damaged files of others are read, or refused in one sentence."""

import h5py
import numpy as np
import pytest

from hypjax.data.photos import find_images
from hypjax.data.splits import Decoding, HeldOutClasses, open_photos
from hypjax.errors import UserError
from hypjax.retrieval.embeddings import Embeddings
from tests.helpers.pictures import write_pictures, write_table

ROWS = [{"path": f"{x}.png", "label": x, "split": "train"} for x in "ab"]


def write_gallery(path):
    names = np.array(["a", "b"])
    np.savez(path, features=np.ones((2, 4), np.float32), ids=names, labels=names)


def write_lines(path):
    path.write_text("".join(f"{row['path']} {row['label']}\n" for row in ROWS))


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
        write = {"g.npz": write_gallery, "f.h5": write_features, "l.txt": write_lines}
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
