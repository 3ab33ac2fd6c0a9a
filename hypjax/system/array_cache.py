"""A cache on disk of arrays that are computed once, in order; a partial cache is completed.

The cache's folder holds the arrays' concatenated bytes, and an index of their ends and checksums.
The folder's name is a hash of everything that the arrays depend on, so it is never out of date.
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import Shaped, UInt8

from hypjax.system import console
from hypjax.system.files import contiguous

# For each array: the end of its bytes, their CRC-32 with `failed` as initial value, and whether the
# array could not be computed, in which case the bytes hold the reason as text.
_ENTRY = np.dtype([("end", "<i8"), ("checksum", "<u4"), ("failed", "<u4")])


class ArrayCache:
    """A fixed number of arrays in a folder, of which the first `done` are present."""

    def __init__(self, folder: pathlib.Path, count: int) -> None:
        self.folder, self.done = folder, 0
        self._count, self._intact = count, np.zeros(count, bool)
        self._arrays, self._index = folder / "arrays", folder / "index"

    def __len__(self) -> int:
        return self._count

    def is_complete(self) -> bool:
        """Whether all arrays are present, judging by the sizes of both files."""
        index = self._read_index()
        if len(index) != len(self) or not self._arrays.exists():
            return False
        return self._arrays.stat().st_size == index["end"][-1]

    def _read_index(self) -> np.ndarray:
        return np.fromfile(self._index, _ENTRY) if self._index.exists() else np.zeros(0, _ENTRY)

    @contextlib.contextmanager
    def filling(self, lock: AbstractContextManager[None] | None = None) -> Iterator[int]:
        """Holds a lock while the body appends the missing arrays; yields the number present."""
        with lock or contextlib.nullcontext():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.done = self._resume()
            with self._arrays.open("ab") as self._file, self._index.open("ab") as self._entries:
                yield self.done
                for file in (self._file, self._entries):  # The body may have removed the folder.
                    os.fsync(file.fileno())

    def _resume(self) -> int:
        """Removes the first damaged array and all after it; returns the number that remain."""
        index = self._read_index()
        intact, valid_bytes = 0, 0
        with self._arrays.open("a+b") as file:
            size = file.tell()
            file.seek(0)
            for end, checksum, failed in index.tolist():
                content = file.read(end - valid_bytes) if valid_bytes < end <= size else b""
                if not content or crc32(content, failed) != checksum:
                    break
                intact, valid_bytes = intact + 1, end
        if len(index) == len(self) and intact < len(index):
            # Other processes may have mapped the complete file, so it must not be truncated.
            self._discard()
            return 0
        self._index.touch()
        os.truncate(self._arrays, valid_bytes)
        os.truncate(self._index, intact * _ENTRY.itemsize)
        return intact

    def append(
        self, arrays: Sequence[Shaped[np.ndarray, "..."]], reasons: Mapping[int, str] | None = None
    ) -> None:
        """Appends arrays; `reasons` says by index why some of `arrays` could not be computed."""
        entries = np.zeros(len(arrays), _ENTRY)
        reasons = reasons or {}
        for i, array in enumerate(arrays):
            failed = i in reasons
            # Each entry needs at least one byte.
            content = (reasons[i].encode() or b"?") if failed else contiguous(array).tobytes()
            self._file.write(content)
            # The checksum starts from the flag, so that it covers the flag, too.
            entries[i] = self._file.tell(), crc32(content, failed), failed
        # Arrays are flushed before the index, so that a kill in between loses only the new arrays.
        self._file.flush()
        self._entries.write(entries.tobytes())
        self._entries.flush()
        self.done += len(arrays)

    def __getitem__(self, i: int) -> UInt8[np.ndarray, " bytes"] | None:
        """Returns an array's bytes, or None if they are damaged, which each process checks once."""
        content = self._map[self._ends[i] : self._ends[i + 1]]
        if not self._intact[i]:
            _, checksum, failed = self._entry_of[i]
            self._intact[i] = crc32(content.data, failed) == checksum
        return content if self._intact[i] else None

    def replace(self, i: int, array: Shaped[np.ndarray, "..."]) -> None:
        """Replaces a damaged array for all processes, if its entry is intact and may be written."""
        console.warn_once(f"{self.folder} is damaged; what differs is computed again")
        content = array.tobytes()
        start, end = self._ends[i : i + 2]
        with contextlib.suppress(OSError, ValueError):
            np.memmap(self._arrays, np.uint8, "r+")[start:end] = np.frombuffer(content, np.uint8)
            np.memmap(self._index, _ENTRY, "r+")[i] = end, crc32(content), 0

    def table(self, dtype: Any) -> tuple[Shaped[np.ndarray, "n d"], dict[int, str]] | None:
        """Returns the arrays as rows, 0 for arrays that failed, and by row why those failed.

        Returns None for a damaged cache, which it removes: the arrays must be computed again.
        """
        arrays, reasons = {}, {}
        for i, failed in enumerate(self._entry_of["failed"].tolist()):
            if (content := self[i]) is None:
                self._discard()
                return None
            if failed:
                reasons[i] = content.tobytes().decode()
            else:
                arrays[i] = content.view(dtype)
        rows = np.zeros((len(self), max(map(len, arrays.values()), default=0)), dtype)
        for i, row in arrays.items():
            rows[i] = row
        return rows, reasons

    def _discard(self) -> None:
        console.warn(f"{self.folder} is damaged; what it held is computed again")
        self._index.unlink(missing_ok=True)
        self._arrays.unlink(missing_ok=True)

    @functools.cached_property
    def _map(self) -> np.memmap:
        return np.memmap(self._arrays, np.uint8, mode="r")

    @functools.cached_property
    def _entry_of(self) -> np.memmap:
        return np.memmap(self._index, _ENTRY, mode="r")

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.append(0, self._entry_of["end"])

    def __reduce__(self) -> tuple[type, tuple[pathlib.Path, int]]:
        # The memory map is not pickled: each worker process maps the file itself.
        return ArrayCache, (self.folder, len(self))
