"""Image files that CSV and Parquet tables, and lists of lines, name with their classes."""

import collections
import csv
import io
import itertools
import os
import pathlib
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from hypjax.data.dataset import Dataset, fingerprint_of, table_of_names
from hypjax.data.folders import is_image_name
from hypjax.data.pixels import image_suffixes
from hypjax.errors import UserError, counted, explained
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.columns import Options, find_column, require_options
from hypjax.system.files import absolute, csv_header, read_rows, write_text
from hypjax.types import class_name, split_names

_COLUMNS = ("path", "label", "coarse_label", "split")
_BOX = ("x_1", "y_1", "x_2", "y_2")  # Columns of boxes in open-metric-learning.
_ROLES = ("is_query", "is_gallery")  # Columns in open-metric-learning, and their cells.
_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}
_QUOTES = " \"'"
_Rows = Sequence[Mapping[str, Any]]


def table_of_files(
    paths: Sequence[pathlib.Path],
    classes: Sequence[str] = (),
    splits: Sequence[str] = (),
    coarse_labels: Sequence[str] = (),
) -> Dataset:
    """Makes a table of image files, whose records are their paths."""
    names = [str(absolute(path)) for path in paths]
    classes = classes or [""] * len(paths)
    versions = map(file_version, paths)
    return table_of_names(
        names, names, classes, splits=splits, coarse_labels=coarse_labels, file_versions=versions
    )


def file_version(path: pathlib.Path) -> tuple[str, tuple[int, int] | None]:
    """Returns a file's absolute path, and its size and time of change; None if it is missing."""
    if not os.path.exists(path):
        return str(absolute(path)), None
    stat = path.stat()
    return str(absolute(path)), (stat.st_size, stat.st_mtime_ns)


def read_table(table: pathlib.Path, options: Options) -> Dataset:
    """Reads the images that a CSV or Parquet table, or a .txt list of paths or of both, lists.

    The table's columns are `path` (absolute, or relative to the table's folder), `label`, and
    optionally `coarse_label` and `split`; the options, or usual names, tell others. Like
    open-metric-learning, it may have `is_query` and `is_gallery` instead of `split`. Lines of a
    list are a path, or a path and a label.
    """
    rows = _read_rows(table, options)
    if table.suffix.lower() == ".txt" and not any("label" in row for row in rows):
        paths = (row["path"] for row in rows)
        return table_of_files([listed_file(table, path, str(table)) for path in paths])
    if not rows:
        raise UserError(f"{table} has no rows")
    row_of: dict[tuple[pathlib.Path, str, str], int] = {}  # By path, class and split.
    coarse_labels, classes_of = [], collections.defaultdict(set)
    for number, (row, splits) in enumerate(zip(rows, _splits(table, rows), strict=True), start=1):
        where, path = f"{table}, row {number}", row.get("path")
        name = class_name(row.get("label"), where)
        coarse_label = class_name(row.get("coarse_label"), where)
        if not (isinstance(path, str) and path and name) or re.search("[\0\n]", path + name):
            needed = "a path and a label, without line breaks and null bytes"
            raise UserError(f"{where} needs {needed}; mend its cells and quotes")
        file = listed_file(table, path, where)
        classes_of[file].add(name)
        for split in splits:
            if (file, name, split) in row_of:
                raise UserError(f"{where}: {path} is already in row {row_of[file, name, split]}")
            row_of[file, name, split] = number
            coarse_labels.append(coarse_label)
    if several := [file for file, names in classes_of.items() if len(names) > 1]:
        images = counted(len(several), "image")
        console.warn(f"{table} has {images} with several labels, such as {min(several)}")
    if any(row.get(name) for row in rows for name in _BOX):
        console.warn(f"{table} has boxes ({', '.join(_BOX)}), which are not used; crop the images")
    files, classes, splits = zip(*row_of, strict=True)
    return table_of_files(files, classes, splits, coarse_labels)


def _splits(table: pathlib.Path, rows: _Rows) -> list[Sequence[str]]:
    """Returns the splits of each row: from the column `split`, or from is_query and is_gallery.

    If the queries are the same images as the gallery, both are one split, test. Without a column
    `split`, rows that are neither queries nor in the gallery are training images.
    """
    named_splits = split_names(row.get("split") for row in rows)
    flags = [[class_name(row.get(x), str(table)).lower() for x in _ROLES] for row in rows]
    if unknown := {*itertools.chain.from_iterable(flags)} - _FLAGS.keys():
        raise UserError(f"{table}: {' and '.join(_ROLES)} are True or False, not {min(unknown)!r}")
    roles: list[Sequence[str]] = []
    roles += [[x[3:] for x, y in zip(_ROLES, pair, strict=True) if _FLAGS[y]] for pair in flags]
    if not any(roles):
        return [[split] for split in named_splits]
    if not any(len(role) == 1 for role in roles):
        roles = [["test"] if role else [] for role in roles]
    for i, role in enumerate(roles):
        if role and named_splits[i] == "train":
            raise UserError(f"{table}, row {i + 1} is a query or in the gallery, and in train")
        roles[i] = role or [named_splits[i] if "split" in rows[i] else "train"]
    return roles


def _read_rows(table: pathlib.Path, options: Options) -> _Rows:
    """Reads the rows of a table or list as dictionaries, with usual names of columns."""
    require_options(options, _COLUMNS[:3], table)
    with explained(f"cannot read {table}"):
        if table.suffix.lower() != ".parquet" and not _has_header(table):
            require_options(options, (), table)
            return _rows_of_lines(table)
        columns, rows = read_rows(table)
    usual = usual_columns(columns)
    column_of = {
        role: find_column(columns if role in options else usual, role, options, table)
        for role in _COLUMNS
    }
    for role in ("path", "label"):
        if column_of[role] is None:
            named = f"name it by ?{role}=COLUMN, one of {', '.join(columns)}"
            raise UserError(f"{table} has no column {role}; {named}")
    return [row | {role: row[name] for role, name in column_of.items() if name} for row in rows]


def usual_columns(columns: Sequence[str]) -> list[str]:
    """Columns whose use is known by their names."""
    # Beside x, y is a coordinate of a box; txt holds captions.
    return [name for name in columns if name != "txt" and not (name == "y" and "x" in columns)]


def _has_header(table: pathlib.Path) -> bool:
    """Whether the first line of a table or list holds names of columns."""
    cells = csv_header(table)[1]
    if any(is_image_name(cell.strip(_QUOTES)) for cell in cells):
        return False
    return table.suffix.lower() != ".txt" or find_column(cells, "path", {}, table) is not None


def _rows_of_lines(file: pathlib.Path) -> _Rows:
    """Reads lines with a path, or with a path and a label after a space or another separator."""
    suffixes = "|".join(map(re.escape, image_suffixes()))
    # A path may have spaces: it ends with the suffix of an image, or else before the last field.
    fields = rf"(?i)(.+(?:{suffixes})|.*[^\s,;|])[\"']?\s*[\s,;|]\s*(.+)"
    rows = []
    for number, line in enumerate(file.read_text("utf-8-sig").splitlines(), start=1):
        texts = [line.strip().strip(_QUOTES)]
        if not (is_image_name(texts[0]) or os.path.lexists(file.parent / texts[0])):
            match = re.fullmatch(fields, line.strip())
            texts = [text.strip(_QUOTES) for text in match.groups()] if match else texts
        if re.search(r"[,;|\t]|^[\d\s]+\s\d", "".join(texts[1:])):
            problem = f"{file}, line {number} has more than a path and a label"
            raise UserError(f"{problem}; add a first line with the names of its columns")
        rows += [dict(zip(("path", "label"), texts, strict=False))] if texts[0] else []
    return rows


def listed_file(table: pathlib.Path, text: str, where: str) -> pathlib.Path:
    """Returns the file that a table names by a path, relative to the table's folder, or a URI."""
    if text.startswith("file:"):
        text = urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
    elif re.match(r"[A-Za-z][\w+.-]+://", text):
        raise UserError(f"{where}: {text} is a URL; download the images, and list their files")
    elif re.match(r"[A-Za-z]:[\\/]", text) and os.sep == "/":
        folder = table.absolute().parent
        raise UserError(f"{where}: {text} is a path on Windows; write it relative to {folder}")
    for path in (text, text.strip(), text.strip().replace("\\", "/")):
        if os.path.lexists(file := absolute(table.parent / os.path.expanduser(path))):
            break
    return file


def write_table(images: Dataset) -> pathlib.Path:
    """Writes a table of image files to the cache, with a hash of its content as its name."""
    splits = [""] * len(images) if images.splits is None else images.splits
    text, columns = io.StringIO(), ["path", "label", "split"]
    rows = [*map(tuple, zip(images.names, images.class_names, splits, strict=True))]
    if images.captions is not None:  # Each in a row of its own.
        columns.append("caption")
        pairs = zip(rows, images.captions, strict=True)
        rows = [(*row, caption) for row, captions in pairs for caption in captions]
    csv.writer(text).writerows([columns, *rows])
    file = cache_folder() / "tables" / f"{fingerprint_of([text.getvalue()])}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())
    return file
