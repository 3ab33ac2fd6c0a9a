"""Locks on folders that only one process at a time may write to."""

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
_UNLOCKED = "{} cannot be locked; let no other process write to it"


@contextlib.contextmanager
def claimed(folder: pathlib.Path, purpose: str) -> Iterator[None]:
    """Locks a folder for this process during the body; waits while another process holds it.

    The folder is created if it does not exist. The operating system releases the lock when the
    process ends, for whatever reason. If the body fails and leaves nothing in the folder, the lock
    is removed, too, with the folders created here. The purpose is shown while waiting.
    """
    folder = folder.absolute()
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with _waited_for(folder, purpose) as lock:
        _write_owner(lock)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                if os.listdir(folder) == [_LOCK]:
                    (folder / _LOCK).unlink()
                for path in created:
                    path.rmdir()
            raise


def _waited_for(folder: pathlib.Path, purpose: str) -> BinaryIO:
    while True:
        lock = _opened(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.say(f"waiting for {_owner(lock)} ({purpose})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            console.warn(_UNLOCKED.format(folder))
        with contextlib.suppress(FileNotFoundError):  # The process that held it has removed it.
            if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
                return lock
        lock.close()


def _opened(folder: pathlib.Path) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / _LOCK).open("a+b", buffering=0)


@contextlib.contextmanager
def claimed_or_refused(folder: pathlib.Path) -> Iterator[None]:
    """Locks a run's folder, which is created, during the body; does not wait for a process."""
    with writing(folder):
        lock = _opened(folder)
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
            console.warn(_UNLOCKED.format(folder))
        yield


def _owner(lock: BinaryIO) -> str:
    lock.seek(0)
    return lock.read().decode(errors="replace") or "another process"


def _write_owner(lock: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # Only messages read it.
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
