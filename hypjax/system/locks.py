"""Folders that one process at a time writes to."""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import BinaryIO

from hypjax.errors import UserError
from hypjax.system import console

LOCK = ".lock"


@contextlib.contextmanager
def claimed(folder: pathlib.Path, purpose: str) -> Iterator[None]:
    """Makes a folder this process's own during the body, and waits while another has it.

    The operating system ends the claim with the process, however that ends.

    Args:
        folder: It is made where it does not exist.
        purpose: What the processes do there, for the message to one that waits.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            console.say(f"waiting for {lock.read().decode() or 'another process'} ({purpose})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            console.warn(f"{folder} cannot be locked; let no other process write to it")
        _sign(lock)
        yield


def lock_or_refuse(lock: BinaryIO, folder: pathlib.Path) -> None:
    """Locks a run's folder for this process, until the file is closed.

    Args:
        lock: The folder's `LOCK`, opened to append.
        folder: For messages.

    Raises:
        UserError: Another process has it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise UserError(
            f"{folder} is in use by {lock.read().decode() or 'another process'}; "
            "wait for it to end, or name another folder with --workdir"
        ) from error
    except OSError:
        console.warn(f"{folder} cannot be locked; let no other process write to it")
        return
    _sign(lock)


def _sign(lock: BinaryIO) -> None:
    """Says in a lock's file who has it."""
    with contextlib.suppress(OSError):  # Only a message needs it.
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
