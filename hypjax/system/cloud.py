"""Cloud storage: gs://, s3:// and every other scheme that fsspec has a driver for."""

import contextlib
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tqdm

from hypjax.errors import UserError, redacted
from hypjax.system import console


def is_url(location: str | pathlib.Path) -> bool:
    """Whether a location is a URL and not a path; what only looks like a URL is an error."""
    if not isinstance(location, str) or "://" not in location:
        return False
    if not _URL.fullmatch(location):
        raise UserError(f"{location} is neither a path nor a URL, such as gs://bucket/folder")
    return True


def url_hash(url: str) -> str:
    """Returns a short name for the local copy of a URL."""
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


_URL = re.compile(r"[a-zA-Z][\w+.-]*://.*[^/].*")


class Stored(NamedTuple):
    """Size of a file in bytes, and a string that changes whenever the file is rewritten."""

    size: int
    version: str


class CloudFolder:
    """The files below a URL, addressed by their paths relative to it.

    Drivers raise errors of many types: callers must treat any `Exception` as a failure. `url` is
    the folder's, without its secrets and a trailing slash.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        if redacted(url) != url:
            _warn_of_secrets()
        self._storage, base = fsspec.core.url_to_fs(url.rstrip("/"))
        self.url = redacted(url.rstrip("/"))
        self._base = base.rstrip("/")

    def list(self) -> dict[str, Stored]:
        """Lists all files; a missing folder has none."""
        self._storage.invalidate_cache()
        try:
            found = self._storage.find(self._base, detail=True)
        except FileNotFoundError:
            return {}
        names = {path: path[len(self._base) :].lstrip("/") for path in found}
        return {
            names[path]: Stored(info.get("size") or 0, _version(info))
            for path, info in found.items()
            # Skip folder markers, which some consoles create, and names that leave the folder.
            if names[path] and not path.endswith("/") and ".." not in names[path].split("/")
        }

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file, or None if it does not exist."""
        try:
            return self._storage.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        self._write(name, lambda path: self._storage.pipe_file(path, content))

    def get_all(self, files: Mapping[str, Stored], folder: pathlib.Path) -> None:
        """Downloads files into a folder, with a progress bar on a terminal."""
        size = sum(stored.size for stored in files.values())
        style = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}
        with tqdm.tqdm(total=size, **style) as progress:
            for name, stored in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self._storage.get_file(self._path(name), str(path))
                progress.update(stored.size)

    def put(self, path: pathlib.Path, name: str) -> None:
        """Uploads a file."""
        self._write(name, lambda target: self._storage.put_file(str(path), target))

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._storage.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _write(self, name: str, action: Callable[[str], object]) -> None:
        """Writes a file, and creates its folder if the storage needs one."""
        path = self._path(name)
        try:
            action(path)
        except FileNotFoundError:
            root = path[: path.find("/", 1)]
            if not self._storage.exists(root):  # Such as a bucket, which users create themselves.
                raise
            self._storage.makedirs(path.rpartition("/")[0], exist_ok=True)
            action(path)


@functools.cache
def _warn_of_secrets() -> None:
    console.warn(
        "a URL holds credentials, which other users of this machine can see; put them into the "
        "storage's environment variables or into fsspec's configuration, ~/.config/fsspec"
    )


def _version(info: Mapping[str, Any]) -> str:
    facts = sorted((name, str(value)) for name, value in info.items())
    return hashlib.sha256(str(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def explained(problem: str, advice: str = "") -> Iterator[None]:
    """Turns any failure into a `UserError` with the problem, its reason, and advice."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{problem} without its driver ({error})") from error
    except Exception as error:
        raise UserError(f"{problem} ({reason(error)}){advice}") from error


def reason(error: Exception) -> str:
    """Returns a short description of an error."""
    text = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return text or type(error).__name__
