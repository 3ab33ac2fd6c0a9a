"""Lists users' own images or features: from folders, tables, lists of paths, and Python."""

import collections
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
from hypjax.data.dataset import Dataset, stacked, table_of_names
from hypjax.data.fetching import image_at, local_path
from hypjax.data.folders import FolderWalk, is_image_name
from hypjax.data.pixels import image_suffixes
from hypjax.data.shards import SHARDS, find_dataset, table_of
from hypjax.data.tables import file_version, read_table, table_of_files
from hypjax.data.texts import caption_column
from hypjax.errors import UserError, require_utf8
from hypjax.galleries.embeddings import read_features
from hypjax.galleries.feature_files import FeatureTable, feature_table, has_features
from hypjax.system import console
from hypjax.system.columns import require_options, split_options
from hypjax.system.files import checksum
from hypjax.types import SPLITS, cased_alike, class_name, split_name, split_names

_OTHER_TABLES = {".json", ".jsonl", ".ods", ".xls", ".xlsx"}  # Of which images could be meant.
_CLASS_FOLDERS = "put each class's images into a sub-folder, or list them in a table"
_MIME_TYPES = mimetypes.MimeTypes(filenames=())  # Python's types, the same on all machines.
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
    values: Any = images
    if hasattr(images, "column_names"):
        return table_of(images, "the dataset")
    dtype_kind = getattr(getattr(images, "dtype", None), "kind", None)
    if dtype_kind == "f" and values.ndim < 3:
        arrays = {"features": np.atleast_2d(np.asarray(images))}
        return _table_of_features(feature_table(arrays, "the array"))
    if dtype_kind in ("O", "U"):  # An array of paths or other Python objects.
        values = np.ravel(np.asarray(images)).tolist()
    if isinstance(values, Set | Mapping):
        raise UserError(f"{type(values).__name__} has no order of rows; give a list of images")
    is_file = isinstance(values, str | os.PathLike | bytes | io.IOBase)  # Iterable, but one image.
    is_image_array = hasattr(values, "ndim") and values.ndim < 4
    if is_file or is_image_array or not isinstance(values, Iterable):
        values = [values]
    tables = [_table_of_image(image, f"image {i}") for i, image in enumerate(values)]
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
        require_utf8(images.names.tolist())
    return images


def list_images(
    where: str,
    exclude: Sequence[str] = (),
    *,
    skip_corrupt: bool = True,
    captioned: bool = False,
) -> Dataset:
    """Lists the images at a location; unknown classes are ''.

    A location is a folder (see `list_folder`), a .csv or .parquet table or a .txt list (see
    `hypjax.data.tables`), a pattern such as 'photos/*.jpg', an image, the URL of an image, an
    archive, a dataset (see `find_dataset`), or a file of features (see
    `hypjax.galleries.feature_files`). Options may follow, as in photos.csv?label=species, see
    `hypjax.system.columns`. `FolderWalk` describes the other arguments, which are for folders,
    archives and patterns. If `captioned`, datasets need a column of captions. Raises a UserError if
    there are no images.
    """
    if where.startswith(("http://", "https://")):
        return image_at(where)
    path = local_path(where)
    location, options = split_options(where)
    if not all(pathlib.PurePath(pattern).parts for pattern in exclude):
        raise UserError("a pattern to exclude is empty; give a name, or the end of a path")
    if exclude and ("://" in where or os.path.isfile(path)):
        raise UserError(f"{location} is no folder, archive or pattern, of which to exclude files")
    if has_features(path, options):
        return read_vectors(where)
    walk = FolderWalk(exclude, skip_corrupt)
    if os.path.isdir(path):
        options.pop("encoding", None)  # Of the archive.
    if os.path.isdir(path) and not options and len(images := list_folder(path, walk)):
        return images
    if not is_image_name(path):
        if (dataset := find_dataset(location, options, captioned=captioned)) is not None:
            return dataset
    if path.suffix.lower() in _OTHER_TABLES and not path.is_dir():
        advice = "save it as .csv, .tsv or .parquet, with the columns path and label"
        raise UserError(f"hypjax does not read the table {location}; {advice}")
    if path.suffix.lower() in (".csv", ".tsv", ".parquet", ".txt"):
        images = read_table(path, options)
    else:
        require_options(options, (), location)
        names = [] if os.path.isdir(path) else walk.matches(str(path))
        images = table_of_files([*map(pathlib.Path, names)])
    if not len(images):
        is_missing = not os.path.lexists(path) and not glob.has_magic(location)
        is_pattern = "[" in location and not os.path.isdir(path)
        advice = "check the pattern" if glob.has_magic(location) else _CLASS_FOLDERS
        if is_pattern:
            advice = "[...] is one letter, or in a folder's name"
        if is_missing:
            advice = "name a folder, a file or a pattern; of images that have moved, the new place"
        problem = f"{location} does not exist" if is_missing else f"no images at {location}"
        raise UserError(f"{problem}; {advice}")
    return images


def read_vectors(where: str, labels: str | None = None) -> Dataset:
    """Reads a file of features or points; `labels` is the file of their labels, if separate."""
    files = (pathlib.Path(split_options(file)[0]) for file in (where, labels) if file is not None)
    return _read_vectors(where, labels, *(file_version(file.expanduser()) for file in files))


@functools.lru_cache(maxsize=1)  # A run reads the features' dimension before the features.
def _read_vectors(where: str, labels: str | None, *versions: object) -> Dataset:
    del versions  # They tell the cache whether the files have changed.
    return _table_of_features(read_features(where, labels))


def _table_of_features(features: FeatureTable) -> Dataset:
    """Makes a table of images of which only features are known."""
    splits, coarse_labels = features.splits, features.coarse_labels
    return table_of_names(
        ids := features.ids.tolist(),
        ids,
        features.labels.tolist(),
        splits=() if splits is None else splits.tolist(),
        coarse_labels=() if coarse_labels is None else coarse_labels.tolist(),
        file_versions=[checksum(np.ascontiguousarray(row).data) for row in features.features],
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
    names = zip(images.class_names, images.coarse_labels, strict=True)
    for row, (name, coarse) in enumerate(names, 1):
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
    images = [*filter(is_image_name, files)]
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
        return table_of_files(paths, classes=top_folders)
    if other_folders:
        other = min(other_folders) or "images"
        problem = f"{root} has {other} beside folders of splits ({', '.join(SPLITS)})"
        raise UserError(f"{problem}; move {other} away, or list the images in a table")
    classes = ["".join(parts[1:2]) for parts in folders]
    return table_of_files(paths, classes, splits=top_folders)


def _warn_of_unlisted(root: pathlib.Path, files: Sequence[pathlib.PurePath]) -> None:
    """Warns of images that Pillow cannot read, and of files of unknown kinds."""
    known = image_suffixes() | {*SHARDS, ".npz", ".npy"}
    counts: collections.Counter[str] = collections.Counter()
    for file in files:
        mime_type, suffix = _MIME_TYPES.guess_type(file.name)[0], file.suffix.lower()
        if suffix not in known and (mime_type is None or mime_type.startswith("image/")):
            counts[suffix or "without a suffix"] += 1
    if counts:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(20))
        heif = f"; .heic needs {pixels.HEIF_INSTALLATION}" if ".heic" in counts else ""
        left_out = f"{counts.total()} of {len(files)} files in {root} are left out"
        console.warn(f"{left_out}, of kinds that cannot be read: {kinds}{heif}")


def labelled_images(dataset: Any, *, captioned: bool = False) -> Dataset:
    """Lists the images of a dataset that is passed from Python, without reading them.

    A dataset is a pair (images, labels) of two sequences: arrays or Pillow images, and numbers or
    names; or pairs (image, label) or (path, label); or a `datasets.Dataset` with a column of
    images, a column of labels, and optionally of splits and coarse classes; or {split: dataset}.
    If `captioned`, captions take the place of labels: for each image a text, or a list of texts.
    """
    if isinstance(dataset, Mapping) and dataset:
        tables = []
        for split, split_dataset in zip(split_names(dataset), dataset.values(), strict=True):
            table = _labelled(split_dataset, captioned)
            tables.append(replace(table, splits=np.full(len(table), split)))
        images = stacked(tables)
    else:
        images = _labelled(dataset, captioned)
    if not len(images):
        raise UserError("the dataset has no images")
    if images.path(0):  # The images are files.
        return images
    return replace(images, names=np.array([f"image {i}" for i in range(len(images))], object))


def _labelled(dataset: Any, captioned: bool) -> Dataset:
    """Lists the images of a dataset as in `labelled_images`, except for {split: dataset}."""
    if hasattr(dataset, "column_names"):
        return table_of(dataset, "the dataset", captioned=captioned)
    pairs, described = dataset, "captions" if captioned else "labels"
    if isinstance(dataset, tuple) and len(dataset) == 2:
        images, labels = dataset
        if hasattr(images, "__array__"):
            images = np.asarray(images)
        if len(images) != len(labels):
            raise UserError(f"the dataset has {len(images)} images, but {len(labels)} {described}")
        pairs = zip(images, labels, strict=True)
    try:
        pairs = [(image, label) for image, label in pairs]
    except (TypeError, ValueError) as error:
        remedy = f"give (images, {described}), pairs, a dataset of Hugging Face, or {{split: ...}}"
        raise UserError(f"{type(dataset).__name__} is no dataset; {remedy}") from error
    images, classes, captions = [image for image, _ in pairs], [""] * len(pairs), None
    if captioned:
        captions = caption_column(cell for _, cell in pairs)
    else:
        classes = [class_name(label, f"label of image {i}") for i, (_, label) in enumerate(pairs)]
    if "" in classes and not captioned:
        missing = f"{classes.count('')} of the {len(classes)} images have no label"
        raise UserError(f"{missing}, such as image {classes.index('')}; give one, or leave it out")
    if images and isinstance(images[0], str | os.PathLike):
        table = table_of_files([pathlib.Path(image).expanduser() for image in images], classes)
    else:
        table = table_of_names(images, [""] * len(images), classes)
    return replace(table, captions=captions)
