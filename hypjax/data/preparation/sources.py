"""The files that a dataset's authors published: a folder, archives in it, or downloads."""

import contextlib
import dataclasses
import fcntl
import fnmatch
import functools
import logging
import os
import pathlib
import shutil
import tarfile
import tempfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping

import tqdm

from hypjax.data.pixels import LARGEST_FILE, read_bytes
from hypjax.errors import UserError, writing
from hypjax.system import console
from hypjax.system.files import locked

SUFFIXES = (".zip", ".tgz", ".tar.gz", ".tar")
_ENCRYPTED = 1  # Bit of a member's flags.
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)
_TIMEOUT = 30  # Seconds without a byte before a download is abandoned.

Reader = Callable[[], bytes]
Scratch = Callable[[], pathlib.Path]  # Returns an empty folder.
Naming = Callable[[str], str | None]  # From names in an archive to ours; None leaves a file out.


class FileTree:
    """A dataset's files by their paths below its folder, unpacked or in archives; read-only."""

    def __init__(self, root: pathlib.Path, readers: Mapping[str, Reader]) -> None:
        """Takes functions that return the files' bytes, by path."""
        self.root = root  # As if its archives were unpacked there, for messages.
        self.files = frozenset(readers)  # Paths of the files, with '/'.
        self._readers = readers

    def read(self, name: str) -> bytes:
        """Returns a file's bytes, or raises OSError; safe to call from several threads."""
        return self._readers[name]()

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
    """An official archive with all or part of a dataset.

    It is found under the same stem with another suffix, too, and opened only if nothing in the
    dataset's folder matches the pattern of what it unpacks to.
    """

    file: str  # Its name, or its path below the dataset's folder.
    unpacked: str
    url: str = ""
    sha256: str = ""  # Of the file at that address; '' if its bytes may differ between downloads.

    def find(self, root: pathlib.Path) -> pathlib.Path | None:
        """Returns the archive in a dataset's folder, or None if missing or already unpacked."""
        if any(_visible(path.name) for path in root.glob(self.unpacked)):
            return None
        stem = next(self.file.removesuffix(s) for s in SUFFIXES if self.file.endswith(s))
        paths = [root / self.file, *(root / f"{stem}{suffix}" for suffix in SUFFIXES)]
        return next((path for path in paths if path.is_file()), None)


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

        Raises UserError if there are no files, or an archive is damaged.
        """
        downloads = downloads.expanduser().absolute()
        with contextlib.ExitStack() as stack:

            def scratch() -> pathlib.Path:
                return stack.enter_context(_scratch_folder(downloads, name))

            base = downloads if manual_dir is None else manual_dir.expanduser().absolute()
            try:
                if manual_dir is None:
                    self._download(downloads, scratch)
                root = self._find_root(base)
                if root is None:
                    raise UserError(self._not_found(name, manual_dir and base))
                readers = self._unpacked(root)
            except OSError as error:
                raise UserError(f"cannot read {error.filename} ({error.strerror})") from error
            tree = FileTree(root, readers)
            for file in self.required_lists:
                tree.read_list(file)  # Unpacking may take long.
            for archive in self.archives:
                if path := archive.find(root):
                    named = functools.partial(self._entry_name, archive)
                    readers = stack.enter_context(_opened(path, scratch, named)) | readers
            yield FileTree(root, readers)

    def _find_root(self, base: pathlib.Path) -> pathlib.Path | None:
        """Returns the first folder that contains any of the dataset's files."""
        inner = [base / name for name in self.folders]
        nested = [folder / name for folder in inner for name in self.folders]
        return next((root for root in (*nested, *inner, base) if self._has_files(root)), None)

    def _has_files(self, root: pathlib.Path) -> bool:
        found = any(_visible(path.name) for entry in self.entries for path in root.glob(entry))
        return found or any(archive.find(root) for archive in self.archives)

    def _unpacked(self, root: pathlib.Path) -> dict[str, Reader]:
        """Returns readers of the unpacked files in the dataset's folder."""
        readers = {}
        for path in (path for entry in self.entries for path in root.glob(entry)):
            name = path.relative_to(root).as_posix()
            if path.is_dir() and _visible(name):
                readers |= {f"{name}/{file}": read for file, read in walk(path).items()}
            elif _visible(name):
                readers[name] = functools.partial(read_bytes, path)
        return readers

    def _entry_name(self, archive: Archive, member: str) -> str | None:
        """Path of an archive's file in the dataset's folder; None if it does not belong there."""
        path = pathlib.PurePosixPath(member)
        for folder in self.folders:
            if path.is_relative_to(folder):
                path = path.relative_to(folder)
        parts = (pathlib.PurePosixPath(archive.file).parent / path).parts
        belongs = any(
            fnmatch.fnmatchcase("/".join(parts[: entry.count("/") + 1]), entry)
            for entry in self.entries
        )
        return "/".join(parts) if belongs else None

    def _download(self, folder: pathlib.Path, scratch: Scratch) -> None:
        """Downloads the archives that have an address, except those already there or unpacked."""
        root = self._find_root(folder) or folder
        for archive in self.archives:
            if not archive.url or any(root.glob(archive.unpacked)):
                continue
            try:
                _fetch(archive, root / archive.file, scratch)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"cannot download {archive.file} ({_reason(error, archive.url)}); {self.advice}"
                ) from error

    def _not_found(self, name: str, manual_dir: pathlib.Path | None) -> str:
        if manual_dir is None:
            return f"{name} cannot be downloaded; {self.advice}"
        if manual_dir.is_file():
            return f"{manual_dir} is a file; pass the folder that contains it (--manual_dir)"
        if not manual_dir.is_dir():
            return f"there is no folder {manual_dir} (--manual_dir)"
        known = [*(f"{folder}/" for folder in self.folders), *(a.file for a in self.archives)]
        return (
            f"{manual_dir} contains no files of {name} (looked for {', '.join(known)}, and for "
            f"{', '.join(self.entries)}); {self.advice}"
        )


def _visible(name: str) -> bool:
    """Whether a path counts: relative, not hidden, and none of macOS's extra files."""
    parts = pathlib.PurePosixPath(name).parts
    return not any(part.startswith((".", "/")) or part == "__MACOSX" for part in parts)


def walk(folder: pathlib.Path) -> dict[str, Reader]:
    """Returns readers of all visible files below a folder, by path; links are followed.

    Raises OSError if a folder cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    readers, seen = {}, set()
    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        seen.add(os.path.realpath(place))  # A link may lead to a folder around it.
        inner = (f for f in folders if _visible(f))
        folders[:] = sorted(f for f in inner if os.path.realpath(f"{place}/{f}") not in seen)
        below = pathlib.PurePosixPath(place).relative_to(folder)
        for file in filter(_visible, files):
            readers[str(below / file)] = functools.partial(read_bytes, pathlib.Path(place, file))
    return readers


@contextlib.contextmanager
def _opened(path: pathlib.Path, scratch: Scratch, named: Naming) -> Iterator[dict[str, Reader]]:
    """Opens an archive as readers of its files; safe to use from several threads.

    A .zip is read in place. A .tar is unpacked first, since it has no directory. Raises UserError
    if the archive is damaged or cannot be unpacked.
    """
    with contextlib.ExitStack() as stack:
        try:
            if path.name.endswith(".zip"):
                readers = _members(stack.enter_context(zipfile.ZipFile(path)))
            else:
                readers = _unpack(path, scratch(), named)
        except _DAMAGED as error:
            raise UserError(f"{path} is damaged ({error}); fetch it again") from error
        except OSError as error:
            place = error.filename or path
            raise UserError(f"cannot read {place} ({error.strerror or error})") from error
        yield {ours: read for name, read in readers.items() if (ours := named(name)) is not None}


def _members(archive: zipfile.ZipFile) -> dict[str, Reader]:
    infos = [i for i in archive.infolist() if not i.is_dir() and _visible(i.filename)]
    if any(info.flag_bits & _ENCRYPTED for info in infos):
        raise UserError(
            f"{archive.filename} is encrypted; unpack it with the password that its owners gave you"
        )
    return {info.filename: functools.partial(_read, archive, info) for info in infos}


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > LARGEST_FILE:
        raise OSError(f"larger than {LARGEST_FILE} bytes in {archive.filename}")
    try:
        return archive.read(info)
    except (*_DAMAGED, RuntimeError) as error:  # The latter for unsupported compression.
        raise OSError(f"damaged in {archive.filename} ({error})") from error


def _unpack(path: pathlib.Path, folder: pathlib.Path, named: Naming) -> dict[str, Reader]:
    console.say(f"unpacking {path} temporarily")
    bar = {"total": path.stat().st_size, "desc": path.name, "disable": None, "leave": False}
    # Reading a stream keeps the progress bar accurate.
    with path.open("rb") as file, tqdm.tqdm.wrapattr(file, "read", **bar) as stream:
        with tarfile.open(fileobj=stream, mode="r|*") as packed:
            for member in packed:
                if member.isreg() and _visible(member.name) and named(member.name) is not None:
                    _extract(packed, member, path, folder)
    return walk(folder)


def _extract(
    packed: tarfile.TarFile, member: tarfile.TarInfo, path: pathlib.Path, folder: pathlib.Path
) -> None:
    """Extracts a file, but never outside the folder (Python 3.11.3 has no extraction filters)."""
    name = pathlib.PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise tarfile.TarError(f"{member.name!r} would be extracted outside its folder")
    if member.size > LARGEST_FILE:
        raise tarfile.TarError(f"{member.name!r} is larger than {LARGEST_FILE} bytes")
    target = folder / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with packed.extractfile(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise UserError(
            f"cannot unpack {path} to {folder.parent} ({error.strerror or error}); unpack it where "
            "there is room, and pass that folder with --manual_dir=FOLDER"
        ) from error


def _fetch(archive: Archive, path: pathlib.Path, scratch: Scratch) -> None:
    """Downloads an archive, which appears only when verified, unless it is already there."""
    import pooch

    if path.is_file() and archive.sha256 in ("", pooch.file_hash(str(path))):
        return
    unfinished = scratch() / path.name
    console.say(f"downloading {archive.url} to {path.parent}")
    pooch.get_logger().setLevel(logging.WARNING)
    bar = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}
    with tqdm.tqdm(total=1, desc=path.name, **bar) as progress:  # Pooch sets the total.
        downloader = pooch.HTTPDownloader(progress, chunk_size=1 << 20, timeout=_TIMEOUT)
        known = f"sha256:{archive.sha256}" if archive.sha256 else None
        pooch.retrieve(archive.url, known, path.name, str(unfinished.parent), downloader=downloader)
    unfinished.replace(path)


def _reason(error: OSError | ValueError, url: str) -> str:
    """Returns in a few words why a download failed."""
    import requests

    host = urllib.parse.urlsplit(url).netloc
    if isinstance(error, requests.HTTPError):
        return f"{host} answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return f"the connection to {host} broke"
    if isinstance(error, requests.RequestException):
        return f"no connection to {host}"
    if isinstance(error, ValueError):
        return "its SHA-256 differs from that of the official file"
    return error.strerror or str(error)


@contextlib.contextmanager
def _scratch_folder(parent: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """Creates a temporary folder, and removes those that killed processes left behind."""
    prefix = f".{name}-unfinished-"
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(f"{prefix}*"):
            # The process that holds its lock is writing to it.
            with contextlib.suppress(OSError), locked(leftover, fcntl.LOCK_NB):
                shutil.rmtree(leftover, ignore_errors=True)
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with folder as created, locked(pathlib.Path(created)):
        yield pathlib.Path(created)
