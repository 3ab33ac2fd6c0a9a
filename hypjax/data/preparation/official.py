"""Official datasets: from the files that their authors published to the records we write.

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
from typing import Any, NamedTuple

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

SKIPPED = "skipped.tsv"
_THREADS = min(usable_cores(), 16)  # The single writing thread keeps up with no more.
_AHEAD = 4 * _THREADS  # Images read before they are written; they are held in memory.


class Count(NamedTuple):
    """Size of a split.

    Attributes:
        images: Number of images.
        classes: Number of classes; None if it is not known, so that it is not compared.
    """

    images: int
    classes: int | None


class Entry(NamedTuple):
    """One image of a dataset's list, whose file may be missing.

    Attributes:
        split: Name of its split.
        name: Path within the dataset, with '/'; unique.
        label: Name of the class, unique within the dataset.
        superlabel: Name of the coarser class; '' if the dataset has none.
        place: Where it is listed, for messages.
        file: Path of its file; '' if that is the name.
    """

    split: str
    name: str
    label: str
    superlabel: str = ""
    place: str = ""
    file: str = ""


class ListedImage(NamedTuple):
    """An `Entry` whose file exists.

    `read` returns the file's bytes unchanged and is safe to call from several threads; it raises
    OSError if the file cannot be read.
    """

    name: str
    label: str
    read: Callable[[], bytes]
    superlabel: str = ""


Listing = dict[str, list[ListedImage]]  # Images by split.


class Found(NamedTuple):
    """The images of each split, and the tables of relations (`hypjax.data.records`)."""

    images: Listing
    tables: Mapping[str, pyarrow.Table]


@dataclasses.dataclass(frozen=True)
class OfficialDataset:
    """A dataset prepared from the files that its authors published.

    Attributes:
        builder: TFDS builder of its records; the dataset has the builder's name.
        counts: Size of each split of the complete dataset.
        source: Where its files come from.
        list_images: Yields the images in the order of the records, whether or not their files
            exist. Classes are numbered in the order in which they first appear.
        tables: Reads the tables of relations that its builder has.
    """

    builder: "type[OfficialBuilder]"
    counts: Mapping[str, Count]
    source: Source
    list_images: Callable[[FileTree], Iterable[Entry]]
    tables: Callable[[FileTree], Mapping[str, pyarrow.Table]] = lambda tree: {}

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
            The images by split, readable within the body, and the tables of relations.

        Raises:
            UserError: If no images are found, or a list or an archive is damaged.
        """
        with self.source.open(self.name, manual_dir, downloads) as tree:
            listing = self._existing(tree)
            if not any(listing.values()):
                raise UserError(f"{tree.root} has no images of {self.name}; {self.source.advice}")
            yield Found(listing, self.tables(tree))

    def _existing(self, tree: FileTree) -> Listing:
        """Returns the listed images that have a file; warns of the others."""
        splits: Listing = {split: [] for split in self.counts}
        names, missing = set(), []
        for split, name, label, superlabel, place, file in self.list_images(tree):
            if name.startswith("/") or ".." in name.split("/"):
                raise damaged_list(place, f"{name!r} points outside the dataset's folder")
            if name in names:
                raise damaged_list(place, f"{name!r} is listed twice")
            names.add(name)
            file = file or name
            if file in tree.files:
                read = functools.partial(tree.read, file)
                splits[split].append(ListedImage(name, label, read, superlabel))
            else:
                missing.append(file)
        if missing:
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            console.warn(f"listed but missing: {missing[0]}{more}")
        return splits


class Row(NamedTuple):
    """A line of a list, stripped, with its file and number for messages."""

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


def match_row(pattern: str, row: Row, example: str) -> re.Match[str]:
    """Parses a whole line by a regular expression; the example is a valid line, for the message.

    Raises:
        UserError: If the line does not match.
    """
    match = re.fullmatch(pattern, row.text)
    if match is None:
        raise damaged_list(row.place, f"{row.text[:100]!r} is not of the form {example!r}")
    return match


def damaged_list(place: str, problem: str) -> UserError:
    """Returns the error for a damaged list; the place is its file, and line if known."""
    return UserError(f"{place}: {problem}; the list is damaged, fetch it again")


@contextlib.contextmanager
def large_images() -> Iterator[None]:
    """Silences Pillow's warning of large images; it still rejects huge ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


class CheckedImages:
    """A dataset's images, read ahead of the writer and decoded once to check them.

    Attributes:
        classes: Names of all classes, in the order of their labels.
        tables: Tables of relations.
    """

    def __init__(self, found: Found, skip_corrupt: bool) -> None:
        """Starts the reading threads, which `close` ends.

        The images are those of each split, in the order of the records. Corrupt ones may be
        skipped.
        """
        self._listing, self.tables = found
        images = [image for part in self._listing.values() for image in part]
        self.classes = list(dict.fromkeys(image.label for image in images))
        self._skip_corrupt, self._total = skip_corrupt, len(images)
        self._broken: list[tuple[str, str]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._bar = tqdm.tqdm(
            desc="preparing", total=self._total, unit="image", disable=None, leave=False
        )

    def splits(self) -> dict[str, Iterator[tuple[int, Example]]]:
        """Returns the numbered examples of each non-empty split, to be consumed one by one."""
        parts = self._listing.items()
        return {name: enumerate(self._examples(part)) for name, part in parts if part}

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
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        remaining = iter(images)
        for image in images:
            while len(pending) < _AHEAD and (following := next(remaining, None)) is not None:
                pending.append(self._pool.submit(_check, following))
            outcome = pending.popleft().result()
            self._bar.update()
            if isinstance(outcome, str):
                self._broken.append((image.name, outcome))
            elif self._skip_corrupt or not self._broken:  # Otherwise nothing will be kept.
                yield outcome


def _check(image: ListedImage) -> Example | str:
    """Reads and decodes an image; returns its example, or the reason why that fails."""
    try:
        content = image.read()
        decoded = pixels.decode(content, channels=3)
    except Exception as error:  # Decoders raise almost anything on damaged files.
        return pixels.reason(error)
    return {
        "image": content,
        "checksum": zlib.crc32(content),
        "height": decoded.height,
        "width": decoded.width,
        "label": image.label,
        "name": image.name,
        "class_name": image.label,
        "superlabel": image.superlabel,
    }


class OfficialBuilder(RecordBuilder, skip_registration=True):
    """Builder of a dataset that is read from the files its authors published."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    contents: CheckedImages | None = None  # What `download_and_prepare` will write.

    def _generate_splits(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig,
    ) -> list[tfds.core.SplitInfo]:
        written = super()._generate_splits(dl_manager, download_config)
        self.contents.finish(pathlib.Path(self.data_dir))  # If it raises, the folder is discarded.
        return written

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        if self.contents is None:
            raise UserError(
                f"{self.name} is not prepared in {self.data_dir}; "
                f"run python -m hypjax.prepare --dataset={self.name}"
            )
        self.info.features["label"].names = self.contents.classes
        return self.contents.splits()

    def _generate_examples(self) -> None:
        """Not called, since `_split_generators` returns the examples; TFDS requires it."""

    def tables(self) -> Mapping[str, pyarrow.Table]:
        """Returns those of the published files."""
        return self.contents.tables
