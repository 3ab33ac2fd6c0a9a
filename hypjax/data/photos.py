"""Users' own images: found in folders, tables and lists, or given from Python.

Features of another model stand for images where a run was trained on such features.
"""

import csv
import glob
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from hypjax.data.shards import IMAGES, ShardedDataset, files_below, find_shards
from hypjax.data.stored_images import StoredImage, open_stored
from hypjax.errors import UserError, require_utf8
from hypjax.retrieval.embeddings import read_features
from hypjax.retrieval.feature_files import FeatureTable, feature_table, has_features

SPLITS = ("train", "validation", "test", "query", "gallery")
TABLES = (".csv", ".parquet")  # Suffixes of tables.
_CHANNELS = ((), (1,), (3,), (4,))  # Shapes of an array's axes after height and width.
Pixels = UInt8[np.ndarray, "height width *channels"]
Given = str | os.PathLike[str] | bytes | Image.Image | Pixels | Float[np.ndarray, "*images dim"]


class Photo(NamedTuple):
    """One image of the user's."""

    path: pathlib.Path | str  # Of the file, or the name of an image in memory, or of features.
    label: str  # Name of the class.
    split: str | None = None  # One of `SPLITS`; None if the classes are not split yet.
    superlabel: str | None = None  # Name of the class's group, if classes are grouped.
    # If it, or its file, is in memory or in the cache.
    image: Image.Image | bytes | StoredImage | None = None
    vector: Float[np.ndarray, " dim"] | None = None  # Its features, which stand for the image.

    @property
    def is_named(self) -> bool:
        """Whether the path names the image for good: it is none in memory, and no features."""
        return self.vector is None and not isinstance(self.image, Image.Image | bytes)

    @property
    def content(self) -> pathlib.Path | Image.Image | bytes | StoredImage:
        """The image in memory or in the cache, or else the path of its file."""
        return self.path if self.image is None else self.image


def given_photos(images: Given | Sequence[Given]) -> list[Photo]:
    """Finds the images that a caller gives; those in memory are named 'image 0', 'image 1', ...

    They are one of, or a sequence of: a path, for which see `find_photos`; the bytes of an image
    file; an image of Pillow's; pixels, uint8 of [height, width] or [height, width, channels] with
    1, 3 or 4 channels. An array of four axes holds several images. Floating-point numbers, [dim] or
    [images, dim], are features. Raises UserError if there are none, or something is none.
    """
    if getattr(images, "ndim", 3) < 3 and images.dtype.kind == "f":
        table = feature_table({"features": np.atleast_2d(np.asarray(images))}, "the array")
        return _rows(table)
    single = isinstance(images, str | os.PathLike | bytes | Image.Image)
    if single or getattr(images, "ndim", 4) < 4:
        images = [images]
    try:
        found = [photo for i, image in enumerate(images) for photo in _given_photo(image, i)]
    except TypeError as error:
        raise _refusal(images) from error
    if not found:
        raise UserError("there are no images; give paths, images of Pillow's, or arrays of pixels")
    return found


def _given_photo(given: Any, number: int) -> list[Photo]:
    if isinstance(given, str | os.PathLike):
        return find_photos(os.fspath(given))
    name = pathlib.Path(f"image {number}")
    if isinstance(given, bytes | Image.Image):
        return [Photo(name, "", image=given)]
    if not hasattr(given, "__array__"):
        raise _refusal(given)
    values = np.asarray(given)
    if values.dtype != np.uint8 or values.ndim < 2 or values.shape[2:] not in _CHANNELS:
        raise UserError(
            f"an array of {values.dtype} with shape {list(values.shape)} is no image; pixels are "
            "uint8, [height, width] or [height, width, channels] with 1, 3 or 4 channels"
        )
    pixels = values[..., 0] if values.shape[2:] == (1,) else values
    return [Photo(name, "", image=Image.fromarray(pixels))]


def _refusal(given: Any) -> UserError:
    return UserError(
        f"{type(given).__name__} is no image; give a path, an image of Pillow's, or an array"
    )


def find_photos(where: str) -> list[Photo]:
    """Finds images to embed, without duplicates; the label is '' if the class is unknown.

    They are given by a folder, which is searched at any depth (its sub-folders, if any, are classes
    as for `list_folder`); a .csv or .parquet table, see `read_table`; a .txt file with one path per
    line, relative to the file's folder; a pattern such as 'photos/*.jpg'; or one image. A file of
    features, see `hypjax.retrieval.feature_files`, stands for its rows. For datasets in Parquet,
    Arrow or tar files, see `hypjax.data.shards`. Raises UserError if there are none, or a name is
    not UTF-8, which the formats of galleries cannot hold.
    """
    if dataset := find_shards(where):
        return sharded_photos(dataset)
    path = pathlib.Path(where).expanduser()
    if has_features(path):
        return _rows(read_features(path))
    if path.is_dir():
        photos = _list_tree(path)
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


def _rows(table: FeatureTable) -> list[Photo]:
    none = [None] * len(table.ids)
    columns = (none if x is None else x.tolist() for x in (table.splits, table.superlabels))
    rows = zip(table.ids.tolist(), table.labels.tolist(), *columns, table.features, strict=True)
    return [
        Photo(name, label, split or None, group, vector=row)
        for name, label, split, group, row in rows
    ]


def sharded_photos(dataset: ShardedDataset) -> list[Photo]:
    """Lists the images of a dataset in Parquet, Arrow or tar files, copied to the cache first.

    Raises UserError if they cannot be read, a split is unknown, some have a split and others none,
    or a label is in two groups.
    """
    groups: dict[str, str | None] = {}
    photos = []
    for name, label, split, superlabel, image in open_stored(dataset):
        photo = Photo(f"{dataset.root}/{name}", label, split, superlabel, image)
        if split not in (None, *SPLITS):
            raise UserError(
                f"{dataset.where} has a split {split}; name splits by ?split=, as in "
                "?split=train+test, which count as one"
            )
        _check_beside(photos, photo, groups, str(photo.path))
        photos.append(photo)
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
    """Lists the images of a folder whose sub-folders are classes, or splits with class folders.

    The sub-folders are splits if one is named `train` and has sub-folders itself; all must then
    have names from `SPLITS`. Files at any depth below a class belong to it. Hidden files and files
    without an image suffix are ignored. Raises UserError if there are no images.
    """
    folders = _subfolders(root)
    if not folders:
        raise UserError(f"{root} has no sub-folders; put the images of each class into one")
    names = {folder.name for folder in folders}
    if "train" in names and _subfolders(root / "train"):
        if others := names - set(SPLITS):
            raise UserError(
                f"{root} has {', '.join(sorted(others))} next to train, which holds classes; "
                f"splits must be named {', '.join(SPLITS)}"
            )
        classes = [(folder, split.name) for split in folders for folder in _subfolders(split)]
    else:
        classes = [(folder, None) for folder in folders]
    photos = [
        Photo(path, folder.name, split)
        for folder, split in classes
        for path in _image_files(folder)
    ]
    if not photos:
        raise UserError(f"no images in the sub-folders of {root} ({', '.join(sorted(IMAGES))})")
    return photos


def _list_tree(root: pathlib.Path) -> list[Photo]:
    """Lists all images below a folder, labelled and split as by `list_folder`.

    Outside classes the label is ''.
    """
    names = {folder.name for folder in _subfolders(root)}
    has_splits = "train" in names and names <= set(SPLITS) and bool(_subfolders(root / "train"))
    photos = []
    for path in _image_files(root):
        folders = path.relative_to(root).parts[:-1]
        split = folders[0] if has_splits and folders else None
        classes = folders[has_splits:]
        photos.append(Photo(path, classes[0] if classes else "", split))
    return photos


def _subfolders(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error


def _image_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Finds visible files with an image suffix at any depth; follows links."""
    return sorted(
        folder / name for name in files_below(folder) if os.path.splitext(name)[1].lower() in IMAGES
    )


def read_table(table: pathlib.Path) -> list[Photo]:
    """Reads the images that a CSV or Parquet table lists.

    Its columns are `path` (absolute, or relative to the table's folder), `label`, and optionally
    `split` (one of `SPLITS`) and `superlabel`. Raises UserError if the table cannot be read, lacks
    a column or a value, lists a file twice, or assigns a label to two groups.
    """
    groups: dict[str, str | None] = {}
    seen: dict[str, int] = {}
    photos = []
    for number, row in enumerate(_read_rows(table), start=1):
        place = f"{table}, row {number}"
        photo = _parse_row(table.parent, row, place)
        first = seen.setdefault(os.path.realpath(photo.path), number)
        if first != number:
            raise UserError(f"{place}: {row['path']} is already in row {first}")
        _check_beside(photos, photo, groups, place)
        photos.append(photo)
    if not photos:
        raise UserError(f"{table} has no rows")
    return photos


def _check_beside(
    photos: Sequence[Photo], photo: Photo, groups: dict[str, str | None], place: str
) -> None:
    """Rejects an image whose split or group contradicts the images before it."""
    if photos and (photo.split is None) != (photos[0].split is None):
        raise UserError(f"{place}: either all rows have a split or none has")
    group = groups.setdefault(photo.label, photo.superlabel)
    if photo.label and group != photo.superlabel:
        raise UserError(
            f"{place}: label {photo.label} has the superlabel {photo.superlabel} "
            f"here, but {group} before"
        )


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
        text = getattr(error, "strerror", None) or str(error)
        reason = next(iter(text.splitlines()), type(error).__name__)
        raise UserError(f"cannot read {table}: {reason}") from error
    for column in ("path", "label"):
        if column not in columns:
            found = f"its columns are {', '.join(columns)}" if columns else "it is empty"
            hint = "; separate columns by commas" if len(columns) == 1 else ""
            raise UserError(f"{table} has no column {column}; {found}{hint}")
    return rows


def _parse_row(folder: pathlib.Path, row: Mapping[str, Any], place: str) -> Photo:
    path, label, split, superlabel = (
        None if row.get(name) in (None, "") else str(row[name])
        for name in ("path", "label", "split", "superlabel")
    )
    for name, value in (("path", path), ("label", label)):
        if value is None:
            raise UserError(f"{place}: no {name}")
    if "\0" in path:
        raise UserError(f"{place}: its path contains a null character")
    if split not in (None, *SPLITS):
        raise UserError(f"{place}: split is {split}; it must be one of {', '.join(SPLITS)}")
    return Photo(folder / path, label, split, superlabel)
