"""The end of a process in which something may never end by itself."""

import multiprocessing
import os
import threading
from typing import NoReturn

_endless = threading.Event()


def expect_none() -> None:
    """Notes that a thread or a worker of this process may never end.

    Python waits for them at its exit; commands do not, once this was called.
    """
    _endless.set()


def is_expected() -> bool:
    """Whether all that was begun will end."""
    return not _endless.is_set()


def at_once(status: int) -> NoReturn:
    """Ends the process and its workers, without waiting for any; also from a signal's handler."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)
