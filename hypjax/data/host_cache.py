"""The host cache: decoded images in a memory-mapped file.

Images keep their original sizes and exact pixels. The operating system keeps in memory what fits;
all processes of a machine share it.
"""

import concurrent.futures
import pathlib
from collections.abc import Callable

import numpy as np
import tqdm
from jaxtyping import Int, UInt8

from hypjax.errors import UserError
from hypjax.system.array_cache import ArrayCache
from hypjax.system.locks import claimed
from hypjax.system.machine import usable_cores

_AHEAD = 4 * usable_cores()  # Images decoded before any of them is written.


class DecodedImages:
    """The pixels of images of known sizes, in a folder."""

    def __init__(self, folder: pathlib.Path, sizes: Int[np.ndarray, "images 2"], channels: int):
        """Refers to a folder, which may not exist yet, of images of these heights and widths."""
        self._cache = ArrayCache(folder, len(sizes))
        self._sizes, self._channels = np.asarray(sizes, np.int64), channels

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, i: int) -> UInt8[np.ndarray, "height width channels"]:
        """Returns the i-th image."""
        return self._cache[i].reshape(*self._sizes[i], self._channels)

    def fill(self, decode: Callable[[int], UInt8[np.ndarray, "height width channels"]]) -> None:
        """Writes the images, unless they are there; `decode` returns the i-th image.

        Raises UserError if there is no space, or the folder cannot be written.
        """
        cache, folder = self._cache, self._cache.folder
        if cache.is_complete():
            return
        options = {"desc": "decoding images once", "unit": "image", "disable": None, "leave": False}
        try:
            with (
                cache.filling(claimed(folder, "decoding images")) as done,
                tqdm.tqdm(total=len(self), initial=done, **options) as bar,
                concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool,
            ):
                for first in range(done, len(self), _AHEAD):
                    images = list(pool.map(decode, range(first, min(first + _AHEAD, len(self)))))
                    cache.append(images)
                    bar.update(len(images))
        except OSError as error:
            raise UserError(
                f"cannot keep decoded images in {folder.parent} ({error.strerror}); choose another "
                "folder with --config.run.cache_dir, or set --config.run.cache=none"
            ) from error


def in_bytes(number: float) -> str:
    """Returns a number of bytes for messages, such as '1.25MB'."""
    return tqdm.tqdm.format_sizeof(number, "B")
