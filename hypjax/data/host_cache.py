"""The host cache: decoded images, one after the other, in one memory-mapped file.

Images keep their original sizes and exact pixels. The operating system keeps in memory what fits;
all processes of a machine share it. After the pixels, the file holds a checksum of each image and
one of these checksums. Each process verifies an image when it first reads it.
"""

import concurrent.futures
import functools
import pathlib
import shutil
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import tqdm
from jaxtyping import Bool, Int, UInt8, UInt32

from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.files import flush
from hypjax.system.locks import claimed
from hypjax.system.machine import usable_cores

_AHEAD = 4 * usable_cores()  # Images decoded before any of them is written.
_ADVICE = "choose another folder with --config.run.cache_dir, or set --config.run.cache=none"


class DecodedImages:
    """The pixels of images of known sizes, in a file."""

    def __init__(self, path: pathlib.Path, sizes: Int[np.ndarray, "images 2"], channels: int):
        """Refers to a file, which may not exist yet, of images of these heights and widths."""
        self._path, self._sizes, self._channels = path, np.asarray(sizes, np.int64), channels
        lengths = self._sizes.prod(axis=1) * channels
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])

    @property
    def bytes(self) -> int:
        """Size of the whole file."""
        return int(self._offsets[-1]) + 4 * (len(self) + 1)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, i: int) -> UInt8[np.ndarray, "height width channels"] | None:
        """Returns the i-th image, whose pixels are read from the file when accessed.

        If they are damaged, removes the file, so that the next start makes it again, and returns
        None.
        """
        start, end = self._offsets[i : i + 2]
        try:
            pixels = self._map[start:end]
        except FileNotFoundError:  # Another process has found it damaged.
            return None
        # Memory maps report no damage: a truncated or overwritten file gives other pixels.
        if not self._verified[i]:
            if zlib.crc32(pixels) != self._checksums[i]:
                self._discard()
                return None
            self._verified[i] = True
        return pixels.reshape(*self._sizes[i], self._channels)

    def _discard(self) -> None:
        """Reports a damaged file once, and removes it; processes that have mapped it keep it."""
        try:
            if self._path.stat().st_ino != self._inode:
                return  # Another process has made it again.
            self._path.unlink()
        except FileNotFoundError:
            return  # Another process has removed and reported it.
        except OSError as error:
            console.warn(f"{self._path} cannot be removed ({error.strerror})")
        console.warn(
            f"some decoded images in {self._path} are damaged; they are decoded again, and the "
            "next start makes the file again"
        )

    @functools.cached_property
    def _map(self) -> np.memmap:
        self._inode = self._path.stat().st_ino
        return np.memmap(self._path, np.uint8, mode="r")

    @functools.cached_property
    def _checksums(self) -> UInt32[np.ndarray, " images"]:
        return self._map[self._offsets[-1] : -4].view("<u4")

    @functools.cached_property
    def _verified(self) -> Bool[np.ndarray, " images"]:
        return np.zeros(len(self), bool)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the memory map: each worker process maps the file itself."""
        own = ("_map", "_inode", "_checksums", "_verified")
        return {name: value for name, value in vars(self).items() if name not in own}

    def _is_complete(self) -> bool:
        """Whether the file is there, with the checksums of all images."""
        if not self._path.exists() or self._path.stat().st_size != self.bytes:
            return False
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[-1]))
            checksums, last = file.read(4 * len(self)), file.read(4)
        return zlib.crc32(checksums).to_bytes(4, "little") == last

    def fill(self, decode: Callable[[int], UInt8[np.ndarray, "height width channels"]]) -> None:
        """Writes the file, unless it exists; `decode` returns the i-th image.

        Raises UserError if there is no space, or the folder cannot be written.
        """
        if self._is_complete():
            return
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with claimed(folder, "decoding images"):
                if not self._is_complete():  # Another process may have written it meanwhile.
                    self._fill(decode)
        except OSError as error:
            raise UserError(
                f"cannot keep decoded images in {folder} ({error.strerror}); {_ADVICE}"
            ) from error

    def _fill(self, decode: Callable[[int], UInt8[np.ndarray, "height width channels"]]) -> None:
        if self._path.exists():
            console.warn(f"the decoded images in {self._path} are damaged; they are decoded again")
        # A full disk would show only after hours of decoding.
        free = shutil.disk_usage(self._path.parent).free
        if self.bytes > free:
            raise UserError(
                f"decoded images need {in_bytes(self.bytes)} in {self._path.parent}, where "
                f"{in_bytes(free)} are free; {_ADVICE}"
            )
        # A process that is killed leaves no file that looks complete.
        unfinished = self._path.with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:  # Overwrites that of a killed process.
                self._write(file, decode)
                flush(file)
            unfinished.replace(self._path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _write(
        self, file: BinaryIO, decode: Callable[[int], UInt8[np.ndarray, "height width channels"]]
    ) -> None:
        """Writes the pixels, decoded by threads, then their checksums and the checksum of those."""
        bar = tqdm.tqdm(
            total=len(self), desc="decoding images once", unit="image", disable=None, leave=False
        )
        checksums = np.zeros(len(self), "<u4")
        with bar, concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
            for first in range(0, len(self), _AHEAD):
                numbers = range(first, min(first + _AHEAD, len(self)))
                for i, pixels in zip(numbers, pool.map(decode, numbers), strict=True):
                    content = np.ascontiguousarray(pixels).data
                    file.write(content)
                    checksums[i] = zlib.crc32(content)
                    bar.update()
        file.write(checksums.tobytes())
        file.write(zlib.crc32(checksums.tobytes()).to_bytes(4, "little"))


def in_bytes(number: float) -> str:
    """Returns a number of bytes for messages, such as '1.25MB'."""
    return tqdm.tqdm.format_sizeof(number, "B")
