"""Sources of a dataset's files: a folder, archives in it, or downloads."""

import contextlib
import dataclasses
import fcntl
import fnmatch
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping

from hypjax.data.pixels import read_bytes
from hypjax.data.preparation import archives, downloads
from hypjax.data.preparation.archives import Reader
from hypjax.errors import UserError


class FileTree:
    """A dataset's files by their paths below its folder, unpacked or in archives; read-only."""

    def __init__(self, root: pathlib.Path, readers: Mapping[str, Reader]) -> None:
        """Creates a tree from readers.

        Args:
            root: The folder, as if its archives were unpacked there, for messages.
            readers: Function that returns a file's bytes, by path with '/'.
        """
        self.root = root
        self.files = frozenset(readers)
        self._readers = readers

    def read(self, name: str) -> bytes:
        """Returns a file's bytes; safe to call from several threads.

        Raises:
            OSError: If the file cannot be read.
        """
        return self._readers[name]()

    def read_list(self, name: str) -> bytes:
        """Returns the bytes of a list that the dataset requires.

        Raises:
            UserError: If the list is missing or cannot be read.
        """
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

    Attributes:
        file: File name, or path below the dataset's folder. The same stem with another suffix
            (.zip, .tar, .tgz, .tar.gz) is accepted too.
        unpacked: Pattern of what the archive unpacks to in the dataset's folder. The archive is
            opened only if nothing there matches.
        url: Download address; '' if there is none.
        sha256: Checksum of the download.
    """

    file: str
    unpacked: str
    url: str = ""
    sha256: str = ""

    def find(self, root: pathlib.Path) -> pathlib.Path | None:
        """Returns the archive in a dataset's folder, or None if missing or already unpacked."""
        if any(archives.visible(path.name) for path in root.glob(self.unpacked)):
            return None
        stem = next(self.file.removesuffix(s) for s in archives.SUFFIXES if self.file.endswith(s))
        paths = [root / self.file, *(root / f"{stem}{suffix}" for suffix in archives.SUFFIXES)]
        return next((path for path in paths if path.is_file()), None)


@dataclasses.dataclass(frozen=True)
class Source:
    """The names of a dataset's files, and where to get them.

    Attributes:
        folders: Possible names of the dataset's folder.
        entries: Patterns of the files, and of the folders with all their contents, that belong to
            the dataset.
        archives: Archives that contain these entries.
        required: What a user has to obtain, in words.
        origin: Where to obtain it, in words.
        required_lists: Lists that no archive contains; checked before anything is unpacked.
    """

    folders: tuple[str, ...]
    entries: tuple[str, ...]
    archives: tuple[Archive, ...]
    required: str
    origin: str
    required_lists: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        """Tells users without the files what to do."""
        return (
            f"get {self.required} from {self.origin}, put everything in one folder, "
            "and pass that folder with --manual_dir=FOLDER"
        )

    @contextlib.contextmanager
    def open(
        self, name: str, manual_dir: pathlib.Path | None, downloads_dir: pathlib.Path
    ) -> Iterator[FileTree]:
        """Finds or downloads the files; they are readable within the body.

        Args:
            name: Name of the dataset, for messages.
            manual_dir: The dataset's folder, a folder that contains it, or a folder with its
                archives. If None, `downloads_dir` is searched, and missing archives are downloaded
                where possible.
            downloads_dir: Folder for downloads and temporary files.

        Raises:
            UserError: If there are no files, or an archive is damaged.
        """
        downloads_dir = downloads_dir.expanduser().absolute()
        with contextlib.ExitStack() as stack:

            def scratch() -> pathlib.Path:
                return stack.enter_context(_scratch_folder(downloads_dir, name))

            base = downloads_dir if manual_dir is None else manual_dir.expanduser().absolute()
            try:
                if manual_dir is None:
                    self._download(downloads_dir, scratch)
                root = self._find_root(base)
                if root is None:
                    raise UserError(self._not_found(name, manual_dir and base))
                readers = self._entry_readers(root)
            except OSError as error:
                raise UserError(f"cannot read {error.filename} ({error.strerror})") from error
            tree = FileTree(root, readers)
            for file in self.required_lists:
                tree.read_list(file)  # Unpacking may take long.
            for archive in self.archives:
                if path := archive.find(root):
                    members = archives.opened(path, scratch, self._entry_filter(archive))
                    readers = self._renamed(archive, stack.enter_context(members)) | readers
            yield FileTree(root, readers)

    def _find_root(self, base: pathlib.Path) -> pathlib.Path | None:
        """Returns the first folder that contains any of the dataset's files."""
        inner = [base / name for name in self.folders]
        nested = [folder / name for folder in inner for name in self.folders]
        return next((root for root in (*nested, *inner, base) if self._has_files(root)), None)

    def _has_files(self, root: pathlib.Path) -> bool:
        entries = (path for pattern in self.entries for path in root.glob(pattern))
        return any(archives.visible(path.name) for path in entries) or any(
            archive.find(root) for archive in self.archives
        )

    def _entry_readers(self, root: pathlib.Path) -> dict[str, Reader]:
        """Returns readers of the unpacked files in the dataset's folder."""
        readers = {}
        for path in (path for pattern in self.entries for path in root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if path.is_dir() and archives.visible(name):
                readers |= {f"{name}/{file}": read for file, read in archives.walk(path).items()}
            elif archives.visible(name):
                readers[name] = functools.partial(read_bytes, path)
        return readers

    def _entry_filter(self, archive: Archive) -> Callable[[str], bool]:
        """Returns a function that tells which members of an archive belong to the dataset."""
        return lambda member: self._is_entry(self._entry_name(archive, member))

    def _renamed(self, archive: Archive, members: Mapping[str, Reader]) -> dict[str, Reader]:
        """Returns readers of an archive's files by their names in the dataset's folder."""
        named = {self._entry_name(archive, member): read for member, read in members.items()}
        return {name: read for name, read in named.items() if self._is_entry(name)}

    def _entry_name(self, archive: Archive, member: str) -> str:
        path = pathlib.PurePosixPath(member)
        for folder in self.folders:
            if path.is_relative_to(folder):
                path = path.relative_to(folder)
        return (pathlib.PurePosixPath(archive.file).parent / path).as_posix()

    def _is_entry(self, name: str) -> bool:
        parts = name.split("/")
        return any(
            fnmatch.fnmatchcase("/".join(parts[: pattern.count("/") + 1]), pattern)
            for pattern in self.entries
        )

    def _download(self, folder: pathlib.Path, scratch: Callable[[], pathlib.Path]) -> None:
        """Downloads the archives that have an address, except those already unpacked."""
        root = self._find_root(folder) or folder
        for archive in self.archives:
            if not archive.url or any(root.glob(archive.unpacked)):
                continue
            try:
                downloads.download(
                    archive.url,
                    root / archive.file,
                    sha256=archive.sha256,
                    scratch=scratch,
                )
            except (OSError, ValueError) as error:
                reason = downloads.reason(error, archive.url)
                raise UserError(
                    f"cannot download {archive.file} ({reason}); {self.advice}"
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


@contextlib.contextmanager
def _scratch_folder(parent: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """Creates a temporary folder, and removes those that killed processes left behind."""
    prefix = f".{name}-unfinished-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(f"{prefix}*"):
            with _locked(leftover) as unused:
                if unused:
                    shutil.rmtree(leftover, ignore_errors=True)
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"cannot write to {parent} ({error.strerror})") from error
    with folder as created, _locked(pathlib.Path(created)):
        yield pathlib.Path(created)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[bool]:
    """Tries to lock a folder until the body or the process ends; yields whether it succeeded."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(handle)
