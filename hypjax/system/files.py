"""Files: writes that survive a power failure, and arrays of files that anyone may have made."""

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from hypjax.system.machine import usable_cores

_ARRAY = np.lib.format.MAGIC_PREFIX
_CHECKSUM_BLOCK = 1 << 24  # Bytes of a file with a checksum of their own.
_ABANDONED = 86400  # Seconds after which a temporary file is no longer being written.
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD; RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS.


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file atomically: it appears complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path; the file or folder written there replaces the given one.

    A kill or a power failure leaves the old state or the new one. Several processes may replace a
    path at once: the last one counts.
    """
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
        with contextlib.suppress(OSError):
            if time.time() - abandoned.stat().st_mtime > _ABANDONED:
                remove(abandoned)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.unfinished")
    try:
        yield temporary
        sync_all(temporary)
        if temporary.is_dir() and path.is_dir():
            _exchange(temporary, path)
        else:
            temporary.replace(path)
        sync(path.parent)
    finally:
        remove(temporary)


def _exchange(new: pathlib.Path, old: pathlib.Path) -> None:
    """Exchanges two folders: no system can rename a folder to one that is not empty."""
    library, names = ctypes.CDLL(None), (os.fsencode(new), os.fsencode(old))
    if sys.platform == "darwin":
        failed = library.renamex_np(*names, _EXCHANGE)
    else:
        failed = library.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE)
    if failed:  # NFS cannot; a kill between these two leaves the old folder as .NAME.previous.
        previous = old.with_name(f".{old.name}.previous")
        remove(previous)
        old.rename(previous)
        new.rename(old)
        remove(previous)


def remove(path: pathlib.Path) -> None:
    """Removes a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 hash of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(file: IO[Any]) -> None:
    """Waits until what was written to a file is on the disk."""
    file.flush()
    _flush(file.fileno())


def _flush(descriptor: int) -> None:
    if hasattr(fcntl, "F_FULLFSYNC"):  # On macOS, fsync stops at the cache of the drive.
        with contextlib.suppress(OSError):  # Not on every file system.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _flush(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Not every system syncs folders.
            raise
    finally:
        os.close(descriptor)


def sync_all(path: pathlib.Path) -> None:
    """Waits until a file, or a folder and everything below it, is on the disk."""
    for root, _, files in os.walk(path, topdown=False):
        for name in (*files, ""):
            sync(pathlib.Path(root, name))
    if path.is_file():
        sync(path)


def checksums(path: pathlib.Path) -> list[int]:
    """CRC-32 of each 16 MB of a file."""

    def of(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(_CHECKSUM_BLOCK))

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(of, range(0, path.stat().st_size, _CHECKSUM_BLOCK)))


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, without executing anything in it.

    Raises an `OSError` if the file cannot be read, and a `ValueError` if it is damaged, or holds
    something else than plain arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            return {name.removesuffix(".npy"): _member(archive, name) for name in names}
    except OSError:
        raise
    # NumPy and zipfile raise almost anything: for encrypted members, for shapes beyond the memory,
    # and for damaged headers.
    except Exception as error:
        with path.open("rb") as file:
            if file.read(len(_ARRAY)) == _ARRAY:
                raise ValueError("one array (.npy) and not an .npz file of several") from error
        raise ValueError("damaged, or not an .npz file of plain arrays") from error


def _member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of an .npz file, whose checksum zipfile compares at the end of the member."""
    with archive.open(name) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):
            raise ValueError(f"{name} is longer than its header says")
    return array
