"""Warns of images of 16 bits that are read nearly black, because they use fewer bits."""

import functools
import pathlib

from hypjax.data import pixels
from hypjax.data.dataset import Dataset
from hypjax.system import console

_DARK = 18  # Of 255. 12 bits reach 15 in a file of 16, which the bicubic filter exceeds by a few.
_warn_once = functools.lru_cache(console.warn)  # A run reads its test images at each evaluation.


class Brightness:
    """Finds a dataset's images of 16 bits that hold 12 or fewer, and do not say so.

    One dark image is no sign of that, but all images of a suffix are. Headers cost time, so only
    one image of such a suffix is asked for its bits.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._dark: dict[str, int] = {}  # By suffix, the first dark image.
        self._bright: set[str] = set()

    def see(self, i: int, level: int) -> None:
        """Takes the brightest level of the i-th image, from 0 to 255; in any thread."""
        suffix = pathlib.PurePath(self._dataset.name(i)).suffix.lower()
        if level > _DARK:
            self._bright.add(suffix)
        else:
            self._dark.setdefault(suffix, i)

    def warn(self) -> None:
        """Warns of each suffix whose images are all dark, and of 16 bits."""
        for suffix in sorted(self._dark.keys() - self._bright):
            i = self._dark[suffix]
            if pixels.is_deep(self._dataset.content(i)):
                images = f"all {suffix} images of 16 bits, such as {self._dataset.name(i)},"
                problem = "stay below a sixteenth of white, so they are read nearly black"
                _warn_once(f"{images} {problem}; if they hold fewer bits, scale them to all 16")
