"""Locks on folders that only one process at a time may write to.

The operating system releases a lock when its process ends, for whatever reason.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

from hypjax.errors import UserError, writing
from hypjax.system import console


@contextlib.contextmanager
def claimed(folder: pathlib.Path, purpose: str, remedy: str = "") -> Iterator[None]:
    """Locks a folder, which is created; waits for another process, or, with a remedy, refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().decode() or "another process"
            if remedy:
                words = f"{folder} is in use by {owner}; wait for it to end, or {remedy}"
                raise UserError(words) from None
            console.say(f"waiting for {owner} ({purpose})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # Not every file system has locks.
            console.warn(f"{folder} cannot be locked; let no other process write to it")
        lock.truncate(0)  # Only messages read this.
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


@contextlib.contextmanager
def claimed_or_refused(
    folder: pathlib.Path, remedy: str = "name another folder with --workdir"
) -> Iterator[None]:
    """Locks a folder, which is created, during the body; refuses one that a process holds."""
    with contextlib.ExitStack() as stack:
        with writing(folder):
            stack.enter_context(claimed(folder, "", remedy))
        yield
