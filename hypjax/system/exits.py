"""How a process ends: signals deferred until a run can stop."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from hypjax.errors import INTERRUPTED, TRY_AGAIN, Interrupted
from hypjax.system import console

# Exit status after each signal: schedulers send SIGTERM and should rerun the command later.
ENDING = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TRY_AGAIN}
joined: list[int] = []  # Index of this process, once it is one of several of a run.
_GRACE = 5  # Seconds: an error of all processes reaches each of them within this time.


def at_once(status: int) -> NoReturn:
    """Kills the worker processes and exits without waiting; safe in a signal handler."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)


@contextlib.contextmanager
def failing_at_once() -> Iterator[None]:
    """Ends one of several processes right after an error; JAX aborts the others.

    JAX's exit handler would wait for them, and they for this one in a collective operation. The
    first process ends last, since JAX then aborts all others.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        status = error.code if isinstance(error, SystemExit) else 1
        # All processes have agreed on an interrupt, and the first may still be saving.
        if not joined or not status or isinstance(error.__context__, Interrupted):
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        if type(error).__name__ == "JaxRuntimeError":  # As if another process was lost.
            status = TRY_AGAIN
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        time.sleep(0 if joined[0] else _GRACE)
        at_once(status)


def end_with_parent() -> None:
    """Ends this worker when its parent is killed, whose memory and devices it would hold."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def deferred(message: str) -> Iterator[Callable[[], int]]:
    """Defers the first SIGINT or SIGTERM, with a message; a second one acts at once.

    Yields a function that returns the exit status for the signal, or 0 while there is none.
    """
    status = 0

    def handle(signum: int, frame: object) -> None:
        nonlocal status
        status = ENDING[signum]
        restore()
        console.say(message, always=True)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    main = threading.current_thread() is threading.main_thread()  # Others catch no signals.
    previous = {number: signal.signal(number, handle) for number in ENDING if main}
    try:
        yield lambda: status
    finally:
        restore()
