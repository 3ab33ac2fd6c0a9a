"""The files that a dataset's authors published: a folder, archives in it, or downloads."""

import contextlib
import dataclasses
import fnmatch
import glob
import logging
import os
import pathlib
import shutil
import sys
import tarfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import tqdm

from hypjax.data.pixels import read_bytes
from hypjax.errors import UserError
from hypjax.system import console

# What damaged archives raise; zipfile raises RuntimeError for encrypted ones.
_UNREADABLE = (OSError, RuntimeError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error)
_TIMEOUT = 30  # Seconds without a byte before a download is abandoned.


class FileTree:
    """A dataset's files by their paths below its folder; read-only."""

    def __init__(self, root: pathlib.Path, paths: Mapping[str, pathlib.Path]) -> None:
        """Takes the dataset's folder, for messages, and where each file is."""
        self.root = root
        self.files = paths.keys()  # Paths of the files, with '/'.
        self._paths = paths

    def read(self, name: str) -> bytes:
        """Returns a file's bytes, or raises OSError; safe to call from several threads."""
        return read_bytes(self._paths[name])

    def read_list(self, name: str) -> bytes:
        """Returns the bytes of a list that the dataset requires, or raises UserError."""
        if name not in self.files:
            raise UserError(f"{self.root} lacks {name}, which lists the images; fetch it again")
        try:
            return self.read(name)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot read {self.root / name} ({reason})") from error


@dataclasses.dataclass(frozen=True)
class Archive:
    """A .zip or .tar file with all or part of a dataset.

    It is opened only if nothing in the dataset's folder matches the pattern of what it unpacks to.
    """

    file: str  # Its name, or its path below the dataset's folder.
    unpacked: str
    url: str = ""
    sha256: str = ""  # Of the file at that address; '' if its bytes may differ between downloads.

    def is_unpacked(self, root: pathlib.Path) -> bool:
        """Whether its contents are in a dataset's folder."""
        return any(glob.iglob(self.unpacked, root_dir=root))

    def find(self, root: pathlib.Path) -> pathlib.Path | None:
        """Returns the archive in a dataset's folder, or None if missing or already unpacked."""
        path = root / self.file
        return path if path.is_file() and not self.is_unpacked(root) else None


@dataclasses.dataclass(frozen=True)
class Source:
    """The names of a dataset's files, and where to get them."""

    folders: tuple[str, ...]  # Possible names of the dataset's folder.
    entries: tuple[str, ...]  # Patterns of its files, and of its folders with all their contents.
    archives: tuple[Archive, ...]  # They contain these entries.
    required: str  # What a user has to obtain, in words.
    origin: str  # Where to obtain it, in words.
    required_lists: tuple[str, ...] = ()  # In no archive; checked before anything is unpacked.
    downloads: str = ""  # Name of the folder of its downloads; '' if that is the dataset's.

    @property
    def advice(self) -> str:
        """Tells users without the files what to do."""
        return (
            f"get {self.required} from {self.origin}, put everything in one folder, "
            "and pass that folder with --manual_dir=FOLDER"
        )

    @contextlib.contextmanager
    def open(
        self, name: str, manual_dir: pathlib.Path | None, downloads: pathlib.Path
    ) -> Iterator[FileTree]:
        """Finds or downloads the files, see `OfficialDataset.open`; they are readable in the body.

        Archives are unpacked to a temporary folder in `downloads`. Raises UserError if there are no
        files, or an archive is damaged.
        """
        downloads = downloads.expanduser().absolute()
        base = downloads if manual_dir is None else manual_dir.expanduser().absolute()
        if manual_dir is None:
            self._download(downloads)
        root = self._find_root(base)
        if root is None:
            raise UserError(self._not_found(name, manual_dir and base))
        tree = FileTree(root, self._files_in(root))
        for file in self.required_lists:
            tree.read_list(file)  # Unpacking may take long.
        unpacked = downloads / f".{name}-unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)  # Of a process that was killed.
        try:
            for archive in self.archives:
                if path := archive.find(root):
                    self._unpack(archive, path, unpacked)
            yield FileTree(root, self._files_in(unpacked) | self._files_in(root))
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)

    def _find_root(self, base: pathlib.Path) -> pathlib.Path | None:
        """Returns the first folder that contains any of the dataset's files."""
        inner = [base / name for name in self.folders]
        nested = [folder / name for folder in inner for name in self.folders]
        return next((root for root in (*nested, *inner, base) if self._has_files(root)), None)

    def _has_files(self, root: pathlib.Path) -> bool:
        found = any(any(glob.iglob(entry, root_dir=root)) for entry in self.entries)
        return found or any(archive.find(root) for archive in self.archives)

    def _files_in(self, root: pathlib.Path) -> dict[str, pathlib.Path]:
        """Paths of the dataset's files in a folder; links are followed, hidden files left out."""
        patterns = [f"{entry}{below}" for entry in self.entries for below in ("", "/**")]
        names = (n for p in patterns for n in glob.iglob(p, root_dir=root, recursive=True))
        return {name: root / name for name in names if os.path.isfile(root / name)}

    def _unpack(self, archive: Archive, path: pathlib.Path, folder: pathlib.Path) -> None:
        """Writes an archive's files below a folder, which stands for that of the dataset."""
        console.say(f"unpacking {path} temporarily")
        bar = {"total": path.stat().st_size, "desc": path.name, "disable": None, "leave": False}
        try:
            with path.open("rb") as file, tqdm.tqdm.wrapattr(file, "read", **bar) as stream:
                for member, content in _members(stream, path.suffix):
                    if name := self._entry_name(archive, member):
                        target = folder / name
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with target.open("wb") as written:
                            shutil.copyfileobj(content, written)
        except _UNREADABLE as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot unpack {path} to {folder.parent} ({reason}); fetch it again, or unpack it "
                "yourself and pass that folder with --manual_dir=FOLDER"
            ) from error

    def _entry_name(self, archive: Archive, member: str) -> str | None:
        """Path of an archive's file in the dataset's folder; None if it does not belong there.

        It leads nowhere else: hidden, absolute and upward paths do not belong there.
        """
        path = pathlib.PurePosixPath(member)
        for folder in self.folders:
            if path.is_relative_to(folder):
                path = path.relative_to(folder)
        parts = (pathlib.PurePosixPath(archive.file).parent / path).parts
        starts = ("/".join(parts[: entry.count("/") + 1]) for entry in self.entries)
        belongs = any(map(fnmatch.fnmatchcase, starts, self.entries))
        return "/".join(parts) if belongs and not any(p.startswith(".") for p in parts) else None

    def _download(self, folder: pathlib.Path) -> None:
        """Downloads the archives that have an address, except those already there or unpacked."""
        root = self._find_root(folder) or folder
        for archive in self.archives:
            if archive.url and not archive.is_unpacked(root):
                _fetch(archive, root, self.advice)

    def _not_found(self, name: str, manual_dir: pathlib.Path | None) -> str:
        if manual_dir is None:
            return f"{name} cannot be downloaded; {self.advice}"
        known = [*(f"{folder}/" for folder in self.folders), *(a.file for a in self.archives)]
        return (
            f"{manual_dir} contains no files of {name} (looked for {', '.join(known)}); "
            f"{self.advice}"
        )


def _members(file: BinaryIO, suffix: str) -> Iterator[tuple[str, BinaryIO]]:
    """Names and contents of an archive's files, in its order."""
    if suffix == ".zip":
        with zipfile.ZipFile(file) as packed:
            for info in packed.infolist():
                if not info.is_dir():
                    yield info.filename, packed.open(info)
    else:
        with tarfile.open(fileobj=file, mode="r|*") as packed:
            for member in packed:
                if member.isreg():
                    yield member.name, packed.extractfile(member)


def _fetch(archive: Archive, folder: pathlib.Path, advice: str) -> None:
    """Downloads an archive, which appears only when verified, unless it is already there."""
    import pooch
    import requests

    if not (folder / archive.file).exists():
        console.say(f"downloading {archive.url} to {folder}")
    pooch.get_logger().setLevel(logging.WARNING)
    known = f"sha256:{archive.sha256}" if archive.sha256 else None
    bar = {"progressbar": sys.stderr.isatty(), "chunk_size": 1 << 20}
    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT, **bar)
    broken = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
    try:
        pooch.retrieve(archive.url, known, archive.file, str(folder), downloader=downloader)
    except (OSError, ValueError) as error:  # Requests' errors are OSErrors.
        reason = getattr(error, "strerror", None) or str(error).partition(". ")[0]
        if isinstance(error, broken):
            reason = f"no connection to {urllib.parse.urlsplit(archive.url).netloc}"
        raise UserError(f"cannot download {archive.file} ({reason}); {advice}") from error
