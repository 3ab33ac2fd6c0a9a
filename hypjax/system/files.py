"""Files: atomic writes, and arrays from untrusted files."""

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

_ABANDONED = 86400  # Seconds after which a killed process has left a temporary file.
_HERE, _EXCHANGE = -100, 2  # Linux's AT_FDCWD and RENAME_EXCHANGE.


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
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(new), os.fsencode(old)
    if exchange is None or exchange(_HERE, names[0], _HERE, names[1], _EXCHANGE):
        # As on macOS and NFS. A kill between these two leaves the old folder as .NAME.previous.
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


def absolute(path: pathlib.Path) -> pathlib.Path:
    """The absolute path without '..'; links are followed only where '..' leads back from one."""
    path = path.absolute()
    if ".." not in path.parts:
        return path
    end = len(path.parts) - path.parts[::-1].index("..")
    return pathlib.Path(*path.parts[:end]).resolve().joinpath(*path.parts[end:])


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 hash of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Not every system syncs folders.
            raise
    finally:
        os.close(descriptor)


def sync_all(path: pathlib.Path) -> None:
    """Waits until a file, or a folder and everything below it, is on the disk."""
    for inner in (*path.rglob("*"), path):
        sync(inner)


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, without executing anything in it.

    Raises an `OSError` if it cannot be read, and a `ValueError` if it holds anything else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name][...]) for name in file}  # Bytes have no [...].
    except OSError:
        raise
    except Exception as error:  # NumPy and zipfile raise almost anything.
        raise ValueError("damaged, or not an .npz file of plain arrays") from error
