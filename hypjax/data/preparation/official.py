"""Official datasets: from the files that their authors published to the records we write.

Class numbers, splits and counts follow the official lists and the protocol by which retrieval is
reported on these datasets (Ermolov et al., CVPR 2022, section 4.1, and the papers it follows).
"""

import collections
import concurrent.futures
import contextlib
import csv
import dataclasses
import io
import pathlib
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow
import tensorflow_datasets as tfds
from PIL import Image

from hypjax.data import pixels
from hypjax.data.preparation.sources import FileTree, Source
from hypjax.data.records import Example, RecordBuilder
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.machine import usable_cores

SKIPPED = "skipped.tsv"
PART = "part.txt"  # Names the part of the dataset that was prepared, if it is not the whole.
_CROP_QUALITY = 95  # Of JPEGs, for images that are cut to their boxes.
_THREADS = min(usable_cores(), 16)  # The single writing thread keeps up with no more.
_AHEAD = 4 * _THREADS  # Images read before they are written; they are held in memory.


class Count(NamedTuple):
    """Size of a split; a number of classes that is not known (None) is not compared."""

    images: int
    classes: int | None


class Entry(NamedTuple):
    """One image of a dataset's list, whose file may be missing."""

    split: str
    name: str  # Path within the dataset, with '/'; unique.
    label: str  # Name of the class, unique within the dataset.
    superlabel: str = ""  # Name of the coarser class; '' if the dataset has none.
    file: str = ""  # Path of its file; '' if that is the name.
    # Part of the image that is kept: left, top, right and bottom, in pixels. None: the whole.
    box: tuple[int, int, int, int] | None = None


Listing = dict[str, list[Entry]]  # Images by split.


class Found(NamedTuple):
    """A dataset's files, readable while they are open, with those images that have a file."""

    tree: FileTree
    images: Listing
    tables: Mapping[str, pyarrow.Table]


@dataclasses.dataclass(frozen=True)
class OfficialDataset:
    """A dataset prepared from the files that its authors published."""

    name: str
    description: str
    counts: Mapping[str, Count]  # Of the splits of the complete dataset.
    source: Source
    # Yields the images in the order of the records, whether or not their files exist. Classes are
    # numbered in the order in which they first appear.
    list_images: Callable[[FileTree], Iterable[Entry]]
    # Readers of its tables of relations (`hypjax.data.records`), by name.
    tables: Mapping[str, Callable[[FileTree], pyarrow.Table]] = dataclasses.field(
        default_factory=dict
    )
    # Parts that may be prepared in its place, by name, with the same name and tables.
    parts: "Mapping[str, OfficialDataset]" = dataclasses.field(default_factory=dict)
    note: str = ""  # Of a part: what it is, for all results.

    @property
    def builder(self) -> "type[OfficialBuilder]":
        """Returns the class of the TFDS builder of its records."""
        facts = {
            "__module__": __name__,
            "name": self.name,
            "DESCRIPTION": self.description,
            "TABLES": tuple(self.tables),
        }
        return type(self.name, (OfficialBuilder,), facts, skip_registration=True)

    @contextlib.contextmanager
    def open(self, manual_dir: pathlib.Path | None, downloads: pathlib.Path) -> Iterator[Found]:
        """Finds or downloads the files; they are readable in the body.

        `manual_dir` is the dataset's folder, or one that contains it or its archives. If it is
        None, `downloads` is searched, and missing archives are downloaded where possible.
        Archives are unpacked there for the time being. Listed images whose files are missing are
        left out, so a split may be empty. Raises UserError if no images are found, or a list or an
        archive is damaged.
        """
        with self.source.open(self.name, manual_dir, downloads) as tree:
            listing = self._existing(tree)
            if not any(listing.values()):
                raise UserError(f"{tree.root} has no images of {self.name}; {self.source.advice}")
            yield Found(tree, listing, {name: read(tree) for name, read in self.tables.items()})

    def _existing(self, tree: FileTree) -> Listing:
        """Returns the listed images that have a file; warns of the others."""
        splits: Listing = {split: [] for split in self.counts}
        names, missing = set(), []
        for entry in self.list_images(tree):
            if entry.name in names:
                raise damaged_list(tree, "", f"{entry.name!r} is listed twice")
            names.add(entry.name)
            file = entry.file or entry.name
            if file in tree.files:
                splits[entry.split].append(entry._replace(file=file))
            else:
                missing.append(file)
        if missing:
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            console.warn(f"listed but missing: {missing[0]}{more}")
        return splits


def read_rows(tree: FileTree, file: str, pattern: str, skip: int = 0) -> Iterator[re.Match[str]]:
    """Parses the non-empty lines of a list, without some at its beginning, by a pattern.

    Raises UserError if the list is missing or damaged.
    """
    # Some copies have Windows' line ends and a byte order mark. Other bytes fit no pattern.
    lines = tree.read_list(file).decode("utf-8-sig", errors="replace").split("\n")
    for n, line in enumerate(lines[skip:], skip + 1):
        if match := re.fullmatch(pattern, line.strip()):
            yield match
        elif line.strip():
            raise damaged_list(tree, f"{file}, line {n}", f"{line[:100].strip()!r} is unexpected")


def damaged_list(tree: FileTree, place: str, problem: object) -> UserError:
    """Returns the error for a damaged list; the place is its file, and line if known."""
    return UserError(f"{tree.root / place}: {problem}; the list is damaged, fetch it again")


def _check(tree: FileTree, image: Entry) -> Example | str:
    """Reads and decodes an image; returns its example, or the reason why that fails."""
    try:
        content = tree.read(image.file)
        decoded = pixels.decode(content, channels=3)
        if image.box is not None:
            decoded, content = _cut(decoded, content, image.box)
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


def _cut(
    decoded: Image.Image, content: bytes, box: tuple[int, int, int, int]
) -> tuple[Image.Image, bytes]:
    """Cuts an image to the part of its box inside it; the bytes stay if that is the whole image."""
    left, top, right, bottom = box
    whole = (0, 0, *decoded.size)
    inside = (max(left, 0), max(top, 0), min(right, decoded.width), min(bottom, decoded.height))
    if inside == whole:
        return decoded, content
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(f"its box {box} is not in the image")
    cut, encoded = decoded.crop(inside), io.BytesIO()
    cut.save(encoded, "JPEG", quality=_CROP_QUALITY, subsampling=0)
    return cut, encoded.getvalue()


class OfficialBuilder(RecordBuilder, skip_registration=True):
    """Builder of a dataset that is read from the files its authors published."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    found: Found | None = None  # What `download_and_prepare` will write,
    part: str | None = None  # and the part of the dataset that it is.
    skip_corrupt = False  # Whether to leave out images that cannot be read.

    def _generate_splits(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig,
    ) -> list[tfds.core.SplitInfo]:
        labels = [image.label for part in self.found.images.values() for image in part]
        self.info.features["label"].names = list(dict.fromkeys(labels))
        self._broken: list[tuple[str, str]] = []
        self._total = len(labels)
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        try:
            with warnings.catch_warnings():
                # Large images are welcome. Pillow still rejects huge ones.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                written = super()._generate_splits(dl_manager, download_config)
        finally:
            self._pool.shutdown(cancel_futures=True)
        self._report_broken(len(labels))  # If it raises, the folder is discarded.
        if self.part is not None:
            pathlib.Path(self.data_dir, PART).write_text(f"{self.part}\n")
        return written

    def _examples_by_split(self) -> dict[str, Iterator[Example]]:
        parts = self.found.images.items()
        return {name: self._examples(part) for name, part in parts if part}

    def _examples(self, images: Sequence[Entry]) -> Iterator[Example]:
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        # Threads read images ahead of the writer, and decode each once to check it.
        remaining = iter(images)
        for image in images:
            while len(pending) < _AHEAD and (following := next(remaining, None)) is not None:
                pending.append(self._pool.submit(_check, self.found.tree, following))
            outcome = pending.popleft().result()
            if isinstance(outcome, str):
                self._broken.append((image.name, outcome))
            elif self.skip_corrupt or not self._broken:  # Otherwise nothing will be kept.
                yield outcome

    def _report_broken(self, total: int) -> None:
        """Names images that could not be read, and lists them in a file if they are left out.

        Raises UserError if there are any and they may not be left out, or if no others remain.
        """
        for name, reason in self._broken:
            console.say(f"cannot read {name} ({reason})")
        summary = f"{len(self._broken)} of {total} images cannot be read (listed above)"
        if self._broken and (not self.skip_corrupt or len(self._broken) == total):
            raise UserError(f"{summary}; fetch them again, or leave them out with --skip_corrupt")
        if self._broken:
            console.warn(f"{summary} and were left out; {SKIPPED} next to the records lists them")
            skipped = pathlib.Path(self.data_dir, SKIPPED)
            with skipped.open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, delimiter="\t", lineterminator="\n")
                rows.writerows([("name", "reason"), *self._broken])

    def tables(self) -> Mapping[str, pyarrow.Table]:
        """Returns those of the published files."""
        return self.found.tables
