"""Ends processes: on signals, on errors in one of several processes, and with their parent."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from hypjax.errors import INTERRUPTED, TRY_AGAIN, Interrupted
from hypjax.system import console

# Schedulers send SIGTERM, and should rerun the command later.
STATUS_OF_SIGNAL = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TRY_AGAIN}
process_index: list[int] = []  # This process's index if a run has several processes, else empty.
_GRACE = 5  # Seconds within which an error that all processes share reaches each of them.


def at_once(status: int) -> NoReturn:
    """Kills this process's workers and exits without waiting; safe in a signal handler."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)


@contextlib.contextmanager
def failing_at_once() -> Iterator[None]:
    """Ends one of a run's processes right after an error, without JAX's exit handler.

    That handler would wait for the other processes, which wait for this one in a collective
    operation. The first process ends last, because JAX aborts all others when it ends.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        status: Any = error.code if isinstance(error, SystemExit) else 1
        # All processes stop together after an interrupt, and the first may still be saving.
        if not process_index or not status or isinstance(error.__context__, Interrupted):
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        if type(error).__name__ == "JaxRuntimeError":  # JAX raises it if another process was lost.
            status = TRY_AGAIN
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        time.sleep(0 if process_index[0] else _GRACE)
        at_once(status)


def end_with_parent() -> None:
    """Ends this worker when its parent is killed: it would occupy memory and devices."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def deferred(message: str) -> Iterator[Callable[[], int]]:
    """Defers the first SIGINT or SIGTERM and prints a message; a second signal acts at once.

    Yields a function that returns the exit status for the deferred signal, or 0 before any signal.
    """
    status = 0

    def handle(signum: int, frame: object) -> None:
        nonlocal status
        status = STATUS_OF_SIGNAL[signal.Signals(signum)]
        restore()
        console.say(message, always=True)

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    # Python delivers signals to the main thread only.
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = STATUS_OF_SIGNAL if in_main_thread else ()
    previous = {signum: signal.signal(signum, handle) for signum in signals}
    try:
        yield lambda: status
    finally:
        restore()
