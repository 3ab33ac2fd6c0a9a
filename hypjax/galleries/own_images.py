"""Gallery rows that hold a query's own image, which the query should not find.

All searches and scores follow these rules:

- An id that is an absolute path, or that leads to a file, stands for this file. Rows are one image
  if their ids lead to one file, also by links.
- Other ids are names, in any Unicode form. Rows with one name are one image. But where images
  with different points share a name, as file names without folders do, the query's own image must
  also have its point.
- Ids that only number the rows of a table say nothing about another table. There, a query's own
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

from hypjax.retrieval.inputs import OwnRows
from hypjax.system.files import real_paths
from hypjax.types import composed

Contents = Shaped[np.ndarray, "n ..."] | None  # Points or checksums of images.
_NUMBERED = re.compile(r"image \d+")  # Ids of images from memory.


class OwnImages:
    """Looks up queries' own images in a gallery; '' is an unknown id."""

    def __init__(self, ids: Sequence[str], contents: Contents = None) -> None:
        self._gallery = _Table(ids, contents)
        # By arguments of `keys`: the gallery's keys, and its rows by key.
        self._indexes: dict[
            tuple[bool, bool], tuple[list[Hashable], dict[Hashable, list[int]]]
        ] = {}

    def rows(
        self, ids: Sequence[str], contents: Contents = None, *, one_table: bool = False
    ) -> OwnRows:
        """Rows of each query's own image; `one_table` if queries and gallery are parts of one."""
        queries, gallery = _Table(ids, contents), self._gallery
        by_id = one_table or not (queries.numbered or gallery.numbered)
        by_content = not by_id or queries.ambiguous or gallery.ambiguous
        if (by_id, by_content) not in self._indexes:
            gallery_keys = gallery.keys(by_id, by_content)
            self._indexes[by_id, by_content] = gallery_keys, _rows_by_key(gallery_keys)
        gallery_keys, rows_by_key = self._indexes[by_id, by_content]
        own_rows = []
        for name, key in zip(ids, queries.keys(by_id, by_content), strict=True):
            rows = [] if key is None else rows_by_key.get(key, [])
            if rows and not by_id:  # Of several equal points, the one with the query's number.
                namesake = gallery.row_of_id.get(name, rows[0])
                rows = [namesake] if gallery_keys[namesake] == key else rows[:1]
            own_rows.append(rows)
        return own_rows


def copies(ids: Sequence[str]) -> OwnRows:
    """All rows of each row's file, the row included; () if no rows share a file."""
    table = _Table(ids, None)
    if len(set(table.paths)) == len(ids):
        return ()
    rows_by_path = _rows_by_key(table.paths)
    own_rows = [rows_by_path[x] if table.is_file(i) else [i] for i, x in enumerate(table.paths)]
    return own_rows if max(map(len, own_rows)) > 1 else ()


class _Table:
    """Ids of a table's images, and their points or checksums."""

    def __init__(self, ids: Sequence[str], contents: Contents) -> None:
        self._ids, self._contents = ids, contents
        self.paths = real_paths(ids)
        self.numbered = bool(ids) and (
            all(name == str(row) for row, name in enumerate(ids))
            or all(map(_NUMBERED.fullmatch, ids))
        )

    def is_file(self, row: int) -> bool:
        """Whether an id stands for a file, rather than being a name."""
        return os.path.isabs(self._ids[row]) or os.path.isfile(self.paths[row])

    @functools.cached_property
    def row_of_id(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self._ids)}

    @functools.cached_property
    def ambiguous(self) -> bool:
        """Whether images share a name, but their contents differ or are unknown."""
        first_rows: dict[str, int] = {}
        for row, name in enumerate(self._ids):
            first = first_rows.setdefault(composed(name), row)
            if name and first != row and not self.is_file(row):
                if self._contents is None or np.any(self._contents[row] != self._contents[first]):
                    return True
        return False

    def keys(self, by_id: bool, by_content: bool) -> list[Hashable]:
        """Keys that are equal for all rows of one image; None where an image is unknown."""
        contents: list[int | None] = [None] * len(self._ids)
        if by_content and self._contents is not None:
            contents = [hash(row.tobytes()) for row in self._contents]
        keys: list[Hashable] = []
        for row, (path, content) in enumerate(zip(self.paths, contents, strict=True)):
            if not (path.isascii() or os.path.lexists(path)):  # Two files may have one form.
                path = composed(path)
            if self._ids[row] and by_id and (not by_content or self.is_file(row)):
                keys.append((path, None))
            elif self._ids[row] and content is not None:
                keys.append((path if by_id else None, content))
            else:
                keys.append(None)
        return keys


def _rows_by_key(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    rows = collections.defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return dict(rows)
