"""Images listed in a CSV or Parquet table."""

import csv
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from hypjax.data.photos.photo import SPLITS, Photo
from hypjax.errors import UserError

SUFFIXES = (".csv", ".parquet")


def read_table(table: pathlib.Path) -> list[Photo]:
    """Reads the images that a CSV or Parquet table lists.

    Its columns are `path` (absolute, or relative to the table's folder), `label`, and optionally
    `split` (one of `SPLITS`) and `superlabel`.

    Raises:
        UserError: If the table cannot be read, lacks a column or a value, lists a file twice, or
            assigns a label to two groups.
    """
    rows = _read_rows(table)
    groups: dict[str, str | None] = {}
    seen: dict[str, int] = {}
    photos = []
    for number, row in enumerate(rows, start=1):
        place = f"{table}, row {number}"
        photo = _parse_row(table.parent, row, place)
        if photos and (photo.split is None) != (photos[0].split is None):
            raise UserError(f"{place}: either all rows have a split or none has")
        first = seen.setdefault(os.path.realpath(photo.path), number)
        if first != number:
            raise UserError(f"{place}: {row['path']} is already in row {first}")
        group = groups.setdefault(photo.label, photo.superlabel)
        if group != photo.superlabel:
            raise UserError(
                f"{place}: label {photo.label} has the superlabel {photo.superlabel} "
                f"here, but {group} before"
            )
        photos.append(photo)
    if not photos:
        raise UserError(f"{table} has no rows")
    return photos


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
    value = {
        name: None if row.get(name) in (None, "") else str(row[name])
        for name in ("path", "label", "split", "superlabel")
    }
    for name in ("path", "label"):
        if value[name] is None:
            raise UserError(f"{place}: no {name}")
    if "\0" in value["path"]:
        raise UserError(f"{place}: its path contains a null character")
    if value["split"] is not None and value["split"] not in SPLITS:
        raise UserError(
            f"{place}: split is {value['split']}; it must be one of {', '.join(SPLITS)}"
        )
    return Photo(folder / value["path"], value["label"], value["split"], value["superlabel"])
