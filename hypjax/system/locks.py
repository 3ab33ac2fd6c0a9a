"""Locks on folders; the operating system releases them when a process ends."""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

from hypjax.errors import UserError, writing
from hypjax.system import console


@contextlib.contextmanager
def locked(
    folder: pathlib.Path, purpose: str = "", remedy: str = "name another folder with --workdir"
) -> Iterator[None]:
    """Creates and locks a folder; waits for another process with a purpose, or else refuses."""
    with contextlib.ExitStack() as stack:
        with contextlib.nullcontext() if purpose else writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".lock").open("a+b", buffering=0))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().decode() or "another process"
                if not purpose:
                    message = f"{folder} is in use by {owner}; wait for it to end, or {remedy}"
                    raise UserError(message) from None
                console.say(f"waiting for {owner} ({purpose})")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # Not every file system has locks.
                console.warn(f"{folder} cannot be locked; let no other process write to it")
            lock.truncate(0)  # Only messages read this.
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
