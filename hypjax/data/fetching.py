"""Images in archives and at URLs."""

import itertools
import pathlib
import shutil
import tarfile
import urllib.request
import zlib

from PIL import Image

from hypjax.data.dataset import Dataset, hash_facts, table_of_names
from hypjax.data.pixels import LARGEST_FILE
from hypjax.errors import UserError, reason
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.files import replacing

# Formats by suffix.
_ARCHIVES = {suffix: name for name, names, _ in shutil.get_unpack_formats() for suffix in names}
_LISTED = 1000  # Members of a .tar file that tell whether it holds folders.
_SECONDS = 30  # Without an answer.
_AGENT = {"User-Agent": "hypjax"}  # Some servers refuse Python's.


def local_path(where: str) -> pathlib.Path:
    """Path of a location; for an archive, the folder in the cache to which it is unpacked once.

    A folder that holds all contents of an archive stands for it.
    """
    path = pathlib.Path(where).expanduser()
    suffix = next((x for x in _ARCHIVES if path.name.lower().endswith(x)), None)
    if suffix is None or not path.is_file() or (suffix == ".tar" and not _holds_folders(path)):
        return path
    stat = path.stat()
    facts = str(path.absolute()), stat.st_size, stat.st_mtime_ns
    folder = cache_folder() / "archives" / hash_facts(facts)
    if not folder.exists():
        console.say(f"unpacking {path} to {folder} (once)")
        kind = _ARCHIVES[suffix]
        safely = {} if kind == "zip" else {"filter": "data"}  # Not beyond the folder.
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with replacing(folder) as unfinished:
                shutil.unpack_archive(path, unfinished, kind, **safely)
        except Exception as error:  # Damaged and encrypted archives raise almost anything.
            raise UserError(
                f"cannot unpack {path} to {folder} ({reason(error)}); unpack it yourself, and name "
                "its folder"
            ) from error
    while len(below := _folders(folder)) == 1 and _folders(below[0]):
        (folder,) = below
    return folder


def _holds_folders(path: pathlib.Path) -> bool:
    """Whether a .tar file holds folders of images, and not WebDataset's samples."""
    try:
        with tarfile.open(path) as archive:
            members = itertools.islice(archive, _LISTED)
            files = [pathlib.PurePath(member.name) for member in members if member.isfile()]
    except (OSError, tarfile.TarError):  # Who reads it says so.
        return False
    known, files = Image.registered_extensions(), [x for x in files if x.name[0] != "."]
    return all(len(x.parts) > 1 and x.suffix.lower() in known for x in files)


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Visible folders in a folder, without the one that macOS adds to archives."""
    folders = (path for path in folder.iterdir() if path.is_dir() and path.name != "__MACOSX")
    return [path for path in folders if not path.name.startswith(".")]


def image_at(url: str) -> Dataset:
    """The image at a URL, as a table of one row."""
    try:
        request = urllib.request.Request(url, headers=_AGENT)
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            content = response.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot fetch {url} ({reason(error)})") from error
    if len(content) > LARGEST_FILE:
        raise UserError(f"{url} is larger than {LARGEST_FILE} bytes")
    return table_of_names([content], [url], [""], file_versions=[(url, zlib.crc32(content))])
