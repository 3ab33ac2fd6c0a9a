"""Files: writes that survive a power failure, and arrays of files that anyone may have made."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import pathlib
import time
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from hypjax.system.cores import usable_cores

_ARRAY = np.lib.format.MAGIC_PREFIX
_SUMMED = 1 << 24  # Bytes of a file with a checksum of their own.
_ABANDONED = 3600  # Seconds after which a temporary file is no longer being written.


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file atomically: it appears complete or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        flush(file)  # Without this, a power failure may leave an empty file.
    unfinished.replace(path)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path, which replaces the given one if the body succeeds.

    Several processes may do so at once: the last one counts. What processes left behind that were
    killed more than an hour ago is removed.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:  # Not on every file system.
            pass
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


def sync_all(folder: pathlib.Path) -> None:
    """Waits until a folder and everything below it is on the disk."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(pathlib.Path(root, name))
        sync(pathlib.Path(root))


def checksums(path: pathlib.Path) -> list[int]:
    """CRC-32 of each 16 MB of a file.

    Raises:
        OSError: It cannot be read.
    """

    def of(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(_SUMMED))

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(of, range(0, path.stat().st_size, _SUMMED)))


def read_npz(path: pathlib.Path, most_bytes: float = math.inf) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, without executing anything in it.

    Args:
        path: The file.
        most_bytes: Largest size of all arrays, which compression can hide.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, too large, or holds something else than plain arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > most_bytes:
                raise ValueError("its arrays are too large")
            return {
                name.removesuffix(".npy"): _member(archive, name) for name in archive.namelist()
            }
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
