"""Official datasets: what describes one, from its published files to the images it lists.

Class numbers, splits and counts follow the official lists and the protocol by which retrieval is
reported on these datasets (Ermolov et al., CVPR 2022, section 4.1, and the papers it follows).
"""

import collections
import concurrent.futures
import contextlib
import csv
import dataclasses
import functools
import pathlib
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow
import tensorflow_datasets as tfds
import tqdm
from PIL import Image

from hypjax.data import pixels
from hypjax.data.preparation.sources import FileTree, Source
from hypjax.data.records import Example, RecordBuilder
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.machine import usable_cores


class Count(NamedTuple):
    """Size of a split.

    Attributes:
        images: Number of images.
        classes: Number of classes; None if it is not known, so that it is not compared.
    """

    images: int
    classes: int | None


class ListedImage(NamedTuple):
    """One image that a dataset lists.

    Attributes:
        name: Path within the dataset, with '/'; unique.
        label: Name of the class, unique within the dataset.
        read: Returns the file's bytes unchanged; safe to call from several threads. Raises OSError
            if the file cannot be read.
        superlabel: Name of the coarser class; '' if the dataset has none.
    """

    name: str
    label: str
    read: Callable[[], bytes]
    superlabel: str = ""


Listing = dict[str, list[ListedImage]]  # Images by split.


class Found(NamedTuple):
    """What a copy of a dataset holds.

    Attributes:
        images: The images of each split.
        tables: Its tables of relations, see `hypjax.data.records`.
    """

    images: Listing
    tables: Mapping[str, pyarrow.Table]


def _no_tables(tree: FileTree) -> Mapping[str, pyarrow.Table]:
    del tree
    return {}


@dataclasses.dataclass(frozen=True)
class OfficialDataset:
    """A dataset prepared from the files that its authors published.

    Attributes:
        builder: TFDS builder of its records; the dataset has the builder's name.
        counts: Size of each split of the complete dataset.
        source: Where its files come from.
        list_images: Lists the images of each split whose files exist.
        tables: Reads the tables of relations that its builder has.
    """

    builder: "type[OfficialBuilder]"
    counts: Mapping[str, Count]
    source: Source
    list_images: Callable[[FileTree], Listing]
    tables: Callable[[FileTree], Mapping[str, pyarrow.Table]] = _no_tables

    @property
    def name(self) -> str:
        """Name of the dataset."""
        return self.builder.name

    @contextlib.contextmanager
    def open(self, manual_dir: pathlib.Path | None, downloads: pathlib.Path) -> Iterator[Found]:
        """Finds or downloads the files, and lists the images of each split.

        Listed images whose files are missing are left out, so a split may be empty.

        Args:
            manual_dir: The dataset's folder, a folder that contains it, or a folder with its
                archives. If None, `downloads` is searched, and missing archives are downloaded
                where possible.
            downloads: Folder for downloads and temporary files.

        Yields:
            The images by split, in the dataset's own order of classes and readable within the
            body, and the tables of relations.

        Raises:
            UserError: If no images are found, or a list or an archive is damaged.
        """
        with self.source.open(self.name, manual_dir, downloads) as tree:
            listing = self.list_images(tree)
            if not any(listing.values()):
                raise UserError(f"{tree.root} has no images of {self.name}; {self.source.advice}")
            yield Found(listing, self.tables(tree))


class Row(NamedTuple):
    """A line of a list.

    Attributes:
        place: File and line number, for messages.
        text: The line, stripped.
    """

    place: str
    text: str


def read_rows(tree: FileTree, name: str) -> list[Row]:
    """Reads the non-empty lines of a list.

    Raises:
        UserError: If the list is missing, unreadable or not UTF-8.
    """
    try:
        lines = tree.read_list(name).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{tree.root / name} is damaged: it is not a text file; fetch it again"
        ) from error
    numbered = enumerate((line.strip() for line in lines), 1)
    return [Row(f"{tree.root / name}, line {n}", line) for n, line in numbered if line]


def damaged_list(place: str, problem: str) -> UserError:
    """Returns the error for a damaged list.

    Args:
        place: File, and line if known.
        problem: What is wrong there.
    """
    return UserError(f"{place}: {problem}; the list is damaged, fetch it again")


def match_row(pattern: str, row: Row, example: str) -> re.Match[str]:
    """Parses a line by a regular expression.

    Args:
        pattern: Must match the whole line.
        row: The line.
        example: A valid line, for the message.

    Raises:
        UserError: If the line does not match.
    """
    match = re.fullmatch(pattern, row.text)
    if match is None:
        raise damaged_list(row.place, f"{row.text[:100]!r} is not of the form {example!r}")
    return match


class NameChecker:
    """Checks the image names of a dataset, and collects those without a file."""

    def __init__(self) -> None:
        """Starts with no names."""
        self._seen: set[str] = set()
        self._missing: list[str] = []

    def check(self, name: str, place: str) -> None:
        """Rejects duplicates, and names that point outside the dataset's folder.

        Raises:
            UserError: If the name is invalid.
        """
        if name.startswith("/") or ".." in name.split("/"):
            raise damaged_list(place, f"{name!r} points outside the dataset's folder")
        if name in self._seen:
            raise damaged_list(place, f"{name!r} is listed twice")
        self._seen.add(name)

    def has_file(self, name: str, tree: FileTree) -> bool:
        """Whether the name has a file; remembers the name if not."""
        if name not in tree.files:
            self._missing.append(name)
        return name in tree.files

    def warn_of_missing(self) -> None:
        """Warns of names without a file."""
        if self._missing:
            more = f", and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
            console.warn(f"listed but missing: {self._missing[0]}{more}")


def listed_image(
    tree: FileTree, name: str, label: str, superlabel: str = "", *, file: str | None = None
) -> ListedImage:
    """Returns a listed image that is read from the tree.

    Args:
        tree: The dataset's files.
        name: Path within the dataset.
        label: Name of the class.
        superlabel: Name of the coarser class, if any.
        file: Path within the tree, if it differs from the name.
    """
    return ListedImage(name, label, functools.partial(tree.read, file or name), superlabel)


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


class Contents(Protocol):
    """What a dataset's records will hold.

    Attributes:
        classes: Names of all classes, in the order of their labels.
        tables: Tables of relations.
    """

    classes: Sequence[str]
    tables: Mapping[str, pyarrow.Table]

    def splits(self) -> Mapping[str, Iterable[Example]]:
        """Returns the examples of each split, to be consumed split by split."""

    def finish(self, folder: pathlib.Path) -> None:
        """Called after the last example; if it raises, the folder is discarded."""


class OfficialBuilder(RecordBuilder, skip_registration=True):
    """Builder of a dataset that is read from the files its authors published."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    _contents: Contents | None = None

    def set_contents(self, contents: Contents) -> None:
        """Sets what `download_and_prepare` will write."""
        self._contents = contents

    def _generate_splits(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig,
    ) -> list[tfds.core.SplitInfo]:
        written = super()._generate_splits(dl_manager, download_config)
        self._contents.finish(pathlib.Path(self.data_dir))
        return written

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        if self._contents is None:
            raise UserError(
                f"{self.name} is not prepared in {self.data_dir}; "
                f"run python -m hypjax.prepare --dataset={self.name}"
            )
        self.info.features["label"].names = list(self._contents.classes)
        splits = self._contents.splits()
        return {name: self._generate_examples(part) for name, part in splits.items()}

    def tables(self) -> Mapping[str, pyarrow.Table]:
        """Returns those of the published files."""
        return self._contents.tables

    def _generate_examples(self, examples: Iterable[Example]) -> Iterator[tuple[int, Example]]:
        yield from enumerate(examples)
