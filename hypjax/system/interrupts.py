"""Signals to end, from the keyboard or from a scheduler, that wait for a good moment."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from hypjax.errors import INTERRUPTED, TRY_AGAIN
from hypjax.system import console

# The status after each: schedulers, which send SIGTERM, are to try again later.
ENDING = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TRY_AGAIN}


class Interrupt:
    """Whether a signal to end has come.

    Attributes:
        status: With which to end after it; 0: none has come.
    """

    def __init__(self) -> None:
        """None has come yet."""
        self._come = threading.Event()
        self.status = 0

    def __call__(self) -> bool:
        """Whether one has come."""
        return self._come.is_set()

    def come(self, signum: int) -> None:
        """Notes that one has."""
        self.status = ENDING[signum]
        self._come.set()


@contextlib.contextmanager
def deferred(message: str) -> Iterator[Interrupt]:
    """Holds the first SIGINT or SIGTERM back during the body; a second one acts at once.

    Outside the main thread, where signals cannot be caught, nothing is held back.

    Args:
        message: What to say when an interrupt comes.

    Yields:
        What tells whether one has come.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def hold_back(signum: int, frame: object) -> None:
        del frame
        interrupt.come(signum)
        restore()
        console.say_here(message)

    before = {number: signal.signal(number, hold_back) for number in ENDING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield interrupt
    finally:
        restore()
