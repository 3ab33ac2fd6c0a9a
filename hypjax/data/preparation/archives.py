"""Files in archives by their names: .zip is read in place, .tar and .tgz are unpacked first."""

import contextlib
import functools
import os
import pathlib
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping

import tqdm

from hypjax.data.pixels import LARGEST_FILE, read_bytes
from hypjax.errors import UserError
from hypjax.system import console

SUFFIXES = (".zip", ".tgz", ".tar.gz", ".tar")
_ENCRYPTED = 1  # Bit of a member's flags.
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)
_UNREADABLE = (*_DAMAGED, RuntimeError)  # The latter for unsupported compression.

Reader = Callable[[], bytes]


def visible(name: str) -> bool:
    """Whether a path counts: relative, not hidden, and none of macOS's extra files."""
    parts = pathlib.PurePosixPath(name).parts
    return not any(part.startswith((".", "/")) or part == "__MACOSX" for part in parts)


def walk(folder: pathlib.Path) -> dict[str, Reader]:
    """Returns readers of all visible files below a folder, by path; links are followed.

    Raises:
        OSError: If a folder cannot be listed.
    """
    readers, seen = {}, set()
    for place, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        seen.add(os.path.realpath(place))
        inner = (f for f in folders if visible(f))
        folders[:] = sorted(f for f in inner if os.path.realpath(f"{place}/{f}") not in seen)
        below = pathlib.PurePosixPath(place).relative_to(folder)
        for file in filter(visible, files):
            readers[str(below / file)] = functools.partial(read_bytes, pathlib.Path(place, file))
    return readers


@contextlib.contextmanager
def opened(
    path: pathlib.Path, scratch: Callable[[], pathlib.Path], wanted: Callable[[str], bool]
) -> Iterator[Mapping[str, Reader]]:
    """Opens an archive as readers of its files by name; safe to use from several threads.

    Args:
        path: Path of the archive.
        scratch: Returns an empty folder; called if the archive has to be unpacked.
        wanted: Whether to unpack the file of a given name.

    Raises:
        UserError: If the archive is damaged, cannot be read or cannot be unpacked.
    """
    with contextlib.ExitStack() as stack:
        try:
            if path.name.endswith(".zip"):
                readers = _members(stack.enter_context(zipfile.ZipFile(path)))
            else:
                readers = _unpack(path, scratch(), wanted)
        except _DAMAGED as error:
            raise UserError(f"{path} is damaged ({error}); fetch it again") from error
        except OSError as error:
            place = error.filename or path
            raise UserError(f"cannot read {place} ({error.strerror or error})") from error
        yield readers


def _members(archive: zipfile.ZipFile) -> dict[str, Reader]:
    infos = [i for i in archive.infolist() if not i.is_dir() and visible(i.filename)]
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
    except _UNREADABLE as error:
        raise OSError(f"damaged in {archive.filename} ({error})") from error


def _unpack(
    path: pathlib.Path, folder: pathlib.Path, wanted: Callable[[str], bool]
) -> dict[str, Reader]:
    console.say(f"unpacking {path} temporarily")
    size = path.stat().st_size
    bar = {"total": size, "desc": path.name, "disable": None, "leave": False}
    # Reading a stream keeps the progress bar accurate.
    with path.open("rb") as file, tqdm.tqdm.wrapattr(file, "read", **bar) as stream:
        with tarfile.open(fileobj=stream, mode="r|*") as packed:
            for member in packed:
                if member.isreg() and visible(member.name) and wanted(member.name):
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


def _raise(error: OSError) -> None:
    raise error
