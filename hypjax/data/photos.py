"""Users' own images as tables: found in folders, tables and lists, or given from Python.

Features of another model are rows of a table like images.
"""

import csv
import functools
import glob
import hashlib
import io
import itertools
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.data.dataset import Dataset, stacked, table_of_names
from hypjax.data.shards import files_below, find_dataset, table_of
from hypjax.errors import UserError, reason, require_utf8
from hypjax.system.caches import cache_folder
from hypjax.system.files import absolute, write_text

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SPLITS = ("train", "validation", "test", "query", "gallery")
TABLES = (".csv", ".parquet")  # Suffixes of tables.
Pixels = UInt8[np.ndarray, "height width *channels"]
ImageLike = str | os.PathLike[str] | bytes | Image.Image | Pixels | Float[np.ndarray, "*images dim"]


def given_images(images: ImageLike | Sequence[ImageLike]) -> Dataset:
    """Finds the images that a caller gives; those in memory are named 'image 0', 'image 1', ...

    They are one of, or a sequence of: a path, for which see `find_images`; the bytes of an image
    file; an image of Pillow's; pixels, uint8 of [height, width] or [height, width, channels] with
    1, 3 or 4 channels. An array of four axes holds several images. Floating-point numbers, [dim] or
    [images, dim], are features. A `datasets.Dataset` stands for its images.
    """
    if hasattr(images, "column_names"):
        return table_of(images, "the dataset")
    if getattr(images, "ndim", 3) < 3 and images.dtype.kind == "f":
        from hypjax.retrieval.feature_files import feature_table

        arrays = {"features": np.atleast_2d(np.asarray(images))}
        return _table_of_features(feature_table(arrays, "the array"))
    single = isinstance(images, str | os.PathLike | bytes | Image.Image)
    if single or getattr(images, "ndim", 4) < 4 or not isinstance(images, Iterable):
        images = [images]
    tables = []
    parts = itertools.groupby(enumerate(images), lambda row: isinstance(row[1], str | os.PathLike))
    for are_paths, part in parts:
        if are_paths:
            tables += [find_images(os.fspath(path)) for _, path in part]
        else:
            names, contents = zip(*((f"image {i}", _in_memory(x, i)) for i, x in part), strict=True)
            tables.append(table_of_names(contents, names, [""] * len(names)))
    if not tables:
        raise UserError("there are no images; give paths, images of Pillow's, or arrays of pixels")
    return stacked(tables)


def _in_memory(image: Any, i: int) -> bytes | Image.Image:
    if isinstance(image, bytes | Image.Image):
        return image
    if hasattr(image, "__array__"):
        return pixels.from_pixels(np.asarray(image), f"image {i}")
    kind = type(image).__name__
    raise UserError(f"{kind} is no image; give a path, an image of Pillow's, or an array")


def find_images(where: str) -> Dataset:
    """Lists images to embed, see `list_images`; of links to one file, only the first."""
    images = list_images(where)
    if images.vectors is not None or not isinstance(images.records[0], str):
        return images  # Rows of features, or of files of many images.
    check_columns(where, images)
    rows = {os.path.realpath(name): i for i, name in reversed([*enumerate(images.names)])}
    images = images.take(np.sort([*rows.values()]))
    require_utf8(images.names)
    return images


def list_images(where: str) -> Dataset:
    """Lists the images at a location; the class is '' if it is unknown.

    A location is a folder, see `list_folder`; a .csv or .parquet table, see `read_table`; a .txt
    file with one path per line, relative to the file's folder; a pattern such as 'photos/*.jpg';
    one image; or a dataset, see `find_dataset`. A file of features, see
    `hypjax.retrieval.feature_files`, stands for its rows. Raises UserError if there are none.
    """
    from hypjax.retrieval.feature_files import has_features

    path = pathlib.Path(where).expanduser()
    if has_features(path):
        return read_vectors(path)
    if path.is_dir() and len(images := list_folder(path)):
        return images
    if path.suffix.lower() not in IMAGES and (stored := find_dataset(where)) is not None:
        return stored
    if path.suffix.lower() in TABLES:
        images = read_table(path)
    elif path.suffix.lower() == ".txt":
        images = _files([path.parent / row["path"] for row in _read_rows(path)])
    else:
        pattern = glob.escape(str(path)) if path.is_file() else str(path)
        paths = map(pathlib.Path, sorted(glob.glob(pattern, recursive=True)))
        images = _files([path for path in paths if path.is_file()])
    if not len(images):
        raise UserError(f"no images at {where}")
    return images


def _files(
    paths: Sequence[pathlib.Path],
    classes: Sequence[str] = (),
    splits: Sequence[str | None] = (),
    coarse_labels: Sequence[str | None] = (),
) -> Dataset:
    """The table of image files, whose classes are unknown if none are given."""
    names = [str(absolute(path)) for path in paths]
    return table_of_names(
        *(names, names, classes or [""] * len(paths)),
        splits=splits,
        coarse_labels=coarse_labels,
        file_versions=map(_file_version, paths),
    )


def _file_version(path: pathlib.Path) -> tuple[str, tuple[int, int] | None]:
    """Path, size and time of change of a file, known without reading it."""
    stat = path.stat() if os.path.exists(path) else None
    return str(absolute(path)), stat and (stat.st_size, stat.st_mtime_ns)


def read_vectors(path: str | os.PathLike[str], labels: str | None = None) -> Dataset:
    """Reads a file of features, or points, and one of labels, if it has none, as a table."""
    files = [pathlib.Path(file).expanduser() for file in (path, labels) if file is not None]
    return _read_vectors(*map(_file_version, files))


@functools.lru_cache(maxsize=1)  # Their dimension is needed before a run is built.
def _read_vectors(*files: tuple[str, Any]) -> Dataset:
    from hypjax.retrieval.embeddings import read_features

    return _table_of_features(read_features(*(name for name, _ in files)))


def _table_of_features(table: Any) -> Dataset:
    """The table of a `FeatureTable`."""
    return table_of_names(
        table.ids,
        table.ids,
        table.labels.tolist(),
        splits=() if table.splits is None else table.splits.tolist(),
        coarse_labels=() if table.superlabels is None else table.superlabels.tolist(),
        file_versions=[zlib.crc32(np.ascontiguousarray(row)) for row in table.features],
        vectors=np.asarray(table.features, np.float32),
    )


def check_columns(where: object, images: Dataset) -> None:
    """Rejects unknown splits, splits of some images only, and classes with two coarse labels."""
    for row, split in enumerate(() if images.splits is None else images.splits, 1):
        if split not in SPLITS:
            raise UserError(
                f"{where}, row {row} has the split '{split}'; either all rows have a split or none "
                f"has, and splits are named {', '.join(SPLITS)}"
            )
    coarse_of: dict[str, str] = {}
    columns = images.class_names, () if images.coarse_labels is None else images.coarse_labels
    for row, (label, coarse) in enumerate(zip(*columns, strict=False), 1):
        if (first := coarse_of.setdefault(label, coarse)) != coarse:
            raise UserError(
                f"{where}, row {row}: label {label} has the superlabel {coarse or None} here, but "
                f"{first or None} before"
            )


def list_folder(root: pathlib.Path) -> Dataset:
    """Lists the images below a folder, whose sub-folders are classes, or splits with class folders.

    They are splits if one is named `train` and has sub-folders itself. Files at any depth below a
    class belong to it; outside classes the label is ''. Hidden files and files without an image
    suffix are ignored.
    """
    names = sorted(map(pathlib.PurePath, files_below(root)))
    names = [name for name in names if name.suffix.lower() in IMAGES]
    has_splits = any(name.parts[0] == "train" and len(name.parts) > 2 for name in names)
    classes = [next(iter(name.parts[has_splits:-1]), "") for name in names]
    splits = [name.parts[0] if has_splits and len(name.parts) > 1 else None for name in names]
    return _files([root / name for name in names], classes, splits)


def read_table(table: pathlib.Path) -> Dataset:
    """Reads the images that a CSV or Parquet table lists.

    Its columns are `path` (absolute, or relative to the table's folder), `label`, and optionally
    `split` and `superlabel`.
    """
    row_of, rows = {}, []
    for number, row in enumerate(_read_rows(table), start=1):
        place = f"{table}, row {number}"
        path, label, split, superlabel = (
            None if row.get(name) in (None, "") else str(row[name])
            for name in ("path", "label", "split", "superlabel")
        )
        if path is None or label is None or "\0" in path:
            raise UserError(f"{place} needs a path, without null characters, and a label")
        rows.append((table.parent / path, label, split, superlabel))
        first = row_of.setdefault(os.path.realpath(rows[-1][0]), number)
        if first != number:
            raise UserError(f"{place}: {path} is already in row {first}")
    if not rows:
        raise UserError(f"{table} has no rows")
    return _files(*zip(*rows, strict=True))


def _read_rows(table: pathlib.Path) -> list[dict[str, Any]]:
    """Reads rows as dictionaries; the lines of a .txt file that are not empty are paths."""
    try:
        if table.suffix.lower() == ".txt":
            lines = table.read_text("utf-8-sig").replace("\0", "").split("\n")
            return [{"path": line.strip()} for line in lines if line.strip()]
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


def labelled_images(dataset: Any) -> Dataset:
    """Lists the images of a dataset that Python gives, without reading them.

    A dataset is one of

    - (images, labels): two sequences, of arrays or images of Pillow's, and of numbers or names;
    - pairs (image, label) or (path, label), in any iterable;
    - a `datasets.Dataset` of Hugging Face with a column of images and one of labels, and perhaps
      columns of splits and coarse classes;
    - {split: any of these}, with splits named as the sub-folders of a folder.
    """
    if isinstance(dataset, Mapping) and dataset:
        parts = [(str(split), _labelled(part)) for split, part in dataset.items()]
        images = stacked([replace(x, splits=np.full(len(x), split)) for split, x in parts])
    else:
        images = _labelled(dataset)
    if not len(images):
        raise UserError("the dataset has no images")
    if images.path(0):
        return images
    names = [f"image {i}" for i in range(len(images))]
    return replace(images, names=np.array(names, object))


def _labelled(dataset: Any) -> Dataset:
    if hasattr(dataset, "column_names"):
        return table_of(dataset, "the dataset")
    if isinstance(dataset, tuple) and len(dataset) == 2:
        images, labels = dataset
        if len(images) != len(labels):
            raise UserError(f"the dataset has {len(images)} images, but {len(labels)} labels")
        images = np.asarray(images) if hasattr(images, "__array__") else images
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
    classes = [str(label.item() if hasattr(label, "item") else label) for label in labels]
    if len(images) and isinstance(images[0], str | os.PathLike):
        return _files([pathlib.Path(x).expanduser() for x in images], classes)
    return table_of_names(images, [""] * len(images), classes)


def write_table(images: Dataset) -> pathlib.Path:
    """Writes a table of image files to the cache, under a name that depends on all it lists."""
    splits = [""] * len(images) if images.splits is None else images.splits
    text = io.StringIO()
    rows = zip(images.names, images.class_names, splits, strict=True)
    csv.writer(text).writerows([("path", "label", "split"), *rows])
    digest = hashlib.sha256(text.getvalue().encode()).hexdigest()[:32]
    file = cache_folder() / "tables" / f"{digest}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())
    return file
