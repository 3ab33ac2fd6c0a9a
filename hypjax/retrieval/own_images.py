"""Which rows of a gallery are a query's own image. A query should not find these.

The rule, which all searches and scores follow:

- An id that is an absolute path, or that leads to a file, stands for this file. Rows are one image
  if their ids lead to one file, also by links.
- Other ids are names. Rows with one name are one image. But if images with different points share a
  name, as file names without folders do, the points of a query's own image must be equal, too.
- Ids that only number the rows of a table say nothing about another table: there, a query's own
  image is a row with an equal point.
- Within one table, equal points do not make one image of two rows. Among queries that search each
  other, equal names do not either, only files.
"""

import collections
import functools
import os
import re
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Shaped

from hypjax.system.files import real_paths

OwnRows = Sequence[Sequence[int]]  # Gallery rows with each query's image; () if there are none.
Contents = Shaped[np.ndarray, "n ..."] | None  # Points or checksums, equal if the images are.
_NUMBERED = re.compile(r"image \d+")  # Ids of images from memory.


class OwnImages:
    """A gallery in which queries' own images are looked up; '' is an unknown id."""

    def __init__(self, ids: Sequence[str], contents: Contents = None) -> None:
        self._gallery = _Table(ids, contents)
        self._indexes = {}  # Keys of the gallery's rows, and rows by key, for each kind of key.

    def rows(
        self, ids: Sequence[str], contents: Contents = None, *, one_table: bool = False
    ) -> OwnRows:
        """Rows of each query's own image; `one_table` if queries and gallery are parts of it."""
        queries = _Table(ids, contents)
        tables = queries, self._gallery
        numbered = not one_table and any(table.numbered for table in tables)
        kind = not numbered, numbered or any(table.ambiguous for table in tables)
        if kind not in self._indexes:
            keys = self._gallery.keys(*kind)
            self._indexes[kind] = keys, _rows_by_key(keys)
        items, rows_of = self._indexes[kind]
        keys = queries.keys(*kind)
        rows = [[] if key is None else rows_of.get(key, []) for key in keys]
        if not numbered:
            return rows
        # Of several equal points, the one with the query's number.
        namesakes = [self._gallery.row_of_id.get(x, -1) for x in ids]
        pairs = zip(namesakes, keys, strict=True)
        same = [row >= 0 and items[row] == key for row, key in pairs]
        return [[namesakes[i]] if x and same[i] else x[:1] for i, x in enumerate(rows)]


def copies(ids: Sequence[str]) -> OwnRows:
    """For each row of a table, all rows of its file, itself included; () if files differ."""
    table = _Table(ids, None)
    rows_of = _rows_by_key(table.paths)
    if len(rows_of) == len(ids):
        return ()
    file_rows = [rows_of[path] if table.is_file(i) else [i] for i, path in enumerate(table.paths)]
    return file_rows if any(len(rows) > 1 for rows in file_rows) else ()


class _Table:
    """The images of a table."""

    def __init__(self, ids: Sequence[str], contents: Contents) -> None:
        self._ids, self._contents, self.paths = ids, contents, real_paths(ids)
        self.numbered = bool(ids) and (
            all(x == str(i) for i, x in enumerate(ids)) or all(map(_NUMBERED.fullmatch, ids))
        )

    def is_file(self, row: int) -> bool:
        """Whether an id stands for a file, and is no name."""
        return os.path.isabs(self._ids[row]) or os.path.isfile(self.paths[row])

    @functools.cached_property
    def row_of_id(self) -> dict[str, int]:
        return {x: row for row, x in enumerate(self._ids)}

    @functools.cached_property
    def ambiguous(self) -> bool:
        """Whether images share a name that differ, or may."""
        first_rows = {}
        for row, name in enumerate(self._ids):
            first = first_rows.setdefault(name, row)
            if name and first != row and not self.is_file(row):
                if self._contents is None or np.any(self._contents[row] != self._contents[first]):
                    return True
        return False

    def keys(self, by_id: bool, by_content: bool) -> list[Hashable]:
        """What one image's rows have in common; None if that is unknown."""
        contents = [None] * len(self._ids)
        if by_content and self._contents is not None:
            contents = [hash(row.tobytes()) for row in self._contents]
        keys = []
        for row, (path, content) in enumerate(zip(self.paths, contents, strict=True)):
            sure = by_id and (not by_content or self.is_file(row))
            known = self._ids[row] and (sure or content is not None)
            keys.append((path if by_id else None, None if sure else content) if known else None)
        return keys


def _rows_by_key(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    rows = collections.defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return dict(rows)
