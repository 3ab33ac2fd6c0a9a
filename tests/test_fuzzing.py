"""Damaged files of others are read, or refused in one sentence."""

import numpy as np
import pytest

from hypjax.data.photos import read_table
from hypjax.data.splits import Decoding, HeldOutClasses, open_photos
from hypjax.errors import UserError
from hypjax.retrieval.embeddings import Embeddings
from tests.helpers.pictures import write_pictures, write_table


def read_images(path):
    train = open_photos(str(path.parents[1]), Decoding(3, False, None), HeldOutClasses(2, 0, 0))
    return [train.train.image(i, 3) for i in range(len(train.train))]


READERS = {".csv": read_table, ".parquet": read_table, ".npz": Embeddings.load}


@pytest.mark.hygiene
@pytest.mark.parametrize("name", ["table.csv", "table.parquet", "g.npz", "a/1.jpg", "a/1.png"])
def test_damaged_files_are_read_or_refused(name, tmp_path):
    path, rng = tmp_path / name, np.random.default_rng(0)
    if path.suffix in (".jpg", ".png"):
        write_pictures(tmp_path, [f"{label}/{i}{path.suffix}" for label in "abcd" for i in (1, 2)])
    elif path.suffix == ".npz":
        names = np.array(["a", "b"])
        np.savez(path, features=np.ones((2, 4), np.float32), ids=names, labels=names)
    else:
        write_table(path, [{"path": f"{x}.png", "label": x, "split": "train"} for x in "ab"])
    content, read = path.read_bytes(), READERS.get(path.suffix, read_images)
    read(path)
    for _ in range(60):
        start, length = rng.integers(len(content)), rng.integers(40)
        end = start + rng.integers(40)
        path.write_bytes(content[:start] + rng.bytes(length) + content[end:])
        try:
            read(path)
        except UserError as error:
            assert str(error) and "\n" not in str(error)
