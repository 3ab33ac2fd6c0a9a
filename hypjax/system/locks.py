"""Locks on folders that only one process at a time may write to.

The operating system releases a lock when its process ends, for whatever reason.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import BinaryIO

from hypjax.errors import UserError, writing
from hypjax.system import console

_LOCK = ".lock"


@contextlib.contextmanager
def claimed(folder: pathlib.Path, purpose: str) -> Iterator[None]:
    """Locks a folder, which is created, during the body; waits while another process holds it.

    The purpose is shown while waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+b", buffering=0) as lock:
        if not _locks(lock, folder):
            console.say(f"waiting for {_owner(lock)} ({purpose})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        _write_owner(lock)
        yield


@contextlib.contextmanager
def claimed_or_refused(
    folder: pathlib.Path, remedy: str = "name another folder with --workdir"
) -> Iterator[None]:
    """Locks a folder, which is created, during the body; refuses one that a process holds."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a+b", buffering=0)
    with lock:
        if not _locks(lock, folder):
            raise UserError(
                f"{folder} is in use by {_owner(lock)}; wait for it to end, or {remedy}"
            )
        _write_owner(lock)
        yield


def _locks(lock: BinaryIO, folder: pathlib.Path) -> bool:
    """Whether a lock could be taken; on a file system without locks, a warning says so."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        console.warn(f"{folder} cannot be locked; let no other process write to it")
    return True


def _owner(lock: BinaryIO) -> str:
    lock.seek(0)
    return lock.read().decode(errors="replace") or "another process"


def _write_owner(lock: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # Only messages read it.
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
