"""Locks on folders that only one process at a time may write to."""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import BinaryIO

from hypjax.errors import UserError
from hypjax.system import console

_LOCK = ".lock"


@contextlib.contextmanager
def claimed(folder: pathlib.Path, purpose: str) -> Iterator[None]:
    """Locks a folder for this process during the body; waits while another process holds it.

    The operating system releases the lock when the process ends, for whatever reason.

    Args:
        folder: The folder, which is created if it does not exist.
        purpose: What the lock is for, shown while waiting.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.say(f"waiting for {_owner(lock)} ({purpose})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            console.warn(f"{folder} cannot be locked; let no other process write to it")
        _write_owner(lock)
        yield


@contextlib.contextmanager
def claimed_or_refused(folder: pathlib.Path) -> Iterator[None]:
    """Locks a run's folder for this process during the body; does not wait for another process.

    Args:
        folder: The folder, which is created if it does not exist.

    Raises:
        UserError: Another process holds the lock, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a+b", buffering=0)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_owner(lock)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use by {_owner(lock)}; "
                "wait for it to end, or name another folder with --workdir"
            ) from error
        except OSError:
            console.warn(f"{folder} cannot be locked; let no other process write to it")
        yield


def _owner(lock: BinaryIO) -> str:
    """The owner of a lock, for messages."""
    lock.seek(0)
    return lock.read().decode(errors="replace") or "another process"


def _write_owner(lock: BinaryIO) -> None:
    """Writes the owner of a lock into its file."""
    with contextlib.suppress(OSError):  # Only messages read it.
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
