"""Official datasets: from the files that their authors published to the records we write.

Classes, splits and counts follow the official lists, and the protocol of published results (Ermolov
et al., CVPR 2022, section 4.1).
"""

import concurrent.futures
import contextlib
import csv
import functools
import glob
import importlib.resources
import io
import logging
import os
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import pyarrow
from PIL import Image

from hypjax.data import pixels
from hypjax.data.fetching import unpack
from hypjax.data.records import Contents, Count, Example, write_records
from hypjax.errors import UserError, explained, reason
from hypjax.system import console
from hypjax.system.machine import usable_cores

SKIPPED = "skipped.tsv"
_CROP_QUALITY = 95  # Of JPEGs, for images that are cut to their boxes.
_THREADS = min(usable_cores(), 16)  # The single writing thread keeps up with no more.
_AHEAD = 16 * _THREADS  # Images read before any of them is written; they are held in memory.


class Entry(NamedTuple):
    """One image of a dataset's list, whose file may be missing."""

    split: str
    name: str  # Path within the dataset, with '/'; unique.
    label: str  # Name of the class, unique within the dataset.
    coarse_label: str = ""  # Name of the coarser class; '' if the dataset has none.
    file: str = ""  # Path of its file; '' if that is the name.
    # Part of the image that is kept: left, top, right and bottom, in pixels. None: the whole.
    box: tuple[int, int, int, int] | None = None


class FileTree(NamedTuple):
    """A dataset's files by their paths below its folder, with '/'."""

    root: pathlib.Path  # For messages.
    files: Mapping[str, pathlib.Path]

    def read_list(self, name: str) -> bytes:
        """Returns the bytes of a list that the dataset requires."""
        try:
            return pixels.read_bytes(self.files[name])
        except (KeyError, OSError) as error:
            raise UserError(f"{self.root} has no readable {name}; fetch it again") from error

    def rows(self, file: str, pattern: str, skip: int = 0) -> Iterator[re.Match[str]]:
        """Parses the non-empty lines after the first `skip`; each must fit the pattern."""
        # Some copies have Windows' line ends and a byte order mark. Other bytes fit no pattern.
        lines = self.read_list(file).decode("utf-8-sig", errors="replace").split("\n")
        for n, line in enumerate(map(str.strip, lines[skip:]), skip + 1):
            if match := re.fullmatch(pattern, line):
                yield match
            elif line:
                raise self.damaged(f"{file}, line {n}", f"{line[:100]!r} is unexpected")

    def damaged(self, place: str, problem: object) -> UserError:
        """The error for a damaged list; `place` is its file, and the line if known."""
        return UserError(f"{self.root / place}: {problem}; the list is damaged, fetch it again")


class Archive(NamedTuple):
    """A .zip or .tar file with all or part of a dataset."""

    file: str  # Its name, or its path below the dataset's folder.
    # Patterns of its contents, separated by '|'; the archive is not opened if anything matches.
    unpacked: str
    url: str = ""
    sha256: str | None = None  # Of the file at that address; None if downloads may differ.

    def is_unpacked(self, root: pathlib.Path) -> bool:
        """Whether its contents are in a dataset's folder."""
        return any(any(glob.iglob(name, root_dir=root)) for name in self.unpacked.split("|"))

    def is_needed(self, root: pathlib.Path) -> bool:
        """Whether it is in a dataset's folder, and its contents are not."""
        return (root / self.file).is_file() and not self.is_unpacked(root)

    def unpack(self, root: pathlib.Path, folder: pathlib.Path) -> None:
        """Unpacks it from a dataset's folder to one that stands for that folder."""
        path = root / self.file
        console.say(f"unpacking {path} temporarily")
        advice = "; fetch it again, or unpack it yourself and pass --manual_dir=FOLDER"
        with explained(f"cannot unpack {path} to {folder.parent}", advice):
            unpack(path, (folder / self.file).parent)

    def download(self, root: pathlib.Path, advice: str) -> None:
        """Downloads it to a folder, where it appears when verified, unless it is there."""
        import pooch

        if not (root / self.file).exists():
            console.say(f"downloading {self.url} to {root}; without a network, {advice}")
        pooch.get_logger().setLevel(logging.WARNING)
        known, bar = self.sha256 and f"sha256:{self.sha256}", sys.stderr.isatty()
        with explained(f"cannot download {self.url}", f"; {advice}"):
            pooch.retrieve(self.url, known, self.file, root, progressbar=bar)


def read_coarse_labels(dataset: str) -> dict[str, str]:
    """Reads coarse labels by class, which the official files lack, from a table in the package."""
    table = importlib.resources.files("hypjax.data.preparation") / f"{dataset}.csv"
    return dict(csv.reader(table.read_text().splitlines()))


Listing = dict[str, list[Entry]]  # Images by split.


class Files(NamedTuple):
    """A dataset's files, readable while they are open, with those images that have a file."""

    tree: FileTree
    images: Listing
    tables: Mapping[str, pyarrow.Table]
    note: str


class OfficialDataset(NamedTuple):
    """A dataset prepared from the files that its authors published."""

    name: str
    counts: Mapping[str, Count]  # Of the splits of the complete dataset.
    folders: tuple[str, ...]  # Possible names of the dataset's folder.
    entries: tuple[str, ...]  # Patterns of its files, and of its folders with all their contents.
    archives: tuple[Archive, ...]  # They contain these entries.
    source: str  # What a user has to obtain from where, in words.
    # Yields the images in the order of the records, whether or not their files exist. Classes are
    # numbered in the order in which they first appear.
    list_images: Callable[[FileTree], Iterable[Entry]]
    # Readers of its tables of relations (`hypjax.data.records`), by name.
    tables: Mapping[str, Callable[[FileTree], pyarrow.Table]] = MappingProxyType({})
    # Parts that may be prepared in its place, by name, with the same name and tables.
    parts: "Mapping[str, OfficialDataset]" = MappingProxyType({})
    note: str = ""  # Of a part: what it is, for all results.
    note_of: Callable[[FileTree], str] = lambda tree: ""  # How files differ from the published.
    downloads: str = ""  # Name of the folder of its downloads; '' if that is the dataset's.

    @property
    def advice(self) -> str:
        """Tells users without the files what to do."""
        return f"get {self.source}; pass their folder with --manual_dir=FOLDER"

    @contextlib.contextmanager
    def open(self, manual_dir: pathlib.Path | None, downloads: pathlib.Path) -> Iterator[Files]:
        """Finds or downloads the files, and unpacks archives for the duration of the body.

        `manual_dir` is the dataset's folder, or one that contains it or its archives. If None,
        `downloads` is searched, and missing archives are downloaded where possible. Listed images
        without a file are left out.
        """
        base = (manual_dir or downloads).absolute()
        if manual_dir and not base.is_dir():
            problem = "is no folder" if base.exists() else "does not exist"
            raise UserError(f"{base} {problem}; {self.advice}")
        root = self._find_root(base)
        for archive in self.archives:
            if manual_dir is None and archive.url and not archive.is_unpacked(root):
                letters = "the letters of --dataset=glyphs need no download"
                archive.download(root, f"{self.advice}; {letters}")
        needed = [archive for archive in self.archives if archive.is_needed(root)]
        if not needed and not self._files_in(root):
            known = [*self.folders, *(archive.file for archive in self.archives), *self.entries]
            missing = f"{base} has no files of {self.name} (looked for {', '.join(known)})"
            raise UserError(f"{missing}; {self.advice}")
        unpacked = downloads / f".{self.name}-unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)  # Of a process that was killed.
        try:
            for archive in needed:
                archive.unpack(root, unpacked)
            tree = FileTree(root, self._files_in(self._find_root(unpacked)) | self._files_in(root))
            listing = self._existing(tree)
            if not any(listing.values()):
                raise UserError(f"{root} has no images of {self.name}; {self.advice}")
            tables = {name: read(tree) for name, read in self.tables.items()}
            yield Files(tree, listing, tables, self.note_of(tree))
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)

    def _find_root(self, base: pathlib.Path) -> pathlib.Path:
        """Returns the first folder with any of the dataset's files or archives, or else `base`."""
        for root in (base / name for name in self.folders):
            has_files = any(any(glob.iglob(entry, root_dir=root)) for entry in self.entries)
            if has_files or any(archive.is_needed(root) for archive in self.archives):
                return root
        return base

    def _files_in(self, root: pathlib.Path) -> dict[str, pathlib.Path]:
        """Paths of the dataset's files in a folder; links are followed, hidden files left out."""
        patterns = [f"{entry}{below}" for entry in self.entries for below in ("", "/**")]
        names = (n for p in patterns for n in glob.iglob(p, root_dir=root, recursive=True))
        return {name: root / name for name in names if os.path.isfile(root / name)}

    def _existing(self, tree: FileTree) -> Listing:
        splits: Listing = {split: [] for split in self.counts}
        names, missing = set(), []
        for entry in self.list_images(tree):
            if entry.name in names:
                raise tree.damaged("", f"{entry.name!r} is listed twice")
            names.add(entry.name)
            file = entry.file or entry.name
            if file in tree.files:
                splits[entry.split].append(entry._replace(file=file))
            else:
                missing.append(file)
        if missing:
            console.warn(f"images listed but missing: {len(missing)}, such as {missing[0]}")
        return splits


def _check(tree: FileTree, image: Entry) -> Example | str:
    """Reads an image and cuts it to its box; returns its example, or why it cannot be read."""
    try:
        content = pixels.read_bytes(tree.files[image.file])
        decoded = pixels.decode(content, channels=3)
        left, top, right, bottom = image.box or (0, 0, *decoded.size)
        inside = (max(left, 0), max(top, 0), min(right, decoded.width), min(bottom, decoded.height))
        if inside != (0, 0, *decoded.size):
            decoded, encoded = decoded.crop(inside), io.BytesIO()
            decoded.save(encoded, "JPEG", quality=_CROP_QUALITY, subsampling=0)
            content = encoded.getvalue()
    except Exception as error:  # Decoders raise almost anything on damaged files.
        return reason(error)
    size = decoded.height, decoded.width
    return Example(content, *size, image.name, image.label, image.coarse_label)


def write_files(
    folder: pathlib.Path, name: str, files: Files, part: str | None, *, skip_corrupt: bool
) -> None:
    """Writes the listed images, which threads decode once, into a new folder."""
    broken: dict[str, str] = {}  # Why images cannot be read, by name.
    total = sum(map(len, files.images.values()))

    def readable(images: Sequence[Entry]) -> Iterator[Example]:
        for first in range(0, len(images), _AHEAD):
            ahead = images[first : first + _AHEAD]
            outcomes = pool.map(functools.partial(_check, files.tree), ahead)
            for image, outcome in zip(ahead, outcomes, strict=True):
                if isinstance(outcome, str):
                    console.say(f"cannot read {image.name} ({outcome})")
                    broken[image.name] = outcome
                elif skip_corrupt or not broken:  # Otherwise nothing will be kept.
                    yield outcome

    splits = {split: readable(images) for split, images in files.images.items()}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool, warnings.catch_warnings():
        # Large images are welcome. Pillow still rejects huge ones.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        write_records(folder, name, Contents(splits, total, files.tables, files.note), part)
    if not broken:
        return
    summary = f"{len(broken)} of {total} images cannot be read (listed above)"
    if not skip_corrupt or len(broken) == total:
        raise UserError(f"{summary}; fetch them again, or leave them out with --skip_corrupt")
    console.warn(f"{summary} and were left out; {SKIPPED} next to the records lists them")
    lines = ["name\treason", *(f"{name}\t{why}" for name, why in broken.items()), ""]
    (folder / SKIPPED).write_text("\n".join(lines), encoding="utf-8")
