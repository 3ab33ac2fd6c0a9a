"""Waits for what an iterable yields, but not for ever."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """The next item did not come in time."""


class Deliveries(Generic[T]):
    """An iterable's items, each of which is waited for during a limited time.

    A thread of its own makes the iterator, reads it, one item ahead, and closes it, so that nothing
    but this thread is held up by what never comes, be it an item or the end of a worker.
    """

    def __init__(self, source: Iterable[T], timeout: float) -> None:
        """Begins to read.

        Args:
            source: Its iterators have the method `close`.
            timeout: Most seconds to wait for an item.
        """
        self._timeout = min(timeout, threading.TIMEOUT_MAX)
        # The interpreter's lock-free queues, which cost little beside an item, have no bound of
        # their own: the thread reads as often as it is asked to.
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
            Overdue: It did not come in time, and nothing can be asked for any more.
            Exception: What the iterable raises.
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
        """Has the iterator closed, and tells whether it was within so many seconds."""
        self._requests.put(False)
        self._thread.join(patience)
        return not self._thread.is_alive()


class Watched(Generic[T]):
    """A function that remembers the threads of this process that call it."""

    def __init__(self, function: Callable[..., T]) -> None:
        """Has been called by none."""
        self._function = function
        self._threads: set[threading.Thread] = set()

    def __call__(self, *args: Any) -> T:
        """Calls the function."""
        self._threads.add(threading.current_thread())
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is called by others."""
        return Watched, (self._function,)

    def has_ended(self, patience: float) -> bool:
        """Whether these threads end within so many seconds."""
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _deliver(
    source: Iterable[T],
    requests: "queue.SimpleQueue[bool]",
    delivered: "queue.SimpleQueue[tuple[T | None, BaseException | None]]",
) -> None:
    """Puts an item into a queue for every request, or why there is none."""
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
