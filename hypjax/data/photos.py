"""Lists users' own images or features: from folders, tables, lists of paths, and Python."""

import collections
import csv
import functools
import glob
import io
import mimetypes
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.data.dataset import Dataset, hash_facts, stacked, table_of_names
from hypjax.data.fetching import image_at, local_path
from hypjax.data.shards import SHARDS, files_below, find_dataset, folders_below, table_of
from hypjax.errors import UserError, counted, explained, require_utf8
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.files import absolute, checksum, read_csv, read_parquet, write_text
from hypjax.types import SPLITS, class_name, split_name, split_names

# Formats that Pillow registers without a decoder, or that hold no pixels.
_NO_IMAGES = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}
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
    if getattr(images, "ndim", 3) < 3 and images.dtype.kind == "f":
        from hypjax.retrieval.feature_files import feature_table

        arrays = {"features": np.atleast_2d(np.asarray(images))}
        return _table_of_features(feature_table(arrays, "the array"))
    if getattr(getattr(images, "dtype", None), "kind", "") in ("O", "U"):
        images = np.ravel(np.asarray(images)).tolist()
    if isinstance(images, Set | Mapping):
        raise UserError(f"{type(images).__name__} has no order of rows; give a list of images")
    single = isinstance(images, str | os.PathLike | bytes | Image.Image | io.IOBase)
    if single or getattr(images, "ndim", 4) < 4 or not isinstance(images, Iterable):
        images = [images]
    tables = []
    for i, image in enumerate(images):
        if isinstance(image, str | os.PathLike):
            tables.append(find_images(os.fspath(image)))
            continue
        if hasattr(image, "__array__") and not isinstance(image, Image.Image):
            image = pixels.from_pixels(np.asarray(image), f"image {i}")
        elif not isinstance(image, bytes | Image.Image):
            kind = type(image).__name__
            raise UserError(f"{kind} is no image; give a path, bytes, a Pillow image or an array")
        tables.append(table_of_names([image], [f"image {i}"], [""]))
    if not tables:
        raise UserError("there are no images; give paths, Pillow images, or arrays of pixels")
    return stacked(tables)


def find_images(where: str) -> Dataset:
    """Lists images to embed, see `list_images`, and checks their columns and file names."""
    images = list_images(where)
    if images.vectors is None and isinstance(images.records[0], str):  # The images are files.
        check_columns(where, images)
        require_utf8(images.names)
    return images


def list_images(where: str) -> Dataset:
    """Lists the images at a location; unknown classes are ''.

    A location is a folder (see `list_folder`), a .csv or .parquet table (see `read_table`), a .txt
    file of paths relative to its folder, a pattern such as 'photos/*.jpg', an image, the URL of an
    image, an archive, a dataset (see `find_dataset`), or a file of features (see
    `hypjax.retrieval.feature_files`). Raises a UserError if there are no images.
    """
    from hypjax.retrieval.feature_files import has_features

    if where.startswith(("http://", "https://")):
        return image_at(where)
    path = local_path(where)
    if has_features(path):
        return read_vectors(path)
    if path.is_dir() and len(images := list_folder(path)):
        return images
    is_image = path.suffix.lower() in image_suffixes()
    if not is_image and (dataset := find_dataset(where)) is not None:
        return dataset
    if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        images = read_table(path)
    elif path.suffix.lower() == ".txt":
        with explained(f"cannot read {path}"):
            lines = map(str.strip, path.read_text("utf-8-sig").split("\n"))
        images = _files([path.parent / line for line in lines if line])
    else:
        names = [str(path)] if path.is_file() else sorted(_matching(str(path)))
        images = _files([pathlib.Path(name) for name in names if not os.path.isdir(name)])
    if not len(images):
        missing = not os.path.lexists(path) and not glob.has_magic(where)
        raise UserError(f"{where} does not exist" if missing else f"no images at {where}")
    return images


def _matching(pattern: str) -> set[str]:
    """Finds the files that match a pattern, in which ** stands for folders at any depth."""
    # `glob` itself would follow a link to a folder that contains the link 40 times.
    start, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/|$)", pattern, maxsplit=1)
    if not rest:
        return {*glob.glob(pattern)}
    names = set()
    for root in glob.glob(start) if start else ["."]:
        for folder, _ in folders_below(pathlib.Path(root)):
            names |= _matching(f"{glob.escape(str(folder))}/{rest[0] or '*'}")
    return names


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Returns the suffixes of all image formats that Pillow reads."""
    suffixes = Image.registered_extensions().items()  # Loads all plugins, which fill Image.OPEN.
    formats = Image.OPEN.keys() - _NO_IMAGES | {"MPO"}  # Pillow's reader of JPEG opens MPO.
    return frozenset(suffix for suffix, name in suffixes if name in formats)


def _files(
    paths: Sequence[pathlib.Path],
    classes: Sequence[str] = (),
    splits: Sequence[str | None] = (),
    coarse_labels: Sequence[str | None] = (),
) -> Dataset:
    names = [str(absolute(path)) for path in paths]
    return table_of_names(
        names,
        names,
        classes or [""] * len(paths),
        splits=splits,
        coarse_labels=coarse_labels,
        file_versions=map(_file_version, paths),
    )


def _file_version(path: pathlib.Path) -> tuple[str, tuple[int, int] | None]:
    """Returns a file's path, size and time of change, without reading the file."""
    stat = path.stat() if os.path.exists(path) else None
    return str(absolute(path)), stat and (stat.st_size, stat.st_mtime_ns)


def read_vectors(path: str | os.PathLike[str], labels: str | None = None) -> Dataset:
    """Reads a file of features or points; `labels` is the file of their labels, if separate."""
    files = [pathlib.Path(file).expanduser() for file in (path, labels) if file is not None]
    return _read_vectors(*map(_file_version, files))


@functools.lru_cache(maxsize=1)  # A run reads the features' dimension before the features.
def _read_vectors(*files: tuple[str, Any]) -> Dataset:
    from hypjax.retrieval.embeddings import read_features

    return _table_of_features(read_features(*(name for name, _ in files)))


def _table_of_features(table: Any) -> Dataset:
    return table_of_names(
        table.ids,
        table.ids,
        table.labels.tolist(),
        splits=() if table.splits is None else table.splits.tolist(),
        coarse_labels=() if table.coarse_labels is None else table.coarse_labels.tolist(),
        file_versions=[checksum(np.ascontiguousarray(row)) for row in table.features],
        vectors=np.asarray(table.features, np.float32),
    )


def check_columns(where: object, images: Dataset) -> None:
    """Rejects unknown or missing splits and coarse labels, and classes with two coarse labels."""
    for row, split in enumerate(() if images.splits is None else images.splits, 1):
        if split not in SPLITS:
            problem = f"{where}, row {row} ({images.name(row - 1)}) has the split '{split}'"
            raise UserError(f"{problem}; give all rows one of {', '.join(SPLITS)}, or none")
    if images.coarse_labels is None:
        return
    coarse_of: dict[str, str] = {}
    pairs = zip(images.class_names, images.coarse_labels, strict=True)
    for row, (label, coarse) in enumerate(pairs, 1):
        if not coarse:
            raise UserError(f"{where}, row {row} has no coarse label, and other rows have one")
        if (first := coarse_of.setdefault(label, coarse)) != coarse:
            raise UserError(f"{where}, row {row}: {label} has coarse labels {first} and {coarse}")


def list_folder(root: pathlib.Path) -> Dataset:
    """Lists the images below a folder of class folders, or of split folders with class folders.

    The sub-folders are splits if all are named like splits (see `split_name`), or if one that has
    sub-folders itself is. A class's images lie at any depth below the class folder. Images outside
    class folders have the class ''.
    """
    files = sorted(map(pathlib.PurePath, files_below(root)))
    images = [file for file in files if file.suffix.lower() in image_suffixes()]
    _warn_of_unlisted(root, files)
    folders = {split_name(image.parts[0]) for image in images if len(image.parts) > 1}
    nested = {split_name(image.parts[0]) for image in images if len(image.parts) > 2}
    has_splits = folders <= SPLITS.keys() or not nested.isdisjoint(SPLITS)
    classes = [next(iter(image.parts[has_splits:-1]), "") for image in images]
    splits = [image.parts[0] if has_splits and len(image.parts) > 1 else "" for image in images]
    unknown = {*map(split_name, splits)} - SPLITS.keys()
    if has_splits and folders and unknown:
        other = min(unknown) or "images"
        raise UserError(f"{root} has {other} beside folders of splits ({', '.join(SPLITS)})")
    return _files([root / image for image in images], classes, splits)


def _warn_of_unlisted(root: pathlib.Path, files: Sequence[pathlib.PurePath]) -> None:
    """Warns of images that Pillow cannot read, and of files of unknown kinds."""
    known, counts = image_suffixes() | {*SHARDS, ".npz", ".npy"}, collections.Counter()
    for file in files:
        kind, suffix = _MIME_TYPES.guess_type(file.name)[0], file.suffix.lower()
        if suffix not in known and (kind is None or kind.startswith("image/")):
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
    first_row, images, rows = {}, [], _read_rows(table)
    for number, (row, splits) in enumerate(zip(rows, _splits(table, rows), strict=True), start=1):
        where, path = f"{table}, row {number}", row.get("path")
        label = class_name(row.get("label"), where)
        coarse_label = class_name(row.get("coarse_label"), where)
        if not (isinstance(path, str) and path and "\0" not in path and label):
            raise UserError(f"{where} needs a path without null bytes, and a label")
        if "\n" in path + label:
            raise UserError(f"{where} has a line break in its path or label; mend its quotes")
        for split in splits:
            image = absolute(table.parent / path), label, split
            if first_row.setdefault(image, number) != number:
                raise UserError(f"{where}: {path} is already in row {first_row[image]}")
            images.append((*image, coarse_label))
    if not images:
        raise UserError(f"{table} has no rows")
    distinct = {(path, label) for path, label, _ in first_row}
    label_counts = collections.Counter(path for path, _ in distinct)
    several = sorted(path for path, count in label_counts.items() if count > 1)
    if several:
        number = counted(len(several), "image")
        console.warn(f"{table} has {number} with several labels, such as {several[0]}")
    if any(row.get(name) for row in rows for name in _BOX):
        console.warn(f"{table} has boxes ({', '.join(_BOX)}), which are not used; crop the images")
    return _files(*zip(*images, strict=True))


def _splits(table: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Returns the splits of each row: from the column `split`, or from is_query and is_gallery.

    If all queries are in the gallery and all gallery images are queries, they are one split, test.
    Without a column `split`, rows that are neither are training images.
    """

    def flags(column: str) -> list[bool]:
        return [_FLAGS[class_name(row.get(column), str(table)).lower()] for row in rows]

    try:
        is_query, is_gallery = flags("is_query"), flags("is_gallery")
    except KeyError as error:
        raise UserError(f"{table}: is_query, is_gallery are True or False, not {error}") from None
    has_flags, are_equal = any(is_query + is_gallery), is_query == is_gallery
    named_splits, splits = split_names(row.get("split") for row in rows), []
    for i, split in enumerate(named_splits):
        if (is_query[i] or is_gallery[i]) and split == "train":
            raise UserError(f"{table}, row {i + 1} is a query or in the gallery, and in train")
        if are_equal:
            roles = ["test"] * is_query[i]
        else:
            roles = ["query"] * is_query[i] + ["gallery"] * is_gallery[i]
        default = "train" if has_flags and "split" not in rows[0] else split
        splits.append(roles or [default])
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

    Args:
        dataset: A pair (images, labels) of two sequences: arrays or Pillow images, and numbers or
            names; or pairs (image, label) or (path, label); or a `datasets.Dataset` with a column
            of images, a column of labels, and optionally of splits and coarse classes; or
            {split: any of these}.
    """
    if isinstance(dataset, Mapping) and dataset:
        parts = zip(split_names(dataset), map(_labelled, dataset.values()), strict=True)
        images = stacked([replace(part, splits=np.full(len(part), name)) for name, part in parts])
    else:
        images = _labelled(dataset)
    if not len(images):
        raise UserError("the dataset has no images")
    if images.path(0):
        return images
    return replace(images, names=np.array([f"image {i}" for i in range(len(images))], object))


def _labelled(dataset: Any) -> Dataset:
    """Lists the images of a dataset without splits by name, see `labelled_images`."""
    if hasattr(dataset, "column_names"):
        return table_of(dataset, "the dataset")
    is_pair = isinstance(dataset, tuple) and len(dataset) == 2
    if is_pair and hasattr(dataset[0], "__array__"):
        dataset = np.asarray(dataset[0]), dataset[1]
    if is_pair and len(dataset[0]) != len(dataset[1]):
        raise UserError(f"the dataset has {len(dataset[0])} images, but {len(dataset[1])} labels")
    try:
        pairs = [*zip(*dataset, strict=True)] if is_pair else [(x, label) for x, label in dataset]
    except (TypeError, ValueError) as error:
        remedy = "give (images, labels), pairs, a dataset of Hugging Face, or {split: ...}"
        raise UserError(f"{type(dataset).__name__} is no dataset; {remedy}") from error
    images, labels = [image for image, _ in pairs], [label for _, label in pairs]
    classes = [class_name(label, f"label of image {i}") for i, label in enumerate(labels)]
    if "" in classes:
        missing = f"{classes.count('')} of the {len(classes)} images have no label"
        raise UserError(f"{missing}, such as image {classes.index('')}; give one, or leave it out")
    if len(images) and isinstance(images[0], str | os.PathLike):
        return _files([pathlib.Path(x).expanduser() for x in images], classes)
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
