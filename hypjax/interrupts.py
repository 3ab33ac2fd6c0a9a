"""Signals to end, from the keyboard or from a scheduler, that wait for a good moment."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from hypjax import reporting

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deferred(message: str) -> Iterator[Callable[[], bool]]:
    """Holds the first SIGINT or SIGTERM back during the body; a second one acts at once.

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

    def hold_back(signum: int, frame: object) -> None:
        del signum, frame
        come.set()
        restore()
        reporting.say(message)

    before = {number: signal.signal(number, hold_back) for number in ENDING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield come.is_set
    finally:
        restore()
