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

        self._storage, base = fsspec.core.url_to_fs(url.rstrip("/"))
        self._base = base.rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each file; {} if the folder does not exist."""
        self._storage.invalidate_cache()
        try:
            files = self._storage.find(self._base, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {}
        for path, info in files.items():
            name = path[len(self._base) :].lstrip("/")
            # Skip folder markers, which some consoles create, and names that leave the folder.
            if name and not name.endswith("/") and ".." not in name.split("/"):
                sizes[name] = info.get("size") or 0
        return sizes

    def read(self, name: str) -> str | None:
        """Returns the text of a file, or None if it does not exist."""
        try:
            return self._storage.cat_file(f"{self._base}/{name}").decode()
        except FileNotFoundError:
            return None

    def get(self, names: Iterable[str], folder: pathlib.Path) -> None:
        """Downloads files into a folder, with a progress bar on a terminal."""
        from fsspec.callbacks import TqdmCallback

        paths = {f"{self._base}/{name}": folder / name for name in names}
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        bar = TqdmCallback({"disable": None, "leave": False, "unit": " files"})
        self._storage.get(list(paths), list(map(str, paths.values())), callback=bar)

    def put(self, names: Collection[str], folder: pathlib.Path) -> None:
        """Uploads files of a folder."""
        sources = [str(folder / name) for name in names]
        targets = [f"{self._base}/{name}" for name in names]
        try:
            self._storage.put(sources, targets)
        except FileNotFoundError:  # Some storage has folders, which its driver does not create.
            root = re.match("/?[^/]*", self._base)[0]  # A bucket, for example: users create it.
            if not self._storage.exists(root):
                raise
            for target_folder in {target.rpartition("/")[0] for target in targets}:
                self._storage.makedirs(target_folder, exist_ok=True)
            self._storage.put(sources, targets)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files."""
        for name in names:
            self._storage.rm_file(f"{self._base}/{name}")
