"""Texts to embed: from Python, from lists of lines, and from tables."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from hypjax.data.dataset import Dataset, table_of_names
from hypjax.errors import UserError, explained
from hypjax.system.columns import Options, find_column, require_options, split_options
from hypjax.system.files import missing, read_rows

_TABLES = (".csv", ".tsv", ".parquet")


def read_texts(where: str) -> list[str]:
    """Reads the texts of a file: the lines of a list, or a column of a table.

    The column of a .csv, .tsv or .parquet table is `caption`, `text` or the like, or is named as in
    photos.csv?caption=title. Empty lines of a list are left out. Raises a `UserError` for a file
    that cannot be read, and for a table with an empty cell.
    """
    location, options = split_options(where)
    path = pathlib.Path(location).expanduser()
    if not path.is_file():
        raise UserError(f"{path} is no file of texts" if path.exists() else missing(path))
    is_table = path.suffix.lower() in _TABLES
    require_options(options, ("caption",) if is_table else (), path)
    if is_table:
        texts = _column(path, options)
    else:
        with explained(f"cannot read {path}"):
            texts = [x for x in path.read_text("utf-8-sig").splitlines() if x.strip()]
    if not texts:
        raise UserError(f"{path} holds no texts")
    return texts


def _column(path: pathlib.Path, options: Options) -> list[str]:
    with explained(f"cannot read {path}"):
        names, rows = read_rows(path)
    name = find_column(names, "caption", options, path)
    if name is None:
        named = f"name it by ?caption=COLUMN, one of {', '.join(names)}"
        raise UserError(f"{path} has no column caption; {named}")
    for number, row in enumerate(rows, start=1):
        if not str(row[name] or "").strip():
            raise UserError(f"{path}, row {number} has no text in the column {name}; leave it out")
    return [str(row[name]) for row in rows]


def cell_texts(cell: Any) -> list[str]:
    """The captions in a cell: one text, several that ' => ' separates, or a list; '' if empty."""
    if isinstance(cell, list | tuple | np.ndarray):
        return [str(text or "").strip() for text in cell]
    return [text.strip() for text in str(cell or "").split(" => ")]


def caption_column(cells: Iterable[Any]) -> Shaped[np.ndarray, " images"]:
    """A table's column of captions from the cell of each image, see `cell_texts`."""
    texts = [tuple(cell_texts(cell)) for cell in cells]
    column = np.empty(len(texts), object)
    column[:] = texts
    return column


def given_texts(texts: str | Sequence[str]) -> list[str]:
    """Checks texts from Python, one or several; raises a `UserError` for anything else."""
    given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    for i, text in enumerate(given):
        if not isinstance(text, str):
            raise UserError(f"text {i} is {type(text).__name__}; give strings")
    if not given:
        raise UserError("there are no texts; give one or more strings")
    return given


def table_of_texts(texts: Sequence[str]) -> Dataset:
    """Makes a table of texts, such as a search's queries, whose records and names they are."""
    return table_of_names(texts, texts, [""] * len(texts))
