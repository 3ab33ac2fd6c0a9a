"""Lists users' own images or features: from folders, tables, lists of paths, and Python."""

import collections
import csv
import functools
import glob
import io
import mimetypes
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.data.dataset import Dataset, hash_facts, stacked, table_of_names
from hypjax.data.fetching import ENCODING, image_at, local_path
from hypjax.data.folders import FolderWalk
from hypjax.data.shards import SHARDS, find_dataset, table_of
from hypjax.errors import UserError, counted, explained, require_utf8
from hypjax.retrieval.embeddings import read_features
from hypjax.retrieval.feature_files import FeatureTable, feature_table, has_features
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.files import absolute, checksum, read_csv, read_parquet, write_text
from hypjax.types import SPLITS, cased_alike, class_name, split_name, split_names

# Formats that Pillow registers without a decoder, or that hold no pixels.
_NO_IMAGES = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}
_CLASS_FOLDERS = "put each class's images into a sub-folder, or list them in a table"
_MIME_TYPES = mimetypes.MimeTypes(filenames=())  # Python's types, the same on all machines.
_BOX = ("x_1", "y_1", "x_2", "y_2")  # Columns of boxes in open-metric-learning.
# Cells of the columns is_query and is_gallery in open-metric-learning.
_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}
Pixels = UInt8[np.ndarray, "height width *channels"]
ImageLike = str | os.PathLike[str] | bytes | Image.Image | Pixels | Float[np.ndarray, "*images dim"]


def given_images(images: ImageLike | Sequence[ImageLike]) -> Dataset:
    """Makes a table of images or features from Python.

    Images in memory are named 'image 0', 'image 1', ...

    Args:
        images: One image or a sequence of images, each a path (see `find_images`), the bytes of an
            image file, a Pillow image, or pixels: uint8, uint16 or bool, [height, width] or
            [height, width, channels] with 1 to 4 channels. An array with four axes is a sequence
            of images. A floating-point array, [dim] or [images, dim], holds features. A
            `datasets.Dataset` stands for its images.
    """
    if hasattr(images, "column_names"):
        return table_of(images, "the dataset")
    dtype_kind = getattr(getattr(images, "dtype", None), "kind", None)
    if dtype_kind == "f" and images.ndim < 3:
        arrays = {"features": np.atleast_2d(np.asarray(images))}
        return _table_of_features(feature_table(arrays, "the array"))
    if dtype_kind in ("O", "U"):  # An array of paths or other Python objects.
        images = np.ravel(np.asarray(images)).tolist()
    if isinstance(images, Set | Mapping):
        raise UserError(f"{type(images).__name__} has no order of rows; give a list of images")
    is_file = isinstance(images, str | os.PathLike | bytes | io.IOBase)  # Iterable, but one image.
    is_image_array = hasattr(images, "ndim") and images.ndim < 4
    if is_file or is_image_array or not isinstance(images, Iterable):
        images = [images]
    tables = [_table_of_image(image, f"image {i}") for i, image in enumerate(images)]
    if not tables:
        raise UserError("there are no images; give paths, Pillow images, or arrays of pixels")
    return stacked(tables)


def _table_of_image(image: ImageLike, name: str) -> Dataset:
    """Makes a table of an image in memory, which gets the name, or of the images at a path."""
    if isinstance(image, str | os.PathLike):
        return find_images(os.fspath(image))
    if not isinstance(image, bytes | Image.Image):
        if not hasattr(image, "__array__"):
            kind = type(image).__name__
            raise UserError(f"{kind} is no image; give a path, bytes, a Pillow image or an array")
        pixels.from_pixels(image := np.asarray(image), name)  # Only checks it.
    return table_of_names([image], [name], [""])


def find_images(where: str, exclude: Sequence[str] = ()) -> Dataset:
    """Lists images to embed, see `list_images`, and checks columns and names of image files."""
    images = list_images(where, exclude)
    if images.vectors is None and isinstance(images.records[0], str):  # The images are files.
        check_columns(where, images)
        require_utf8(images.names)
    return images


def list_images(where: str, exclude: Sequence[str] = (), *, skip_corrupt: bool = True) -> Dataset:
    """Lists the images at a location; unknown classes are ''.

    A location is a folder (see `list_folder`), a .csv or .parquet table (see `read_table`), a .txt
    file of paths relative to its folder, a pattern such as 'photos/*.jpg', an image, the URL of an
    image, an archive, a dataset (see `find_dataset`), or a file of features (see
    `hypjax.retrieval.feature_files`). `FolderWalk` describes the other arguments, which are for
    folders, archives and patterns. Raises a UserError if there are no images.
    """
    if where.startswith(("http://", "https://")):
        return image_at(where)
    path = local_path(where)
    where = where.partition(ENCODING)[0]
    if not all(pathlib.PurePath(pattern).parts for pattern in exclude):
        raise UserError("a pattern to exclude is empty; give a name, or the end of a path")
    if exclude and ("://" in where or os.path.isfile(path)):
        raise UserError(f"{where} is no folder, archive or pattern, of which to exclude files")
    if has_features(path):
        return read_vectors(path)
    walk = FolderWalk(exclude, skip_corrupt)
    if os.path.isdir(path) and len(images := list_folder(path, walk)):
        return images
    is_image = path.suffix.lower() in image_suffixes()
    if not is_image and (dataset := find_dataset(where)) is not None:
        return dataset
    if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        images = read_table(path)
    elif path.suffix.lower() == ".txt":
        with explained(f"cannot read {path}"):
            lines = map(str.strip, path.read_text("utf-8-sig").split("\n"))
        images = _table_of_files([path.parent / line for line in lines if line])
    else:
        names = [] if os.path.isdir(path) else walk.matches(str(path))
        images = _table_of_files([*map(pathlib.Path, names)])
    if not len(images):
        is_missing = not os.path.lexists(path) and not glob.has_magic(where)
        is_pattern = "[" in where and not os.path.isdir(path)
        advice = "[...] is one letter, or in a folder's name" if is_pattern else _CLASS_FOLDERS
        raise UserError(
            f"{where} does not exist" if is_missing else f"no images at {where}; {advice}"
        )
    return images


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Returns the suffixes of all image formats that Pillow reads."""
    suffixes = Image.registered_extensions().items()  # Loads all plugins, which fill Image.OPEN.
    formats = Image.OPEN.keys() - _NO_IMAGES | {"MPO"}  # Pillow's reader of JPEG opens MPO.
    return frozenset(suffix for suffix, name in suffixes if name in formats)


def _table_of_files(
    paths: Sequence[pathlib.Path],
    classes: Sequence[str] = (),
    splits: Sequence[str] = (),
    coarse_labels: Sequence[str] = (),
) -> Dataset:
    """Makes a table of image files, whose records are their paths."""
    names = [str(absolute(path)) for path in paths]
    classes = classes or [""] * len(paths)
    versions = map(_file_version, paths)
    return table_of_names(
        names, names, classes, splits=splits, coarse_labels=coarse_labels, file_versions=versions
    )


def _file_version(path: pathlib.Path) -> tuple[str, tuple[int, int] | None]:
    """Returns a file's absolute path, and its size and time of change; None if it is missing."""
    if not os.path.exists(path):
        return str(absolute(path)), None
    stat = path.stat()
    return str(absolute(path)), (stat.st_size, stat.st_mtime_ns)


def read_vectors(path: str | os.PathLike[str], labels: str | None = None) -> Dataset:
    """Reads a file of features or points; `labels` is the file of their labels, if separate."""
    files = [pathlib.Path(file).expanduser() for file in (path, labels) if file is not None]
    return _read_vectors(*map(_file_version, files))


@functools.lru_cache(maxsize=1)  # A run reads the features' dimension before the features.
def _read_vectors(*file_versions: tuple[str, tuple[int, int] | None]) -> Dataset:
    return _table_of_features(read_features(*(path for path, _ in file_versions)))


def _table_of_features(features: FeatureTable) -> Dataset:
    """Makes a table of images of which only features are known."""
    return table_of_names(
        features.ids,
        features.ids,
        features.labels.tolist(),
        splits=() if features.splits is None else features.splits.tolist(),
        coarse_labels=() if features.coarse_labels is None else features.coarse_labels.tolist(),
        file_versions=[checksum(np.ascontiguousarray(row)) for row in features.features],
        vectors=np.asarray(features.features, np.float32),
    )


def check_columns(where: object, images: Dataset) -> None:
    """Rejects unknown or missing splits and coarse labels, and classes with two coarse labels.

    Says which classes differ only in upper and lower case.
    """
    if note := cased_alike(images.class_names):
        console.say(note)
    splits = () if images.splits is None else images.splits
    for row, split in enumerate(splits, 1):
        if split not in SPLITS:
            problem = f"{where}, row {row} ({images.name(row - 1)}) has the split '{split}'"
            raise UserError(f"{problem}; give all rows one of {', '.join(SPLITS)}, or none")
    if images.coarse_labels is None:
        return
    coarse_label_of: dict[str, str] = {}  # By class.
    labels = zip(images.class_names, images.coarse_labels, strict=True)
    for row, (name, coarse) in enumerate(labels, 1):
        if not coarse:
            raise UserError(f"{where}, row {row} has no coarse label, and other rows have one")
        first = coarse_label_of.setdefault(name, coarse)
        if coarse != first:
            raise UserError(f"{where}, row {row}: {name} has coarse labels {first} and {coarse}")


def list_folder(root: pathlib.Path, walk: FolderWalk | None = None) -> Dataset:
    """Lists the images below a folder of class folders, or of split folders with class folders.

    The sub-folders are splits if all are named like splits (see `split_name`), or if one that has
    sub-folders itself is. A class's images lie at any depth below the class folder. Images outside
    class folders have the class ''.
    """
    walk = walk or FolderWalk()
    files = sorted(map(pathlib.PurePath, walk.files(root)))
    walk.report(root)
    images = [file for file in files if file.suffix.lower() in image_suffixes()]
    _warn_of_unlisted(root, files)
    paths = [root / image for image in images]
    folders = [image.parts[:-1] for image in images]
    top_folders = ["".join(parts[:1]) for parts in folders]  # '' for images outside folders.
    other_folders = {*map(split_name, top_folders)} - SPLITS.keys()
    nested = {split_name(parts[0]) for parts in folders if len(parts) > 1}
    has_splits = other_folders <= {""} or not nested.isdisjoint(SPLITS)
    depth = 2 if has_splits else 1  # Of class folders.
    for parts in [parts for parts in folders if len(parts) > depth][:1]:
        example = f"{'/'.join(parts)} has images of the class {parts[depth - 1]}"
        console.say(f"sub-folders of class folders are not classes: {example} (in {root})")
    if not any(folders) or not has_splits:
        return _table_of_files(paths, classes=top_folders)
    if other_folders:
        other = min(other_folders) or "images"
        problem = f"{root} has {other} beside folders of splits ({', '.join(SPLITS)})"
        raise UserError(f"{problem}; move {other} away, or list the images in a table")
    classes = ["".join(parts[1:2]) for parts in folders]
    return _table_of_files(paths, classes, splits=top_folders)


def _warn_of_unlisted(root: pathlib.Path, files: Sequence[pathlib.PurePath]) -> None:
    """Warns of images that Pillow cannot read, and of files of unknown kinds."""
    known = image_suffixes() | {*SHARDS, ".npz", ".npy"}
    counts = collections.Counter()
    for file in files:
        mime_type, suffix = _MIME_TYPES.guess_type(file.name)[0], file.suffix.lower()
        if suffix not in known and (mime_type is None or mime_type.startswith("image/")):
            counts[suffix or "without a suffix"] += 1
    if counts:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(20))
        heif = f"; .heic needs {pixels.HEIF_INSTALLATION}" if ".heic" in counts else ""
        left_out = f"{counts.total()} of {len(files)} files in {root} are left out"
        console.warn(f"{left_out}, of kinds that cannot be read: {kinds}{heif}")


def read_table(table: pathlib.Path) -> Dataset:
    """Reads the images that a CSV or Parquet table lists.

    The table's columns are `path` (absolute, or relative to the table's folder), `label`, and
    optionally `coarse_label` and `split`. Like open-metric-learning, it may have `is_query` and
    `is_gallery` instead of `split`.
    """
    rows = _read_rows(table)
    row_of: dict[tuple[pathlib.Path, str, str], int] = {}  # By path, label and split.
    coarse_labels, labels_of = [], collections.defaultdict(set)
    for number, (row, splits) in enumerate(zip(rows, _splits(table, rows), strict=True), start=1):
        where, path = f"{table}, row {number}", row.get("path")
        label = class_name(row.get("label"), where)
        coarse_label = class_name(row.get("coarse_label"), where)
        if not (isinstance(path, str) and path and "\0" not in path and label):
            raise UserError(f"{where} needs a path without null bytes, and a label")
        if "\n" in path + label:
            raise UserError(f"{where} has a line break in its path or label; mend its quotes")
        file = absolute(table.parent / path)
        labels_of[file].add(label)
        for split in splits:
            if (file, label, split) in row_of:
                raise UserError(f"{where}: {path} is already in row {row_of[file, label, split]}")
            row_of[file, label, split] = number
            coarse_labels.append(coarse_label)
    if not rows:
        raise UserError(f"{table} has no rows")
    several = [file for file, labels in labels_of.items() if len(labels) > 1]
    if several:
        images = counted(len(several), "image")
        console.warn(f"{table} has {images} with several labels, such as {min(several)}")
    if any(row.get(name) for row in rows for name in _BOX):
        console.warn(f"{table} has boxes ({', '.join(_BOX)}), which are not used; crop the images")
    files, labels, splits = zip(*row_of, strict=True)
    return _table_of_files(files, labels, splits, coarse_labels)


def _splits(table: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Returns the splits of each row: from the column `split`, or from is_query and is_gallery.

    If the queries are the same images as the gallery, both are one split, test. Without a column
    `split`, rows that are neither queries nor in the gallery are training images.
    """

    def flags(column: str) -> list[bool]:
        return [_FLAGS[class_name(row.get(column), str(table)).lower()] for row in rows]

    try:
        is_query, is_gallery = flags("is_query"), flags("is_gallery")
    except KeyError as error:
        raise UserError(f"{table}: is_query, is_gallery are True or False, not {error}") from None
    named_splits = split_names(row.get("split") for row in rows)
    if not any(is_query + is_gallery):
        return [[split] for split in named_splits]
    query_and_gallery = ["test"] if is_query == is_gallery else ["query", "gallery"]
    splits_of = {
        (True, True): query_and_gallery,
        (True, False): ["query"],
        (False, True): ["gallery"],
    }
    splits = []
    for i, split in enumerate(named_splits):
        roles = is_query[i], is_gallery[i]
        if any(roles) and split == "train":
            raise UserError(f"{table}, row {i + 1} is a query or in the gallery, and in train")
        splits.append(splits_of.get(roles, [split if "split" in rows[i] else "train"]))
    return splits


def _read_rows(table: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows of a CSV or Parquet table as dictionaries."""
    with explained(f"cannot read {table}"):
        if table.suffix.lower() == ".parquet":
            content = read_parquet(table)
            columns, rows = content.column_names, content.to_pylist()
        else:
            columns, cells = read_csv(table)
            rows = [dict(zip(columns, row, strict=True)) for row in cells]
    if missing := {"path", "label"} - set(columns):
        raise UserError(f"{table} has no column {max(missing)}, only {', '.join(columns)}")
    return rows


def labelled_images(dataset: Any) -> Dataset:
    """Lists the images of a dataset that is passed from Python, without reading them.

    A dataset is a pair (images, labels) of two sequences: arrays or Pillow images, and numbers or
    names; or pairs (image, label) or (path, label); or a `datasets.Dataset` with a column of
    images, a column of labels, and optionally of splits and coarse classes; or {split: dataset}.
    """
    if isinstance(dataset, Mapping) and dataset:
        tables = []
        for split, split_dataset in zip(split_names(dataset), dataset.values(), strict=True):
            table = _labelled(split_dataset)
            tables.append(replace(table, splits=np.full(len(table), split)))
        images = stacked(tables)
    else:
        images = _labelled(dataset)
    if not len(images):
        raise UserError("the dataset has no images")
    if images.path(0):  # The images are files.
        return images
    return replace(images, names=np.array([f"image {i}" for i in range(len(images))], object))


def _labelled(dataset: Any) -> Dataset:
    """Lists the images of a dataset as in `labelled_images`, except for {split: dataset}."""
    if hasattr(dataset, "column_names"):
        return table_of(dataset, "the dataset")
    pairs = dataset
    if isinstance(dataset, tuple) and len(dataset) == 2:
        images, labels = dataset
        if hasattr(images, "__array__"):
            images = np.asarray(images)
        if len(images) != len(labels):
            raise UserError(f"the dataset has {len(images)} images, but {len(labels)} labels")
        pairs = zip(images, labels, strict=True)
    try:
        pairs = [(image, label) for image, label in pairs]
    except (TypeError, ValueError) as error:
        remedy = "give (images, labels), pairs, a dataset of Hugging Face, or {split: ...}"
        raise UserError(f"{type(dataset).__name__} is no dataset; {remedy}") from error
    images = [image for image, _ in pairs]
    classes = [class_name(label, f"label of image {i}") for i, (_, label) in enumerate(pairs)]
    if "" in classes:
        missing = f"{classes.count('')} of the {len(classes)} images have no label"
        raise UserError(f"{missing}, such as image {classes.index('')}; give one, or leave it out")
    if images and isinstance(images[0], str | os.PathLike):
        return _table_of_files([pathlib.Path(image).expanduser() for image in images], classes)
    return table_of_names(images, [""] * len(images), classes)


def write_table(images: Dataset) -> pathlib.Path:
    """Writes a table of image files to the cache, with a hash of its content as its name."""
    splits = [""] * len(images) if images.splits is None else images.splits
    text = io.StringIO()
    rows = zip(images.names, images.class_names, splits, strict=True)
    csv.writer(text).writerows([("path", "label", "split"), *rows])
    file = cache_folder() / "tables" / f"{hash_facts([text.getvalue()])}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())
    return file
