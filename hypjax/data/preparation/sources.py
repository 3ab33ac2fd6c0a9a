"""The files that a dataset's authors published: a folder, archives in it, or downloads."""

import glob
import logging
import pathlib
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from typing import NamedTuple

import tqdm

from hypjax.data.pixels import read_bytes
from hypjax.errors import UserError, reason
from hypjax.system import console


class FileTree(NamedTuple):
    """A dataset's files by their paths below its folder, with '/'."""

    root: pathlib.Path  # For messages.
    files: Mapping[str, pathlib.Path]

    def read(self, name: str) -> bytes:
        """Returns a file's bytes, or raises OSError; safe to call from several threads."""
        return read_bytes(self.files[name])

    def read_list(self, name: str) -> bytes:
        """Returns the bytes of a list that the dataset requires, or raises UserError."""
        if name not in self.files:
            raise UserError(f"{self.root} lacks {name}, which lists the images; fetch it again")
        try:
            return self.read(name)
        except OSError as error:
            raise UserError(f"cannot read {self.root / name} ({reason(error)})") from error


class Archive(NamedTuple):
    """A .zip or .tar file with all or part of a dataset.

    It is opened only if nothing in the dataset's folder matches the pattern of what it unpacks to.
    """

    file: str  # Its name, or its path below the dataset's folder.
    unpacked: str
    url: str = ""
    sha256: str | None = None  # Of the file at that address; None if downloads may differ.

    def is_unpacked(self, root: pathlib.Path) -> bool:
        """Whether its contents are in a dataset's folder."""
        return any(glob.iglob(self.unpacked, root_dir=root))

    def is_needed(self, root: pathlib.Path) -> bool:
        """Whether it is in a dataset's folder, and its contents are not."""
        return (root / self.file).is_file() and not self.is_unpacked(root)

    def unpack(self, root: pathlib.Path, folder: pathlib.Path) -> None:
        """Unpacks it from a dataset's folder to one that stands for that folder."""
        path = root / self.file
        console.say(f"unpacking {path} temporarily")
        target = (folder / self.file).parent
        bar = {"total": path.stat().st_size, "desc": path.name, "disable": None, "leave": False}
        try:
            target.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as file, tqdm.tqdm.wrapattr(file, "read", **bar) as stream:
                if path.suffix == ".zip":
                    zipfile.ZipFile(stream).extractall(target)
                else:  # The filter refuses members that lead out of the folder.
                    with tarfile.open(fileobj=stream) as packed:
                        packed.extractall(target, filter="data")
        except Exception as error:  # Damaged and encrypted archives raise almost anything.
            raise UserError(
                f"cannot unpack {path} to {folder.parent} ({reason(error)}); fetch it again, or "
                "unpack it yourself and pass that folder with --manual_dir=FOLDER"
            ) from error

    def download(self, root: pathlib.Path, advice: str) -> None:
        """Downloads it to a folder, where it appears when verified, unless it is there."""
        import pooch

        if not (root / self.file).exists():
            console.say(f"downloading {self.url} to {root}")
        pooch.get_logger().setLevel(logging.WARNING)
        known, bar = self.sha256 and f"sha256:{self.sha256}", sys.stderr.isatty()
        try:
            pooch.retrieve(self.url, known, self.file, root, progressbar=bar)
        except (OSError, ValueError) as error:  # Requests' errors are OSErrors.
            why = getattr(error, "strerror", None) or str(error).partition(". ")[0]
            raise UserError(f"cannot download {self.url} ({why}); {advice}") from error
