"""Users' own images: found in folders, tables and lists, or given from Python.

Features of another model stand for images where a run was trained on such features.
"""

import csv
import glob
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.data.shards import IMAGES, files_below, find_dataset, rows_of
from hypjax.errors import UserError, reason, require_utf8
from hypjax.retrieval.embeddings import read_features
from hypjax.retrieval.feature_files import FeatureTable, feature_table, has_features

SPLITS = ("train", "validation", "test", "query", "gallery")
TABLES = (".csv", ".parquet")  # Suffixes of tables.
Pixels = UInt8[np.ndarray, "height width *channels"]
Given = str | os.PathLike[str] | bytes | Image.Image | Pixels | Float[np.ndarray, "*images dim"]


class StoredImage(NamedTuple):
    """An image of a dataset, which is read when it is needed."""

    images: Sequence[Any]  # All of the dataset, such as `EncodedImages`.
    position: int

    def read(self) -> Any:
        """Returns the image, its file's content, or its path."""
        return self.images[self.position]


class Photo(NamedTuple):
    """One image of the user's."""

    path: pathlib.Path | str  # Of the file, or the name of an image in memory, or of features.
    label: str  # Name of the class.
    split: str | None = None  # One of `SPLITS`; None if the classes are not split yet.
    superlabel: str | None = None  # Name of the class's group, if classes are grouped.
    # If it, or its file, is in memory or in a file of many.
    image: Image.Image | bytes | StoredImage | None = None
    vector: Float[np.ndarray, " dim"] | None = None  # Its features, which stand for the image.

    @property
    def is_named(self) -> bool:
        """Whether the path names the image for good: it is none in memory, and no features."""
        return self.vector is None and not isinstance(self.image, Image.Image | bytes)

    @property
    def content(self) -> pathlib.Path | Image.Image | bytes | StoredImage:
        """The image in memory or in a file of many, or else the path of its own."""
        return self.path if self.image is None else self.image


def check_split(where: object, split: str | None) -> None:
    """Rejects the name of a split that is none of `SPLITS`."""
    if split not in (None, *SPLITS):
        raise UserError(f"{where} has the split {split!r}; splits are named {', '.join(SPLITS)}")


def given_photos(images: Given | Sequence[Given]) -> list[Photo]:
    """Finds the images that a caller gives; those in memory are named 'image 0', 'image 1', ...

    They are one of, or a sequence of: a path, for which see `find_photos`; the bytes of an image
    file; an image of Pillow's; pixels, uint8 of [height, width] or [height, width, channels] with
    1, 3 or 4 channels. An array of four axes holds several images. Floating-point numbers, [dim] or
    [images, dim], are features. A `datasets.Dataset` stands for its images. Raises UserError if
    there are none, or something is none.
    """
    if hasattr(images, "column_names"):
        images = rows_of(images, "the dataset").images
    if getattr(images, "ndim", 3) < 3 and images.dtype.kind == "f":
        table = feature_table({"features": np.atleast_2d(np.asarray(images))}, "the array")
        return photos_of_features(table)
    single = isinstance(images, str | os.PathLike | bytes | Image.Image)
    if single or getattr(images, "ndim", 4) < 4 or not isinstance(images, Iterable):
        images = [images]
    found = []
    for i, image in enumerate(images):
        name = pathlib.Path(f"image {i}")
        if isinstance(image, str | os.PathLike):
            found += find_photos(os.fspath(image))
        elif isinstance(image, bytes | Image.Image):
            found.append(Photo(name, "", image=image))
        elif hasattr(image, "__array__"):
            found.append(Photo(name, "", image=pixels.from_pixels(np.asarray(image), name)))
        else:
            kind = type(image).__name__
            raise UserError(f"{kind} is no image; give a path, an image of Pillow's, or an array")
    if not found:
        raise UserError("there are no images; give paths, images of Pillow's, or arrays of pixels")
    return found


def find_photos(where: str) -> list[Photo]:
    """Finds images to embed, without duplicates; the label is '' if the class is unknown.

    They are given by a folder, which is searched at any depth, see `list_folder`; a .csv or
    .parquet table, see `read_table`; a .txt file with one path per line, relative to the file's
    folder; a pattern such as 'photos/*.jpg'; one image; or a dataset of the hub, or in Parquet,
    Arrow or tar files, see `find_dataset`. A file of features, see
    `hypjax.retrieval.feature_files`, stands for its rows. Raises UserError if there are none, or a
    name is not UTF-8, which the formats of galleries cannot hold.
    """
    path = pathlib.Path(where).expanduser()
    if has_features(path):
        return photos_of_features(read_features(path))
    if photos := stored_photos(where):
        return photos
    if path.is_dir():
        photos = list_folder(path)
    elif path.suffix.lower() in TABLES:
        photos = read_table(path)
    elif path.suffix.lower() == ".txt":
        photos = [Photo(path.parent / line, "") for line in _read_lines(path)]
    elif path.is_file():
        photos = [Photo(path, "")]
    else:
        paths = map(pathlib.Path, sorted(glob.glob(str(path), recursive=True)))
        photos = [Photo(found, "") for found in paths if found.is_file()]
    if not photos:
        raise UserError(f"no images at {where}")
    unique = {os.path.realpath(photo.path): photo for photo in reversed(photos)}
    found = [photo._replace(path=photo.path.absolute()) for photo in reversed(unique.values())]
    require_utf8([str(photo.path) for photo in found])
    return found


def photos_of_features(table: FeatureTable) -> list[Photo]:
    """Lists the rows of a table of features, which stand for images."""
    none = [None] * len(table.ids)
    columns = (none if x is None else x.tolist() for x in (table.splits, table.superlabels))
    rows = zip(table.ids.tolist(), table.labels.tolist(), *columns, table.features, strict=True)
    return [
        Photo(name, label, split or None, group, vector=row)
        for name, label, split, group, row in rows
    ]


def stored_photos(where: str) -> list[Photo]:
    """Lists the images of a dataset in files of many, see `find_dataset`; none if it is no such.

    They are named by their splits and rows. Raises UserError for a split that is unknown, or if a
    label is in two groups.
    """
    photos = []
    for place, (images, labels, splits, superlabels) in (find_dataset(where) or {}).items():
        for split in set(splits or ()):
            check_split(f"{place} (without ?split=train+test, for example)", split)
        for i, label in enumerate(labels):
            group = superlabels[i] or None if superlabels else None
            split = splits[i] if splits else None
            photos.append(Photo(f"{place}/{i}", label, split, group, StoredImage(images, i)))
    return consistent(photos, where)


def consistent(photos: list[Photo], where: object) -> list[Photo]:
    """Rejects images of which only some have a split, or whose class is in two groups."""
    groups: dict[str, str | None] = {}
    for number, photo in enumerate(photos, start=1):
        place = f"{where}, row {number}"
        if (photo.split is None) != (photos[0].split is None):
            raise UserError(f"{place}: either all rows have a split or none has")
        group = groups.setdefault(photo.label, photo.superlabel)
        if photo.label and group != photo.superlabel:
            raise UserError(
                f"{place}: label {photo.label} has the superlabel {photo.superlabel} here, but "
                f"{group} before"
            )
    return photos


def _read_lines(path: pathlib.Path) -> list[str]:
    """Reads the non-empty lines of a text file."""
    try:
        lines = path.read_text("utf-8-sig").replace("\0", "").split("\n")
        return [line.strip() for line in lines if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: save it as UTF-8") from error


def list_folder(root: pathlib.Path) -> list[Photo]:
    """Lists the images below a folder, whose sub-folders are classes, or splits with class folders.

    The sub-folders are splits if one is named `train` and has sub-folders itself, and all have
    names from `SPLITS`. Files at any depth below a class belong to it; outside classes the label is
    ''. Hidden files and files without an image suffix are ignored.
    """
    names = {folder.name for folder in _subfolders(root)}
    has_splits = "train" in names and names <= set(SPLITS) and bool(_subfolders(root / "train"))
    photos = []
    for name in sorted(map(pathlib.PurePath, files_below(root))):
        if name.suffix.lower() in IMAGES:
            split = name.parts[0] if has_splits and len(name.parts) > 1 else None
            classes = name.parts[has_splits:-1]
            photos.append(Photo(root / name, classes[0] if classes else "", split))
    return photos


def list_classes(root: pathlib.Path) -> list[Photo]:
    """Lists the images of a folder that have a class; raises UserError if there are none."""
    names = {folder.name for folder in _subfolders(root)}
    if "train" in names and _subfolders(root / "train"):
        for name in sorted(names):
            check_split(root, name)
    if photos := [photo for photo in list_folder(root) if photo.label]:
        return photos
    raise UserError(
        f"no images in sub-folders of {root} ({', '.join(sorted(IMAGES))}); put the images of each "
        "class into one"
    )


def _subfolders(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error


def read_table(table: pathlib.Path) -> list[Photo]:
    """Reads the images that a CSV or Parquet table lists.

    Its columns are `path` (absolute, or relative to the table's folder), `label`, and optionally
    `split` (one of `SPLITS`) and `superlabel`. Raises UserError if the table cannot be read, lacks
    a column or a value, lists a file twice, or assigns a label to two groups.
    """
    seen: dict[str, int] = {}
    photos = []
    for number, row in enumerate(_read_rows(table), start=1):
        place = f"{table}, row {number}"
        path, label, split, superlabel = (
            None if row.get(name) in (None, "") else str(row[name])
            for name in ("path", "label", "split", "superlabel")
        )
        if path is None or label is None or "\0" in path:
            raise UserError(f"{place} needs a path, without null characters, and a label")
        check_split(place, split)
        photo = Photo(table.parent / path, label, split, superlabel)
        first = seen.setdefault(os.path.realpath(photo.path), number)
        if first != number:
            raise UserError(f"{place}: {path} is already in row {first}")
        photos.append(photo)
    if not photos:
        raise UserError(f"{table} has no rows")
    return consistent(photos, table)


def _read_rows(table: pathlib.Path) -> list[dict[str, Any]]:
    """Reads rows as dictionaries, and checks that the required columns exist."""
    try:
        if table.suffix.lower() == ".csv":
            with table.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                rows, columns = list(reader), reader.fieldnames or []
        else:
            import pyarrow.parquet

            content = pyarrow.parquet.read_table(table)
            rows, columns = content.to_pylist(), content.column_names
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {table}: save it as UTF-8") from error
    except Exception as error:  # pyarrow raises almost anything on damaged files.
        raise UserError(f"cannot read {table}: {reason(error)}") from error
    if missing := {"path", "label"} - set(columns):
        raise UserError(
            f"{table} has no column {max(missing)}; its columns are {', '.join(columns) or 'none'}"
        )
    return rows
