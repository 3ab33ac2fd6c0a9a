"""Converts datasets from the files that their authors published to records.

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

_CROP_QUALITY = 95  # JPEG quality of images that are cropped to their boxes.
_THREADS = min(usable_cores(), 16)  # The single writing thread keeps up with no more.
_CHUNK = 16 * _THREADS  # Images that are read into memory together, then written.


class Entry(NamedTuple):
    """An image in a dataset's list, whose file may be missing."""

    split: str
    name: str  # Path within the dataset, with '/'; unique.
    class_name: str  # Unique within the dataset.
    coarse_label: str = ""  # Name of the coarse class; '' if the dataset has none.
    file: str = ""  # Path of the image's file; '': equal to the name.
    # Region of the image that is kept: left, top, right, bottom, in pixels; None: the image.
    box: tuple[int, int, int, int] | None = None


class FileTree(NamedTuple):
    """A dataset's files by their paths below its folder, with '/'."""

    root: pathlib.Path  # The dataset's folder.
    files: Mapping[str, pathlib.Path]

    def read_list(self, name: str) -> bytes:
        """Reads a list that the dataset requires; raises a UserError if it is missing."""
        try:
            return pixels.read_bytes(self.files[name])
        except (KeyError, OSError) as error:
            raise UserError(f"{self.root} has no readable {name}; fetch it again") from error

    def rows(self, file: str, pattern: str, skip: int = 0) -> Iterator[re.Match[str]]:
        """Matches a list's lines after the first `skip`; raises a UserError for damaged lines."""
        # Some copies have Windows' line ends and a byte order mark. Bytes that are not UTF-8 become
        # '\ufffd': no file has such a name, and images without a file are left out.
        lines = self.read_list(file).decode("utf-8-sig", errors="replace").split("\n")
        for number, line in enumerate(map(str.strip, lines[skip:]), skip + 1):
            if match := re.fullmatch(pattern, line):
                yield match
            elif line:
                raise self.damaged(f"{file}, line {number}", f"{line[:100]!r} is unexpected")

    def damaged(self, place: str, problem: object) -> UserError:
        """Returns the error for a damaged list; `place` is its file, perhaps with the line."""
        return UserError(f"{self.root / place}: {problem}; the list is damaged, fetch it again")


class Archive(NamedTuple):
    """A .zip or .tar file with all or part of a dataset."""

    file: str  # The archive's name, or its path below the dataset's folder.
    # Patterns of the archive's contents, separated by '|'. If any matches, it is unpacked already.
    unpacked: str
    url: str = ""
    sha256: str | None = None  # Checksum of the file at the URL; None if downloads may differ.

    def is_unpacked(self, root: pathlib.Path) -> bool:
        """Whether the archive's contents are in the dataset's folder."""
        return any(any(glob.iglob(name, root_dir=root)) for name in self.unpacked.split("|"))

    def is_needed(self, root: pathlib.Path) -> bool:
        """Whether the archive is in the dataset's folder, and its contents are not."""
        return (root / self.file).is_file() and not self.is_unpacked(root)

    def unpack(self, root: pathlib.Path, folder: pathlib.Path) -> None:
        """Unpacks the archive in the dataset's folder `root` to a temporary `folder`."""
        path = root / self.file
        console.say(f"unpacking {path} temporarily")
        advice = "; fetch it again, or unpack it yourself and pass --manual_dir=FOLDER"
        with explained(f"cannot unpack {path} to {folder.parent}", advice):
            unpack(path, (folder / self.file).parent)

    def download(self, root: pathlib.Path, advice: str) -> None:
        """Downloads and verifies the archive unless it is in `root`; `advice` is for messages."""
        import pooch

        if not (root / self.file).exists():
            offline = "without a network, use --manual_dir=FOLDER, or --config=configs/glyphs.py"
            console.say(f"downloading {self.url} to {root} ({offline})")
        pooch.get_logger().setLevel(logging.WARNING)
        known_hash = f"sha256:{self.sha256}" if self.sha256 else None
        with explained(f"cannot download {self.url}", f"; {advice}"):
            pooch.retrieve(self.url, known_hash, self.file, root, progressbar=sys.stderr.isatty())


def read_coarse_labels(dataset: str) -> dict[str, str]:
    """Reads coarse labels by class, which the official files lack, from hypjax's own table."""
    table = importlib.resources.files("hypjax.data.preparation") / f"{dataset}.csv"
    return dict(csv.reader(table.read_text().splitlines()))


Listing = dict[str, list[Entry]]  # Images by split.


class Files(NamedTuple):
    """A dataset's files while they are open, with the images and tables that they list."""

    tree: FileTree
    images: Listing  # Images that have a file.
    tables: Mapping[str, pyarrow.Table]  # See `Contents`.
    note: str


class OfficialDataset(NamedTuple):
    """A dataset prepared from the files that its authors published."""

    name: str
    counts: Mapping[str, Count]  # Sizes of the complete dataset's splits.
    folders: tuple[str, ...]  # Possible names of the dataset's folder.
    entries: tuple[str, ...]  # Patterns of the dataset's files and of its folders.
    archives: tuple[Archive, ...]  # Archives that contain these entries.
    source: str  # Which files users must get, and from where, in words.
    # Yields the images in the order of the records, whether or not their files exist. Classes are
    # numbered in the order in which they first appear.
    list_images: Callable[[FileTree], Iterable[Entry]]
    # Readers of tables other than the indexes (`hypjax.data.records`), by name.
    tables: Mapping[str, Callable[[FileTree], pyarrow.Table]] = MappingProxyType({})
    # Parts of the dataset that can be prepared instead, by name.
    parts: "Mapping[str, OfficialDataset]" = MappingProxyType({})
    note: str = ""  # Description of a part, which accompanies all results.
    # Describes how the user's files differ from the published ones; '' if they do not.
    note_of: Callable[[FileTree], str] = lambda tree: ""
    downloads: str = ""  # Folder of the downloads; '': named like the dataset.

    @property
    def advice(self) -> str:
        """What users without the files should do, for messages."""
        return f"get {self.source}; pass the folder that holds it with --manual_dir=FOLDER"

    @contextlib.contextmanager
    def open(self, manual_dir: pathlib.Path | None, downloads: pathlib.Path) -> Iterator[Files]:
        """Finds or downloads the files, and unpacks archives for the duration of the body.

        `manual_dir` is the dataset's folder, or a folder that contains the dataset's folder or
        archives. If None, `downloads` is searched, and missing archives with a URL are downloaded.
        """
        base = (manual_dir or downloads).absolute()
        if manual_dir and not base.is_dir():
            problem = "is no folder" if base.exists() else "does not exist"
            raise UserError(f"{base} {problem}; {self.advice}")
        root = self._find_root(base)
        for archive in self.archives:
            if manual_dir is None and archive.url and not archive.is_unpacked(root):
                archive.download(root, self.advice)
        needed = [archive for archive in self.archives if archive.is_needed(root)]
        if not needed and not self._files_in(root):
            known = [*self.folders, *(archive.file for archive in self.archives), *self.entries]
            missing = f"{base} has no files of {self.name} (looked for {', '.join(known)})"
            raise UserError(f"{missing}; {self.advice}")
        unpacked = downloads / f".{self.name}-unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)  # A killed process may have left it.
        try:
            for archive in needed:
                archive.unpack(root, unpacked)
            tree = FileTree(root, self._files_in(self._find_root(unpacked)) | self._files_in(root))
            listing = self._list_existing(tree)
            if not any(listing.values()):
                raise UserError(f"{root} has no images of {self.name}; {self.advice}")
            tables = {name: read(tree) for name, read in self.tables.items()}
            yield Files(tree, listing, tables, self.note_of(tree))
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)

    def _find_root(self, base: pathlib.Path) -> pathlib.Path:
        """Returns the first of `folders` in `base` with a file or needed archive, or `base`."""
        for root in (base / name for name in self.folders):
            has_files = any(any(glob.iglob(entry, root_dir=root)) for entry in self.entries)
            if has_files or any(archive.is_needed(root) for archive in self.archives):
                return root
        return base

    def _files_in(self, root: pathlib.Path) -> dict[str, pathlib.Path]:
        """Finds the dataset's files in a folder; follows links, and skips hidden files."""
        files = {}
        for entry in self.entries:
            for pattern in (entry, f"{entry}/**"):
                for name in glob.iglob(pattern, root_dir=root, recursive=True):
                    if os.path.isfile(root / name):
                        files[name] = root / name
        return files

    def _list_existing(self, tree: FileTree) -> Listing:
        """Lists the images that have a file, and warns if files are missing."""
        listing: Listing = {split: [] for split in self.counts}
        names, missing = set(), []
        for entry in self.list_images(tree):
            if entry.name in names:
                raise tree.damaged("", f"{entry.name!r} is listed twice")
            names.add(entry.name)
            file = entry.file or entry.name
            if file in tree.files:
                listing[entry.split].append(entry._replace(file=file))
            else:
                missing.append(file)
        if missing:
            console.warn(f"images listed but missing: {len(missing)}, such as {missing[0]}")
        return listing


def _read_example(tree: FileTree, image: Entry) -> Example | str:
    """Reads an image, cropped to its box if it has one; returns a reason if it cannot be read."""
    try:
        content = pixels.read_bytes(tree.files[image.file])
        decoded = pixels.decode(content, channels=3)
        left, top, right, bottom = image.box or (0, 0, *decoded.size)
        box = (max(left, 0), max(top, 0), min(right, decoded.width), min(bottom, decoded.height))
        if box != (0, 0, *decoded.size):
            decoded, encoded = decoded.crop(box), io.BytesIO()
            decoded.save(encoded, "JPEG", quality=_CROP_QUALITY, subsampling=0)
            content = encoded.getvalue()
    except Exception as error:  # Decoders raise almost anything on damaged files.
        return reason(error)
    return Example(content, *decoded.size[::-1], image.name, image.class_name, image.coarse_label)


def write_files(
    folder: pathlib.Path, name: str, files: Files, part: str | None, *, skip_corrupt: bool
) -> None:
    """Writes the listed images, which threads decode once, into a new folder."""
    broken: dict[str, str] = {}  # Why images cannot be read, by name.
    total = sum(map(len, files.images.values()))
    pool = concurrent.futures.ThreadPoolExecutor(_THREADS)

    def read(images: Sequence[Entry]) -> Iterator[Example]:
        for first in range(0, len(images), _CHUNK):
            chunk = images[first : first + _CHUNK]
            outcomes = pool.map(functools.partial(_read_example, files.tree), chunk)
            for image, outcome in zip(chunk, outcomes, strict=True):
                if isinstance(outcome, str):
                    console.say(f"cannot read {image.name} ({outcome})")
                    broken[image.name] = outcome
                elif skip_corrupt or not broken:  # Otherwise the folder will be removed.
                    yield outcome

    splits = {split: read(images) for split, images in files.images.items()}
    with pool, warnings.catch_warnings():
        # Large images are fine. Pillow still rejects huge ones.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        write_records(folder, name, Contents(splits, total, files.tables, files.note), part)
    if not broken:
        return
    summary = f"{len(broken)} of {total} images cannot be read (listed above)"
    if not skip_corrupt or len(broken) == total:
        raise UserError(f"{summary}; fetch them again, or leave them out with --skip_corrupt")
    console.warn(f"{summary} and were left out; skipped.tsv next to the records lists them")
    lines = ["name\treason", *(f"{name}\t{why}" for name, why in broken.items()), ""]
    (folder / "skipped.tsv").write_text("\n".join(lines), encoding="utf-8")
