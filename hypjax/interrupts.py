"""An interrupt from the keyboard that waits for a good moment."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from hypjax import reporting


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Lets processes that are started in the body ignore interrupts from the keyboard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def deferred(message: str) -> Iterator[Callable[[], bool]]:
    """Holds the first interrupt back during the body; a second one acts at once.

    Outside the main thread, where signals cannot be caught, nothing is held back.

    Args:
        message: What to say when an interrupt comes.

    Yields:
        A function that tells whether one has come.
    """
    come = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield come.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def hold_back(signum: int, frame: object) -> None:
        del signum, frame
        come.set()
        signal.signal(signal.SIGINT, before)
        reporting.say(message)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield come.is_set
    finally:
        signal.signal(signal.SIGINT, before)
