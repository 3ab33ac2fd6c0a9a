"""Reads and writes cloud storage: gs://, s3:// and all schemes that fsspec has drivers for."""

import hashlib
import pathlib
import re
from collections.abc import Collection, Iterable

from hypjax.errors import UserError

_URL = re.compile(r"[a-zA-Z][\w+.-]*://.*[^/].*")


def is_url(location: str | pathlib.Path) -> bool:
    """Whether a location is a URL and not a path; raises a UserError for a malformed URL."""
    if not isinstance(location, str) or "://" not in location:
        return False
    if not _URL.fullmatch(location):
        raise UserError(f"{location} is neither a path nor a URL, such as gs://bucket/folder")
    return True


def url_hash(url: str) -> str:
    """Hashes a URL to a short name for the folder of its local copy."""
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


class CloudFolder:
    """Files below a URL, named by relative paths. fsspec's drivers raise almost any `Exception`."""

    def __init__(self, url: str) -> None:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        storage, self._base = fsspec.core.url_to_fs(url.rstrip("/"))
        self._files = DirFileSystem(self._base.rstrip("/"), storage)

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each file; {} if the folder does not exist."""
        self._files.invalidate_cache()
        try:
            files = self._files.find("", detail=True)
        except FileNotFoundError:
            return {}
        # Skips folder markers, which some consoles create, and names that leave the folder.
        names = [x for x in files if x and not x.endswith("/") and ".." not in x.split("/")]
        return {name: files[name].get("size") or 0 for name in names}

    def read(self, name: str) -> str | None:
        """Returns the text of a file, or None if it does not exist."""
        try:
            return self._files.cat_file(name).decode()
        except FileNotFoundError:
            return None

    def get(self, names: Collection[str], folder: pathlib.Path) -> None:
        """Downloads files into a folder, with a progress bar on a terminal."""
        from fsspec.callbacks import TqdmCallback

        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        bar = TqdmCallback({"disable": None, "leave": False, "unit": " files"})
        self._files.get(list(names), [str(folder / name) for name in names], callback=bar)

    def put(self, names: Collection[str], folder: pathlib.Path) -> None:
        """Uploads files of a folder."""
        sources, targets = [str(folder / name) for name in names], list(names)
        try:
            self._files.put(sources, targets)
        except FileNotFoundError:  # Some storage has folders, which its driver does not create.
            bucket = "/".join(self._base.split("/")[: 2 if self._base.startswith("/") else 1])
            if not self._files.fs.exists(bucket):  # Users create it.
                raise
            for parent in {name.rpartition("/")[0] for name in names}:
                self._files.makedirs(parent, exist_ok=True)
            self._files.put(sources, targets)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files."""
        for name in names:
            self._files.rm_file(name)
