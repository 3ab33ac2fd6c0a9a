"""Texts to embed: from Python, from lists of lines, and from tables."""

import pathlib
from collections.abc import Sequence
from typing import Any

from hypjax.data.dataset import Dataset, table_of_names
from hypjax.errors import UserError, explained
from hypjax.system.columns import find_column, require_options, split_options
from hypjax.system.files import missing, read_csv, read_parquet

_TABLES = (".csv", ".tsv", ".parquet")


def read_texts(where: str) -> list[str]:
    """Reads the texts of a file: the lines of a list, or a column of a table.

    The column of a .csv, .tsv or .parquet table is `text`, `caption` or the like, or is named as in
    captions.csv?text=title. Empty lines of a list are left out. Raises a `UserError` for a file
    that cannot be read, and for a table with an empty cell.
    """
    location, options = split_options(where)
    path = pathlib.Path(location).expanduser()
    if not path.is_file():
        raise UserError(missing(path) if not path.exists() else f"{path} is no file of texts")
    is_table = path.suffix.lower() in _TABLES
    require_options(options, ("text",) if is_table else (), path)
    with explained(f"cannot read {path}"):
        texts = _column(path, options.get("text")) if is_table else _lines(path)
    if not texts:
        raise UserError(f"{path} holds no texts")
    return texts


def _lines(path: pathlib.Path) -> list[str]:
    return [line for line in path.read_text("utf-8-sig").splitlines() if line.strip()]


def _column(path: pathlib.Path, chosen: str | None) -> list[str]:
    if path.suffix.lower() == ".parquet":
        table = read_parquet(path)
        names, rows = table.column_names, table.to_pylist()
    else:
        names, cells = read_csv(path)
        rows = [dict(zip(names, row, strict=True)) for row in cells]
    name = find_column(names, "text", {"text": chosen} if chosen else {}, path)
    if name is None:
        listed = ", ".join(names)
        raise UserError(f"{path} has no column text; name it by ?text=COLUMN, one of {listed}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row[name], str) or not row[name].strip():
            raise UserError(f"{path}, row {number} has no text in the column {name}; leave it out")
    return [row[name] for row in rows]


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
