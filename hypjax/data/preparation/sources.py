"""Where a benchmark's files come from: a folder, the archives in it, or a download."""

import contextlib
import dataclasses
import fcntl
import fnmatch
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping

from hypjax.data.preparation import archives, downloads
from hypjax.data.preparation.archives import Reader
from hypjax.errors import UserError


class Tree:
    """A dataset's files by their paths below its folder, wherever they lie; read-only."""

    def __init__(self, root: pathlib.Path, readers: Mapping[str, Reader]) -> None:
        """Takes the files.

        Args:
            root: Where the folder is, or would be if its archives were unpacked, for messages.
            readers: What returns a file's bytes, by path with '/'.
        """
        self.root = root
        self.files = frozenset(readers)
        self._readers = readers

    def read(self, name: str) -> bytes:
        """Returns a file's bytes; threads may read at once.

        Raises:
            OSError: It cannot be read.
        """
        return self._readers[name]()

    def read_list(self, name: str) -> bytes:
        """Returns the bytes of a file that the dataset cannot do without.

        Raises:
            UserError: It is missing, or cannot be read.
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
    """An official archive of a dataset, or of a part of it.

    Attributes:
        file: Its name, or its path below the dataset's folder; .zip, .tar and .tgz may stand for
            one another.
        holds: Pattern of what is in the dataset's folder once it is unpacked: where that is there,
            the archive is not opened.
        url: Where it can be downloaded; '': nowhere.
        sha256: Checksum of a download.
    """

    file: str
    holds: str
    url: str = ""
    sha256: str = ""

    def find(self, root: pathlib.Path) -> pathlib.Path | None:
        """The archive in a dataset's folder, if it is there and needed."""
        if any(archives.visible(path.name) for path in root.glob(self.holds)):
            return None
        stem = next(self.file.removesuffix(s) for s in archives.SUFFIXES if self.file.endswith(s))
        paths = [root / self.file, *(root / f"{stem}{suffix}" for suffix in archives.SUFFIXES)]
        return next((path for path in paths if path.is_file()), None)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a dataset's files are called, and where to get them.

    Attributes:
        name: Of the dataset.
        folders: Names of its folder.
        entries: Patterns of what belongs to it in there: files, and folders with all they hold.
        archives: What else may stand for these.
        wanted: What a user has to get, in words.
        origin: From where, in words.
        beside: Lists that are in no archive.
    """

    name: str
    folders: tuple[str, ...]
    entries: tuple[str, ...]
    archives: tuple[Archive, ...]
    wanted: str
    origin: str
    beside: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        """What a user can do who has not got the files."""
        return (
            f"get {self.wanted} from {self.origin}, save to one folder, "
            "and name that with --manual_dir=FOLDER"
        )

    @contextlib.contextmanager
    def open(self, manual_dir: pathlib.Path | None, downloads_dir: pathlib.Path) -> Iterator[Tree]:
        """Finds the files, or downloads them; within the body they can be read.

        Args:
            manual_dir: The dataset's folder, or one that holds it, or its archives; None: they are
                looked for in `downloads_dir`, and downloaded if they can be.
            downloads_dir: For downloads, and for what is unpacked for now.

        Raises:
            UserError: There are no files, or an archive is damaged.
        """
        downloads_dir = downloads_dir.expanduser().absolute()
        with contextlib.ExitStack() as stack:

            def scratch() -> pathlib.Path:
                return stack.enter_context(_scratch(downloads_dir, self.name))

            base = downloads_dir if manual_dir is None else manual_dir.expanduser().absolute()
            try:
                if manual_dir is None:
                    self._download(downloads_dir, scratch)
                root = self._find(base)
                if root is None:
                    raise UserError(self._not_found(manual_dir and base))
                readers = self._entries(root)
            except OSError as error:
                raise UserError(f"cannot read {error.filename} ({error.strerror})") from error
            tree = Tree(root, readers)
            for name in self.beside:
                tree.read_list(name)  # Before what may take long.
            for archive in self.archives:
                if path := archive.find(root):
                    members = archives.opened(path, scratch, self._belongs(archive))
                    readers = self._named(archive, stack.enter_context(members)) | readers
            yield Tree(root, readers)

    def _find(self, base: pathlib.Path) -> pathlib.Path | None:
        """The folder that holds the dataset's files: the first that has any of them."""
        inner = [base / name for name in self.folders]
        nested = [folder / name for folder in inner for name in self.folders]
        return next((root for root in (*nested, *inner, base) if self._any(root)), None)

    def _any(self, root: pathlib.Path) -> bool:
        entries = (path for pattern in self.entries for path in root.glob(pattern))
        return any(archives.visible(path.name) for path in entries) or any(
            archive.find(root) for archive in self.archives
        )

    def _entries(self, root: pathlib.Path) -> dict[str, Reader]:
        """Readers of what lies in the dataset's folder as it is."""
        readers = {}
        for path in (path for pattern in self.entries for path in root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if path.is_dir() and archives.visible(name):
                readers |= {f"{name}/{file}": read for file, read in archives.walk(path).items()}
            elif archives.visible(name):
                readers[name] = path.read_bytes
        return readers

    def _belongs(self, archive: Archive) -> Callable[[str], bool]:
        return lambda member: self._is_entry(self._name(archive, member))

    def _named(self, archive: Archive, members: Mapping[str, Reader]) -> dict[str, Reader]:
        """Readers of an archive's files under the names they have in the dataset's folder."""
        named = {self._name(archive, member): read for member, read in members.items()}
        return {name: read for name, read in named.items() if self._is_entry(name)}

    def _name(self, archive: Archive, member: str) -> str:
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
        """Downloads the archives that have an address, but those that are there unpacked."""
        root = self._find(folder) or folder
        for archive in self.archives:
            if not archive.url or any(root.glob(archive.holds)):
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

    def _not_found(self, manual_dir: pathlib.Path | None) -> str:
        if manual_dir is None:
            return f"{self.name} cannot be downloaded; {self.advice}"
        if manual_dir.is_file():
            return f"{manual_dir} is a file; name the folder that it lies in (--manual_dir)"
        if not manual_dir.is_dir():
            return f"there is no folder {manual_dir} (--manual_dir)"
        known = [*(f"{name}/" for name in self.folders), *(a.file for a in self.archives)]
        return (
            f"{manual_dir} has nothing of {self.name} (looked for {', '.join(known)}, and for "
            f"{', '.join(self.entries)}); {self.advice}"
        )


@contextlib.contextmanager
def _scratch(parent: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """A folder that is gone afterwards; those that killed programs have left are removed too."""
    prefix = f".{name}-unfinished-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{prefix}*"):
            with _locked(left) as free:
                if free:
                    shutil.rmtree(left, ignore_errors=True)
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"cannot write to {parent} ({error.strerror})") from error
    with folder as made, _locked(pathlib.Path(made)):
        yield pathlib.Path(made)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[bool]:
    """Whether the folder could be locked; the lock ends with the body, or with the process."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        yield free
    finally:
        os.close(handle)
