"""Exits of a process whose threads or workers may never end."""

import multiprocessing
import os
import threading
from typing import NoReturn

_stuck = threading.Event()


def mark_stuck() -> None:
    """Records that a thread or worker of this process may never end.

    Python waits for all of them when it exits; after this call, commands do not.
    """
    _stuck.set()


def is_stuck() -> bool:
    """Whether a thread or worker of this process may never end."""
    return _stuck.is_set()


def at_once(status: int) -> NoReturn:
    """Kills the worker processes and exits without waiting; safe in a signal handler."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)


def end_with_parent() -> None:
    """Ends this worker process as soon as its parent ends, which may have been killed."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
