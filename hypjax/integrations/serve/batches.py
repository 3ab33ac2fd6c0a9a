"""Calls a function on all items that wait, so that requests under load share calls."""

import asyncio
import collections
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Calls a function, in a thread of its own, on up to `most` items at a time.

    A lone item is never delayed. Items that come during a call share the next call. If a call
    fails, each of its items is tried alone, so that no item fails because of another.
    """

    def __init__(self, function: Callable[[list[Item]], Iterable[Result]], most: int) -> None:
        self._function, self._most = function, most
        self._waiting: collections.deque[tuple[Item, Future[Result]]] = collections.deque()
        self._thread = ThreadPoolExecutor(1)

    async def __call__(self, item: Item) -> Result:
        """Returns the function's result for an item, or raises its error."""
        future: Future[Result] = Future()
        self._waiting.append((item, future))
        self._thread.submit(self._run)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        """Takes the items that wait; none do if an earlier run, of another item, took them all."""
        count = min(len(self._waiting), self._most)
        batch = [self._waiting.popleft() for _ in range(count)]
        self._answer([pair for pair in batch if pair[1].set_running_or_notify_cancel()])

    def _answer(self, batch: list[tuple[Item, Future[Result]]]) -> None:
        futures = [future for _, future in batch]
        try:
            results = self._function([item for item, _ in batch]) if batch else []
            answers = list(zip(futures, results, strict=True))
        except Exception as error:
            if len(batch) == 1:
                futures[0].set_exception(error)
            else:
                for pair in batch:
                    self._answer([pair])
        else:
            for future, result in answers:
                future.set_result(result)
