"""Users' own images as tables: found in folders, tables and lists, or given from Python.

Features of another model are rows of a table like images.
"""

import csv
import dataclasses
import glob
import hashlib
import io
import itertools
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.data.dataset import Chained, Dataset, stacked, table_of_names
from hypjax.data.shards import IMAGES, Rows, files_below, find_dataset, rows_of
from hypjax.errors import UserError, reason, require_utf8
from hypjax.system.caches import cache_folder
from hypjax.system.files import write_text

SPLITS = ("train", "validation", "test", "query", "gallery")
TABLES = (".csv", ".parquet")  # Suffixes of tables.
Pixels = UInt8[np.ndarray, "height width *channels"]
Given = str | os.PathLike[str] | bytes | Image.Image | Pixels | Float[np.ndarray, "*images dim"]


class Files(Sequence):
    """Image files, read on access; images in memory stay as they are."""

    def __init__(self, contents: Sequence[Any]) -> None:
        self._contents = contents

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, i: int) -> Any:
        content = self._contents[i]
        return pixels.read_bytes(content) if isinstance(content, str | os.PathLike) else content


def check_split(where: object, split: str | None) -> None:
    """Rejects the name of a split that is none of `SPLITS`."""
    if split not in (None, *SPLITS):
        raise UserError(f"{where} has the split {split!r}; splits are named {', '.join(SPLITS)}")


def given_images(images: Given | Sequence[Given]) -> Dataset:
    """Finds the images that a caller gives; those in memory are named 'image 0', 'image 1', ...

    They are one of, or a sequence of: a path, for which see `find_images`; the bytes of an image
    file; an image of Pillow's; pixels, uint8 of [height, width] or [height, width, channels] with
    1, 3 or 4 channels. An array of four axes holds several images. Floating-point numbers, [dim] or
    [images, dim], are features. A `datasets.Dataset` stands for its images. Raises UserError if
    there are none, or something is none.
    """
    if hasattr(images, "column_names"):
        images = rows_of(images, "the dataset").images
    if getattr(images, "ndim", 3) < 3 and images.dtype.kind == "f":
        from hypjax.retrieval.feature_files import feature_table

        table = feature_table({"features": np.atleast_2d(np.asarray(images))}, "the array")
        return _table_of_features(table, "the array")
    single = isinstance(images, str | os.PathLike | bytes | Image.Image)
    if single or getattr(images, "ndim", 4) < 4 or not isinstance(images, Iterable):
        images = [images]
    found = []
    parts = itertools.groupby(enumerate(images), lambda row: isinstance(row[1], str | os.PathLike))
    for are_paths, part in parts:
        if are_paths:
            found += [find_images(os.fspath(path)) for _, path in part]
        else:
            names, contents = zip(*((f"image {i}", _in_memory(x, i)) for i, x in part), strict=True)
            found.append(table_of_names(contents, names, [""] * len(names)))
    if not found:
        raise UserError("there are no images; give paths, images of Pillow's, or arrays of pixels")
    return stacked(found)


def _in_memory(image: Any, i: int) -> bytes | Image.Image:
    if isinstance(image, bytes | Image.Image):
        return image
    if hasattr(image, "__array__"):
        return pixels.from_pixels(np.asarray(image), f"image {i}")
    kind = type(image).__name__
    raise UserError(f"{kind} is no image; give a path, an image of Pillow's, or an array")


def find_images(where: str) -> Dataset:
    """Finds images to embed, without duplicates; the class is '' if it is unknown.

    They are given by a folder, which is searched at any depth, see `list_folder`; a .csv or
    .parquet table, see `read_table`; a .txt file with one path per line, relative to the file's
    folder; a pattern such as 'photos/*.jpg'; one image; or a dataset of the hub, or in Parquet,
    Arrow or tar files, see `find_dataset`. A file of features, see
    `hypjax.retrieval.feature_files`, stands for its rows. Raises UserError if there are none, or a
    name is not UTF-8, which the formats of galleries cannot hold.
    """
    from hypjax.retrieval.feature_files import has_features

    path = pathlib.Path(where).expanduser()
    if has_features(path):
        return read_vectors(path)
    if stored := stored_images(where):
        return stored
    if path.is_dir():
        images = list_folder(path)
    elif path.suffix.lower() in TABLES:
        images = read_table(path)
    elif path.suffix.lower() == ".txt":
        images = _files([path.parent / line for line in _read_lines(path)])
    elif path.is_file():
        images = _files([path])
    else:
        paths = map(pathlib.Path, sorted(glob.glob(str(path), recursive=True)))
        images = _files([found for found in paths if found.is_file()])
    if not len(images):
        raise UserError(f"no images at {where}")
    unique = {os.path.realpath(name): i for i, name in reversed([*enumerate(images.names)])}
    images = images.take(np.array([*reversed(unique.values())]))
    names = [str(pathlib.Path(name).absolute()) for name in images.names]
    require_utf8(names)
    return dataclasses.replace(images, names=np.array(names, object))


def _files(
    paths: Sequence[pathlib.Path],
    classes: Sequence[str] = (),
    splits: Sequence[str | None] = (),
    groups: Sequence[str | None] = (),
) -> Dataset:
    """The table of image files, whose classes are unknown if none are given."""
    names = [str(path) for path in paths]
    columns = names, classes or [""] * len(paths)
    facts = map(_file_facts, paths)
    return table_of_names(Files(names), *columns, splits=splits, groups=groups, facts=facts)


def _file_facts(path: pathlib.Path) -> tuple[Any, ...]:
    """Returns what changes with the file and is known without reading it."""
    try:
        stat = path.stat()
    except OSError:
        return (str(path.absolute()), None)
    return (str(path.absolute()), stat.st_size, stat.st_mtime_ns)


def read_vectors(path: str | os.PathLike[str], labels: str | None = None) -> Dataset:
    """Reads a file of features, or of points, as a table whose rows stand for images.

    `labels` is a file with the classes, if the first one has none. Raises UserError if a file
    cannot be read, is damaged, or names an unknown split.
    """
    from hypjax.retrieval.embeddings import read_features

    return _table_of_features(read_features(path, labels), str(path))


def _table_of_features(table: Any, where: str) -> Dataset:
    """The table of a `FeatureTable`."""
    for split in () if table.splits is None else np.unique(table.splits).tolist():
        check_split(where, split or None)
    columns = {
        name: () if column is None else column.tolist()
        for name, column in (("splits", table.splits), ("groups", table.superlabels))
    }
    facts = [zlib.crc32(np.ascontiguousarray(row)) for row in table.features]
    names = table.ids.tolist(), table.labels.tolist()
    return table_of_names(names[0], *names, **columns, facts=facts, vectors=table.features)


def stored_images(where: str) -> Dataset | None:
    """Lists the images of a dataset in files of many, see `find_dataset`; None if it is no such.

    They are named by their splits and rows. Raises UserError for a split that is unknown, or if a
    label is in two groups.
    """
    if not (found := find_dataset(where)):
        return None
    names, classes, facts, splits, groups = [], [], [], [], []
    for place, rows in found.items():
        for split in set(rows.splits or ()):
            check_split(f"{place} (without ?split=train+test, for example)", split)
        count = len(rows.labels)
        names += [f"{place}/{i}" for i in range(count)]
        classes += rows.labels
        facts += [rows.images.fingerprint] * count
        splits += rows.splits or [None] * count
        groups += rows.superlabels or [None] * count
    check_columns(where, classes, splits, groups)
    records = Chained(rows.images for rows in found.values())
    facts = zip(names, facts, strict=True)
    return table_of_names(records, names, classes, splits=splits, groups=groups, facts=facts)


def check_columns(
    where: object,
    classes: Sequence[str],
    splits: Sequence[str | None],
    groups: Sequence[str | None],
) -> None:
    """Rejects images of which only some have a split, or whose class is in two groups."""
    known: dict[str, str | None] = {}
    for number, (label, split, group) in enumerate(zip(classes, splits, groups, strict=True), 1):
        if bool(split) != bool(splits[0]):
            raise UserError(f"{where}, row {number}: either all rows have a split or none has")
        first = known.setdefault(label, group or None)
        if label and first != (group or None):
            raise UserError(
                f"{where}, row {number}: label {label} has the superlabel {group or None} here, "
                f"but {first} before"
            )


def _read_lines(path: pathlib.Path) -> list[str]:
    """Reads the non-empty lines of a text file."""
    try:
        lines = path.read_text("utf-8-sig").replace("\0", "").split("\n")
        return [line.strip() for line in lines if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: save it as UTF-8") from error


def list_folder(root: pathlib.Path, *, classes_only: bool = False) -> Dataset:
    """Lists the images below a folder, whose sub-folders are classes, or splits with class folders.

    The sub-folders are splits if one is named `train` and has sub-folders itself, and all have
    names from `SPLITS`. Files at any depth below a class belong to it; outside classes the label is
    ''. Hidden files and files without an image suffix are ignored. If only classes are wanted,
    raises UserError for an unknown split, or if no image has a class.
    """
    folders = {folder.name for folder in _subfolders(root)}
    has_splits = "train" in folders and bool(_subfolders(root / "train"))
    if classes_only and has_splits:
        for name in sorted(folders):
            check_split(root, name)
    has_splits = has_splits and folders <= set(SPLITS)
    paths, classes, splits = [], [], []
    for name in sorted(map(pathlib.PurePath, files_below(root))):
        parents = name.parts[has_splits:-1]
        if name.suffix.lower() in IMAGES and (parents or not classes_only):
            paths.append(root / name)
            classes.append(parents[0] if parents else "")
            splits.append(name.parts[0] if has_splits and len(name.parts) > 1 else None)
    if classes_only and not paths:
        raise UserError(
            f"no images in sub-folders of {root} ({', '.join(sorted(IMAGES))}); put the images of "
            "each class into one"
        )
    return _files(paths, classes, splits)


def _subfolders(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error


def read_table(table: pathlib.Path) -> Dataset:
    """Reads the images that a CSV or Parquet table lists.

    Its columns are `path` (absolute, or relative to the table's folder), `label`, and optionally
    `split` (one of `SPLITS`) and `superlabel`. Raises UserError if the table cannot be read, lacks
    a column or a value, lists a file twice, or assigns a label to two groups.
    """
    seen: dict[str, int] = {}
    rows = []
    for number, row in enumerate(_read_rows(table), start=1):
        place = f"{table}, row {number}"
        path, label, split, superlabel = (
            None if row.get(name) in (None, "") else str(row[name])
            for name in ("path", "label", "split", "superlabel")
        )
        if path is None or label is None or "\0" in path:
            raise UserError(f"{place} needs a path, without null characters, and a label")
        check_split(place, split)
        rows.append((table.parent / path, label, split, superlabel))
        first = seen.setdefault(os.path.realpath(rows[-1][0]), number)
        if first != number:
            raise UserError(f"{place}: {path} is already in row {first}")
    if not rows:
        raise UserError(f"{table} has no rows")
    columns = [*zip(*rows, strict=True)]
    check_columns(table, *columns[1:])
    return _files(*columns)


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


def rows_in_memory(dataset: Any) -> Rows:
    """Lists the images of a dataset that Python gives, without reading them.

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
        parts = {split: rows_in_memory(part) for split, part in dataset.items()}
        labels = [label for part in parts.values() for label in part.labels]
        splits = [split for split, part in parts.items() for _ in part.labels]
        return Rows(Chained(part.images for part in parts.values()), labels, splits, None)
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
    return Rows(images, names, None, None)


def write_paths(rows: Rows) -> pathlib.Path:
    """Writes a table of paths to the cache, under a name that depends on all that it lists."""
    paths = [str(pathlib.Path(path).expanduser().absolute()) for path in rows.images]
    splits = rows.splits or [""] * len(paths)
    text = io.StringIO()
    table = [("path", "label", "split"), *zip(paths, rows.labels, splits, strict=True)]
    csv.writer(text).writerows(table)
    digest = hashlib.sha256(text.getvalue().encode()).hexdigest()[:32]
    file = cache_folder() / "tables" / f"{digest}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())
    return file
