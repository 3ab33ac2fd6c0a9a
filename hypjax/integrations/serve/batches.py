"""Requests under load share calls."""

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
        self._thread.submit(self._run)  # Finds nothing if an earlier run has taken the item.
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most))]
        self._answer([pair for pair in batch if pair[1].set_running_or_notify_cancel()])

    def _answer(self, batch: list[tuple[Item, Future[Result]]]) -> None:
        try:
            results = self._function([item for item, _ in batch]) if batch else []
            answers = list(zip(batch, results, strict=True))
        except Exception as error:
            for pair in batch:
                self._answer([pair]) if len(batch) > 1 else pair[1].set_exception(error)
        else:
            for (_, future), result in answers:
                future.set_result(result)
