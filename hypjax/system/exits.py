"""How a process ends: signals deferred until a run can stop."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from hypjax.errors import INTERRUPTED, TRY_AGAIN
from hypjax.system import console

# Exit status after each signal: schedulers send SIGTERM and should rerun the command later.
ENDING = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TRY_AGAIN}


def at_once(status: int) -> NoReturn:
    """Kills the worker processes and exits without waiting; safe in a signal handler."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)


def end_with_parent() -> None:
    """Ends this worker process as soon as its parent ends, which may have been killed.

    Otherwise the workers of a killed run would keep its memory and its devices.
    """

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Interrupt:
    """Whether a signal has arrived, and the exit status for it, or 0."""

    status = 0

    def __call__(self) -> bool:
        """Whether a signal has arrived."""
        return self.status != 0


@contextlib.contextmanager
def deferred(message: str) -> Iterator[Interrupt]:
    """Defers the first SIGINT or SIGTERM during the body; a second one acts at once.

    The message is printed when a signal arrives. Outside the main thread, where Python cannot catch
    signals, nothing is deferred.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(signum: int, frame: object) -> None:
        del frame
        interrupt.status = ENDING[signum]
        restore()
        console.say_here(message)

    previous = {number: signal.signal(number, handle) for number in ENDING}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    try:
        yield interrupt
    finally:
        restore()
