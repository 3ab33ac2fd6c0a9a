"""One image of the user's, and image files as a dataset."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hypjax.data import pixels
from hypjax.data.dataset import Dataset

SPLITS = ("train", "validation", "test", "query", "gallery")


class Photo(NamedTuple):
    """One image of the user's.

    Attributes:
        path: Path of the file.
        label: Name of the class.
        split: One of `SPLITS`; None if the classes are not split yet.
        superlabel: Name of the class's group, if classes are grouped.
    """

    path: pathlib.Path
    label: str
    split: str | None = None
    superlabel: str | None = None


class Files(Sequence):
    """Image files as records, read on access."""

    def __init__(self, paths: Sequence[pathlib.Path]) -> None:
        """Takes the paths in the order of the records."""
        self._paths = [str(path) for path in paths]

    def __len__(self) -> int:
        """Number of files."""
        return len(self._paths)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        """Returns the i-th file's bytes under `image`."""
        return {"image": pixels.read_bytes(self._paths[i])}


def files_of(photos: Sequence[Photo]) -> Dataset:
    """Returns a dataset of unchecked images in the given order, without classes or sizes."""
    return Dataset(
        records=Files([photo.path for photo in photos]),
        positions=np.arange(len(photos)),
        labels=np.zeros(len(photos), np.int32),
        sizes=np.zeros((len(photos), 2), np.int32),
        names=[str(photo.path) for photo in photos],
        upright=True,
    )
