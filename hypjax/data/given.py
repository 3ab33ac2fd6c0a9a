"""Datasets that are given from Python: images in memory, or paths, with their labels."""

import csv
import hashlib
import io
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hypjax.config.choices import GIVEN
from hypjax.data.photos import Photo, StoredImage, check_split
from hypjax.data.shards import rows_of
from hypjax.errors import UserError
from hypjax.system.caches import cache_folder
from hypjax.system.files import write_text


def photos_of(dataset: Any) -> list[Photo]:
    """Lists the images of a dataset, each with its place there: a `StoredImage`.

    A dataset is one of

    - (images, labels): two sequences, of arrays or images of Pillow's, and of numbers or names;
    - pairs (image, label) or (path, label), in any iterable;
    - a `datasets.Dataset` of Hugging Face with a column of images and one of labels;
    - {split: any of these}, with splits named as the sub-folders of a folder.

    Raises:
        UserError: It is none, or lacks something.
    """
    if isinstance(dataset, Mapping):
        for split in dataset:
            check_split("the dataset", split)
        parts = [(split, photo) for split, part in dataset.items() for photo in photos_of(part)]
        return [
            photo._replace(path=f"image {i}", split=split) for i, (split, photo) in enumerate(parts)
        ]
    if hasattr(dataset, "column_names"):
        images, labels, *_ = rows_of(dataset, "the dataset")
    elif isinstance(dataset, tuple) and len(dataset) == 2:
        images, labels = dataset
        images = np.asarray(images) if hasattr(images, "__array__") else images
        if len(images) != len(labels):
            raise UserError(f"the dataset has {len(images)} images, but {len(labels)} labels")
    else:
        try:
            pairs = [(image, label) for image, label in dataset]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{type(dataset).__name__} is no dataset; give (images, labels), pairs of an image "
                "or a path and its label, a dataset of Hugging Face, or a dictionary of these by "
                "split"
            ) from error
        images, labels = [image for image, _ in pairs], [label for _, label in pairs]
    names = [str(label.item() if hasattr(label, "item") else label) for label in labels]
    if not names:
        raise UserError("the dataset has no images")
    return [Photo(f"image {i}", name, image=StoredImage(images, i)) for i, name in enumerate(names)]


_given: list[Photo] = []  # The dataset of this process, if there is one.


def give(dataset: Any) -> dict[str, str | None]:
    """Makes a dataset that of this process; returns the fields of `config.data` that name it.

    Paths are listed in a table, which any process can read later.
    """
    if isinstance(dataset, str | os.PathLike):
        return {"name": "folder", "path": os.fspath(dataset)}
    photos = photos_of(dataset)
    if isinstance(photos[0].image.read(), str | os.PathLike):
        return {"name": "folder", "path": str(_table(photos))}
    _given[:] = photos
    return {"name": GIVEN, "path": None}


def given() -> list[Photo]:
    """The images of this process's dataset; a `UserError` if there is none."""
    if not _given:
        raise UserError(
            "the images of this run were given from Python, and this process does not have them; "
            "pass them to hypjax.train as dataset=, or search other images with the model"
        )
    return list(_given)


def _table(photos: Iterable[Photo]) -> pathlib.Path:
    """Writes a table of paths to the cache, under a name that depends on all that it lists."""
    rows = [("path", "label", "split")]
    for photo in photos:
        path = pathlib.Path(photo.image.read()).expanduser().absolute()
        rows.append((str(path), photo.label, photo.split or ""))
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    digest = hashlib.sha256(text.getvalue().encode()).hexdigest()[:32]
    file = cache_folder() / "tables" / f"{digest}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())
    return file
