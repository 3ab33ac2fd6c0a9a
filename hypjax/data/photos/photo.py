"""One image of the user's, and images as a dataset."""

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from hypjax.data import pixels
from hypjax.data.dataset import Dataset

# Modes that PNG files hold as they are.
_PNG_MODES = frozenset({"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"})
SPLITS = ("train", "validation", "test", "query", "gallery")


class Photo(NamedTuple):
    """One image of the user's.

    Attributes:
        path: Path of the file, or the name of an image in memory.
        label: Name of the class.
        split: One of `SPLITS`; None if the classes are not split yet.
        superlabel: Name of the class's group, if classes are grouped.
        image: The image, if it is in memory.
    """

    path: pathlib.Path
    label: str
    split: str | None = None
    superlabel: str | None = None
    image: Image.Image | None = None

    @property
    def content(self) -> pathlib.Path | Image.Image:
        """The image in memory, or else the path of its file."""
        return self.path if self.image is None else self.image


class Files(Sequence):
    """Image files as records, read on access; images in memory as files would hold them."""

    def __init__(self, contents: Sequence[pathlib.Path | Image.Image]) -> None:
        """Takes paths and images in the order of the records."""
        self._contents = [str(own) if isinstance(own, pathlib.Path) else own for own in contents]

    def __len__(self) -> int:
        """Number of files."""
        return len(self._contents)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        """Returns the i-th file's bytes under `image`."""
        content = self._contents[i]
        return {"image": pixels.read_bytes(content) if isinstance(content, str) else _file(content)}


def _file(image: Image.Image) -> bytes:
    """Returns a file that is decoded to the image."""
    file, exif = io.BytesIO(), image.getexif()
    image = image if image.mode in _PNG_MODES else image.convert("RGB")
    image.save(file, "png", compress_level=1, exif=exif)
    return file.getvalue()


def files_of(photos: Sequence[Photo]) -> Dataset:
    """Returns a dataset of unchecked images in the given order, without classes or sizes."""
    return Dataset(
        records=Files([photo.content for photo in photos]),
        positions=np.arange(len(photos)),
        labels=np.zeros(len(photos), np.int32),
        sizes=np.zeros((len(photos), 2), np.int32),
        names=[str(photo.path) for photo in photos],
        upright=True,
    )
