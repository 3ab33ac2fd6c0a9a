"""Files: writes that survive a power failure, and arrays of files that anyone may have made."""

import errno
import json
import os
import pathlib
from typing import Any

import numpy as np


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file atomically: it appears complete or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # Without this, a power failure may leave an empty file.
    unfinished.replace(path)
    sync(path.parent)


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


def sync_all(folder: pathlib.Path) -> None:
    """Waits until a folder and everything below it is on the disk."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(pathlib.Path(root, name))
        sync(pathlib.Path(root))


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, without executing anything in it.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, or holds something else than plain arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError:
        raise
    # NumPy and zipfile raise almost anything: for encrypted members, for shapes beyond the memory,
    # and for damaged headers.
    except Exception as error:
        raise ValueError("damaged, or not an .npz file of plain arrays") from error
