"""Reads a dataset's images ahead of the writer, and checks that each can be decoded."""

import collections
import concurrent.futures
import contextlib
import csv
import pathlib
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tqdm
from PIL import Image

from hypjax.data import pixels
from hypjax.data.preparation.official import Found, ListedImage
from hypjax.data.records import Example
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.cores import usable_cores

SKIPPED = "skipped.tsv"
_THREADS = min(usable_cores(), 16)  # The single writing thread keeps up with no more.
_AHEAD = 4 * _THREADS  # Images read before they are written; they are held in memory.


@contextlib.contextmanager
def large_images() -> Iterator[None]:
    """Silences Pillow's warning of large images; it still rejects huge ones."""
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
    """Contents of an official dataset's records, see `builders.Contents`.

    Attributes:
        classes: Names of all classes, in the order of their labels.
        tables: Tables of relations.
    """

    def __init__(self, found: Found, skip_corrupt: bool) -> None:
        """Starts the reading threads, which `close` ends.

        Args:
            found: Images of each split, in the order of the records, and tables. Classes are
                numbered in the order in which they first appear.
            skip_corrupt: Whether to leave out images that cannot be read.
        """
        listing, self.tables = found
        images = [image for part in listing.values() for image in part]
        self.classes = list(dict.fromkeys(image.label for image in images))
        self._listing, self._skip_corrupt, self._total = listing, skip_corrupt, len(images)
        self._broken: list[tuple[str, str]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._bar = tqdm.tqdm(
            desc="preparing", total=self._total, unit="image", disable=None, leave=False
        )

    def splits(self) -> dict[str, Iterator[Example]]:
        """Returns the examples of each non-empty split, to be consumed split by split."""
        return {name: self._examples(part) for name, part in self._listing.items() if part}

    def finish(self, folder: pathlib.Path) -> None:
        """Reports images that could not be read, and lists them in a file if they are left out.

        Raises:
            UserError: If there are any and they may not be left out, or if no others remain.
        """
        self._bar.close()
        for name, reason in self._broken:
            console.say(f"cannot read {name} ({reason})")
        summary = f"{len(self._broken)} of {self._total} images cannot be read (listed above)"
        if len(self._broken) == self._total:
            raise UserError(f"{summary}; fetch the dataset again")
        if self._broken and not self._skip_corrupt:
            raise UserError(f"{summary}; fetch them again, or leave them out with --skip_corrupt")
        if self._broken:
            console.warn(f"{summary} and were left out; {SKIPPED} next to the records lists them")
            with (folder / SKIPPED).open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, delimiter="\t", lineterminator="\n")
                rows.writerows([("name", "reason"), *self._broken])

    def close(self) -> None:
        """Ends the threads."""
        self._bar.close()
        self._pool.shutdown(cancel_futures=True)

    def _examples(self, images: Sequence[ListedImage]) -> Iterator[Example]:
        for image, outcome in self._read_ahead(images):
            self._bar.update()
            if isinstance(outcome, str):
                self._broken.append((image.name, outcome))
            elif self._skip_corrupt or not self._broken:  # Otherwise nothing will be kept.
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

    def _read_ahead(
        self, images: Sequence[ListedImage]
    ) -> Iterator[tuple[ListedImage, _Checked | str]]:
        """Yields images in order, each with its content or the reason why it cannot be read."""
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        remaining = iter(images)
        for image in images:
            while len(pending) < _AHEAD and (following := next(remaining, None)) is not None:
                pending.append(self._pool.submit(_check, following))
            yield image, pending.popleft().result()


def _check(image: ListedImage) -> _Checked | str:
    """Reads and decodes an image, or returns the reason why that fails."""
    try:
        content = image.read()
        decoded = pixels.decode(content, channels=3)
    except Exception as error:  # Decoders raise almost anything on damaged files.
        return pixels.reason(error)
    return _Checked(content, zlib.crc32(content), decoded.height, decoded.width)
