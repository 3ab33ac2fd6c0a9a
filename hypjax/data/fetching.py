"""Images in archives and at URLs."""

import contextlib
import itertools
import os
import pathlib
import tarfile
import urllib.request
import zipfile

from hypjax.data.dataset import Dataset, fingerprint_of, table_of_names
from hypjax.data.folders import OF_SYSTEMS, is_image_name
from hypjax.data.pixels import LARGEST_FILE
from hypjax.errors import UserError, explained
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.columns import split_options
from hypjax.system.files import checksum, replacing
from hypjax.system.progress import Bar
from hypjax.types import SPLITS, split_name

TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
_SAMPLED_MEMBERS = 1000  # First members of a .tar file, from which its kind is guessed.
_TIMEOUT = 30  # Seconds.
_HEADERS = {"User-Agent": "hypjax"}  # Some servers refuse Python's default.


def unpack(path: pathlib.Path, folder: pathlib.Path, encoding: str | None = None) -> None:
    """Unpacks a .zip or .tar file into a folder, with a progress bar.

    `encoding` is that of names that are not marked as UTF-8; None: UTF-8, or else code page 437.
    """
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        Bar.wrapattr(file, "read", total=size, desc=path.name, disable=None, leave=False) as stream,
    ):
        if path.suffix.lower() != ".zip":  # The filter "data" refuses members that lead out.
            with tarfile.open(fileobj=stream, encoding=encoding) as tar:
                tar.extractall(folder, filter="data")
            return
        try:
            packed = zipfile.ZipFile(stream, metadata_encoding=encoding or "utf-8")
        except (LookupError, UnicodeDecodeError) as error:
            if encoding:
                raise ValueError(f"its names are not of the encoding {encoding}") from error
            console.warn(f"names in {path} are read as cp437; ?encoding=cp932 names another")
            packed = zipfile.ZipFile(stream)
        originals: dict[str, str] = {}  # Names in the archive, by the unpacked file.
        for member in packed.infolist():
            original = member.filename
            member.filename = original.replace("\\", "/")  # PowerShell 5 writes backslashes.
            target = packed.extract(member, folder)  # Leaves out '..' and slashes at the beginning.
            if originals.setdefault(target, original) != original and not member.is_dir():
                raise ValueError(f"its names are not distinct: {originals[target]} and {original}")


def local_path(where: str) -> pathlib.Path:
    """Expands ~ in a path; unpacks an archive into the cache, and returns the unpacked folder.

    After an archive may follow the encoding of the names in it, as in photos.zip?encoding=cp932.
    """
    location, options = split_options(where)
    path = pathlib.Path(location).expanduser()
    is_folder = path.name.lower().endswith(TARS) and not _holds_samples(path)
    if not (is_folder or path.suffix.lower() == ".zip") or not os.path.isfile(path):
        return path
    stat, encoding = path.stat(), options.get("encoding")
    version = str(path.absolute()), stat.st_size, stat.st_mtime_ns, encoding
    folder = cache_folder() / "archives" / fingerprint_of(version)
    if not folder.exists():
        console.say(f"unpacking {path} to {folder} (once)")
        advice = "; unpack it yourself, and name its folder"
        with explained(f"cannot unpack {path}", advice), replacing(folder) as unfinished:
            unfinished.mkdir(parents=True)
            unpack(path, unfinished, encoding)
    # Many archives hold a single folder, which holds the folders of the classes.
    paths = _visible(folder)
    folders = [path for path in paths if path.is_dir()]
    if len(folders) != 1 or split_name(folders[0].name) in SPLITS or any(map(is_image_name, paths)):
        return folder
    return folders[0] if any(path.is_dir() for path in _visible(folders[0])) else folder


def _visible(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.glob("[!.]*") if not OF_SYSTEMS.match(path.name)]


def _holds_samples(path: pathlib.Path) -> bool:
    """Whether a .tar file is a WebDataset: an image and another file have one name up to a dot."""
    image_stems: set[pathlib.PurePath] = set()
    other_stems: set[pathlib.PurePath] = set()
    # Decompressors raise almost anything; unpacking reports the error.
    with contextlib.suppress(Exception), tarfile.open(path) as archive:
        for member in itertools.islice(archive, _SAMPLED_MEMBERS):
            file = pathlib.PurePath(member.name)
            if member.isfile() and file.name[0] != ".":
                stems = image_stems if is_image_name(file) else other_stems
                stems.add(file.parent / file.name.partition(".")[0])
    return not image_stems.isdisjoint(other_stems)


def image_at(url: str) -> Dataset:
    """Downloads an image from a URL, as a table of one row."""
    with explained(f"cannot fetch {url}"):
        request = urllib.request.Request(url, headers=_HEADERS)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            content = response.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise UserError(f"{url} is larger than {LARGEST_FILE} bytes")
    return table_of_names([content], [url], [""], file_versions=[(url, checksum(content))])
