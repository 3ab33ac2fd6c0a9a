"""Cloud storage: gs://, s3://, whatever fsspec has a driver for."""

import contextlib
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tqdm

from hypjax.errors import UserError


def is_url(place: str | pathlib.Path) -> bool:
    """Whether a place is somewhere else than in this machine's file system."""
    return isinstance(place, str) and "://" in place


def url_hash(url: str) -> str:
    """A short name for what is kept on this machine of a URL."""
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


class Stored(NamedTuple):
    """What storage tells of a file.

    Attributes:
        size: In bytes.
        version: Another one when the file is written again.
    """

    size: int
    version: str


class CloudFolder:
    """The files below a URL, by their names relative to it.

    Every driver raises errors of its own: callers take any `Exception` for a failure.

    Attributes:
        url: Where they are.
    """

    def __init__(self, url: str) -> None:
        """Finds the driver."""
        import fsspec

        self.url = url.rstrip("/")
        self._files, base = fsspec.core.url_to_fs(self.url)
        self._base = base.rstrip("/")

    def list(self) -> dict[str, Stored]:
        """All files; none where there is no such folder."""
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._base, detail=True)
        except FileNotFoundError:
            return {}
        names = {path: path[len(self._base) :].lstrip("/") for path in found}
        return {
            names[path]: Stored(info.get("size") or 0, _version(info))
            for path, info in found.items()
            # Some consoles make objects for folders; and no file leads out of a folder.
            if names[path] and not path.endswith("/") and ".." not in names[path].split("/")
        }

    def read(self, name: str) -> bytes | None:
        """The content of a file; None: there is none."""
        try:
            return self._files.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        self._write(name, lambda path: self._files.pipe_file(path, content))

    def get(self, name: str, path: pathlib.Path) -> None:
        """Copies a file from the cloud."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path(name), str(path))

    def get_all(self, files: Mapping[str, Stored], folder: pathlib.Path) -> None:
        """Copies files of a list into a folder, with a bar on a terminal."""
        size = sum(stored.size for stored in files.values())
        with tqdm.tqdm(
            total=size, unit="B", unit_scale=True, disable=None, leave=False
        ) as progress:
            for name, stored in files.items():
                self.get(name, folder / name)
                progress.update(stored.size)

    def put(self, path: pathlib.Path, name: str) -> None:
        """Copies a file to the cloud."""
        self._write(name, lambda target: self._files.put_file(str(path), target))

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _write(self, name: str, action: Callable[[str], object]) -> None:
        """Writes a file, and makes its folder first where the storage has folders."""
        path = self._path(name)
        try:
            action(path)
        except FileNotFoundError:
            root = path[: path.find("/", 1)]
            if not self._files.exists(root):  # A bucket, say; to make one is the user's affair.
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            action(path)


def _version(info: Mapping[str, Any]) -> str:
    facts = sorted((name, str(value)) for name, value in info.items())
    return hashlib.sha256(str(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Tells a user whose storage cannot be read, whatever its driver raises."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"cannot read {url} without its driver ({error})") from error
    except Exception as error:
        raise UserError(f"cannot read {url} ({reason(error)})") from error


@contextlib.contextmanager
def copying(url: str, folder: pathlib.Path) -> Iterator[None]:
    """Tells a user of a copy from the cloud that fails, at either end."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot copy {url} to {folder} ({reason(error)})") from error


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    text = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return text or type(error).__name__
