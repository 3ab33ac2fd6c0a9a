"""Reads a dataset's images ahead of the one who writes them, and sees that each can be decoded."""

import collections
import concurrent.futures
import contextlib
import csv
import pathlib
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tqdm
from PIL import Image

from hypjax.data import pixels
from hypjax.data.preparation.layouts import Listed
from hypjax.data.records import Example
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.cores import usable_cores

SKIPPED = "skipped.tsv"
_THREADS = min(usable_cores(), 16)  # One thread writes, and keeps up with no more.
_AHEAD = 4 * _THREADS  # Images that are read before they are written, so many lie in memory.


@contextlib.contextmanager
def large_images() -> Iterator[None]:
    """Lets Pillow decode images in silence that are large; huge ones it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


class _Checked(NamedTuple):
    """An image that can be read."""

    content: bytes
    checksum: int
    height: int
    width: int


class CheckedImages:
    """The contents of a benchmark's records, see `builders.Contents`.

    Attributes:
        classes: Names of all classes, in the order of their labels.
    """

    def __init__(self, listing: Mapping[str, Sequence[Listed]], skip_corrupt: bool) -> None:
        """Takes the images of each split; close it to end the threads.

        Args:
            listing: In the order of the records; classes are numbered as they come.
            skip_corrupt: Whether images that cannot be read are left out.
        """
        images = [image for part in listing.values() for image in part]
        self.classes = list(dict.fromkeys(image.label for image in images))
        self._listing, self._skip_corrupt, self._total = listing, skip_corrupt, len(images)
        self._broken: list[tuple[str, str]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._bar = tqdm.tqdm(
            desc="preparing", total=self._total, unit="image", disable=None, leave=False
        )

    def splits(self) -> dict[str, Iterator[Example]]:
        """Examples of each split that has any; to be used one after the other."""
        return {name: self._examples(part) for name, part in self._listing.items() if part}

    def finish(self, folder: pathlib.Path) -> None:
        """Tells of the images that could not be read, and writes them down if they are left out.

        Raises:
            UserError: There are some, and they are not to be left out, or are all.
        """
        self._bar.close()
        for name, reason in self._broken:
            console.say(f"cannot read {name} ({reason})")
        told = f"{len(self._broken)} of {self._total} images cannot be read (listed above)"
        if len(self._broken) == self._total:
            raise UserError(f"{told}; fetch the dataset again")
        if self._broken and not self._skip_corrupt:
            raise UserError(f"{told}; fetch them again, or leave them out with --skip_corrupt")
        if self._broken:
            console.warn(f"{told} and were left out; {SKIPPED} beside the records names them")
            with (folder / SKIPPED).open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, delimiter="\t", lineterminator="\n")
                rows.writerows([("name", "reason"), *self._broken])

    def close(self) -> None:
        """Ends the threads."""
        self._bar.close()
        self._pool.shutdown(cancel_futures=True)

    def _examples(self, images: Sequence[Listed]) -> Iterator[Example]:
        for image, outcome in self._outcomes(images):
            self._bar.update()
            if isinstance(outcome, str):
                self._broken.append((image.name, outcome))
            elif self._skip_corrupt or not self._broken:  # Else nothing will come of it.
                yield {
                    "image": outcome.content,
                    "checksum": outcome.checksum,
                    "height": outcome.height,
                    "width": outcome.width,
                    "label": image.label,
                    "name": image.name,
                    "class_name": image.label,
                    "superlabel": image.superlabel,
                }

    def _outcomes(self, images: Sequence[Listed]) -> Iterator[tuple[Listed, _Checked | str]]:
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        todo = iter(images)
        for image in images:
            while len(pending) < _AHEAD and (following := next(todo, None)) is not None:
                pending.append(self._pool.submit(_checked, following))
            yield image, pending.popleft().result()


def _checked(image: Listed) -> _Checked | str:
    """Reads an image, or says why it cannot be read."""
    try:
        content = image.read()
        decoded = pixels.decode(content, channels=3)
    except Exception as error:  # Decoders of damaged files raise whatever they meet.
        return pixels.reason(error)
    return _Checked(content, zlib.crc32(content), decoded.height, decoded.width)
