"""Reads an iterable with a time limit for each item."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """The next item did not arrive in time."""


class Deliveries(Generic[T]):
    """The items of an iterable, each of which must arrive within a time limit.

    A separate thread creates the iterator, reads one item ahead, and closes it. If an item never
    arrives or a worker never ends, only that thread is blocked.
    """

    def __init__(self, source: Iterable[T], timeout: float) -> None:
        """Starts reading.

        Args:
            source: An iterable whose iterators have a `close` method.
            timeout: Seconds to wait for an item.
        """
        self._timeout = min(timeout, threading.TIMEOUT_MAX)
        # The interpreter's lock-free queues cost little per item but are unbounded: the thread
        # reads one item per request.
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._delivered: queue.SimpleQueue[tuple[T | None, BaseException | None]]
        self._delivered = queue.SimpleQueue()
        self._requests.put(True)
        arguments = source, self._requests, self._delivered
        self._thread = threading.Thread(target=_deliver, args=arguments, daemon=True)
        self._thread.start()

    def next(self) -> T:
        """Returns the next item.

        Raises:
            Overdue: If it does not arrive in time; no more items can then be requested.
            Exception: Whatever the iterable raises.
        """
        self._requests.put(True)
        try:
            item, error = self._delivered.get(timeout=self._timeout)
        except queue.Empty:
            raise Overdue from None
        if error is not None:
            raise error
        return item

    def close(self, patience: float) -> bool:
        """Asks for the iterator to be closed; returns whether that happens in so many seconds."""
        self._requests.put(False)
        self._thread.join(patience)
        return not self._thread.is_alive()


class ThreadTracker(Generic[T]):
    """A function that remembers which threads of this process have called it."""

    def __init__(self, function: Callable[..., T]) -> None:
        """Starts with no threads."""
        self._function = function
        self._threads: set[threading.Thread] = set()

    def __call__(self, *args: Any) -> T:
        """Calls the function."""
        self._threads.add(threading.current_thread())
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves out the threads, which have no meaning in another process."""
        return ThreadTracker, (self._function,)

    def has_ended(self, patience: float) -> bool:
        """Returns whether all these threads end within so many seconds."""
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _deliver(
    source: Iterable[T],
    requests: "queue.SimpleQueue[bool]",
    delivered: "queue.SimpleQueue[tuple[T | None, BaseException | None]]",
) -> None:
    """Puts an item, or the error that prevents it, into a queue for every request."""
    iterator = None
    try:
        iterator = iter(source)
        while requests.get():
            delivered.put((next(iterator), None))
    except BaseException as error:
        delivered.put((None, error))
    finally:
        if iterator is not None:
            iterator.close()
