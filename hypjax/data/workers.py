"""Workers: threads or processes of Grain that prepare batches piece by piece.

Pieces are smaller than batches, so that the first batch arrives soon and little memory is needed
for what is prepared ahead, however many workers there are.
"""

import contextlib
import functools
import gc
import multiprocessing
import queue
import re
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np
from absl import flags
from grain.multiprocessing import SharedMemoryArray
from jaxtyping import UInt8

from hypjax.errors import StalledError, UserError
from hypjax.system import exits
from hypjax.system.machine import usable_cores
from hypjax.types import Workers

_PIECE = 32  # Images.
_AHEAD = 256  # Images that all threads together, or each process, prepare ahead.
_MAX_THREADS = 8  # More gain nothing because of the interpreter's lock.
_END_CHECK = 0.2  # Seconds between checks that workers have ended.
_PROCESS_PATIENCE = 30  # Seconds to wait for worker processes to end; Grain kills them after 25.
_THREAD_PATIENCE = 2  # Seconds to wait for threads to end; Python waits for them at exit.
_MEMORY_PATIENCE = 30  # Seconds to wait until shared memory is freed.


class ReadableBatch(NamedTuple):
    """Views of images, some of which may be broken, for a batch or a piece of one."""

    images: UInt8[np.ndarray, "batch side side channels"]  # Black for broken images and padding.
    broken: dict[str, str]  # Reasons by place in the batch.


class Views(Protocol):
    """Prepares pieces of batches; must be picklable."""

    def __call__(self, batch: int, piece: range) -> ReadableBatch:
        """Returns the images at the given places of a batch."""

    def describe(self, batch: int, piece: range) -> str:
        """Names these images for a message."""


def assemble_batches(
    views: Views, batches: range, size: int, workers: Workers
) -> Generator[ReadableBatch, None, None]:
    """Yields batches of so many images, whose pieces workers prepare.

    Close the generator to end the workers. Raises UserError if an image cannot be read or a worker
    process dies, and StalledError if a piece does not arrive in time; the message names the images.
    """
    pieces = _Pieces(views, batches, size)
    log = _ProgressLog(workers.count)
    # Children that are there before the workers start must survive when stuck workers are killed.
    other_children = multiprocessing.active_children()
    deliveries = _Deliveries(_start_workers(pieces, workers.count, log), workers.timeout)
    numbers = iter(range(len(pieces)))
    stalled = False
    try:
        for _ in batches:
            images, broken = None, {}
            for places in pieces.places:
                i = next(numbers)
                try:
                    delivered = deliveries.next()
                except (RuntimeError, queue.Empty) as error:
                    stalled = isinstance(error, queue.Empty)
                    names = pieces.describe(log.latest(i))
                    raise _explain(error, names, workers.timeout) from error
                if images is None:
                    images = np.empty((size, *delivered.images.shape[1:]), np.uint8)
                images[places.start : places.stop] = delivered.images
                broken |= delivered.broken
                del delivered  # While it is referred to, its shared memory cannot be freed.
            yield ReadableBatch(images, broken)
    finally:
        # Threads that hang in a read can be neither waited for nor killed: after a stall they are
        # left behind, and the program's exit is told not to wait for them.
        patience = _PROCESS_PATIENCE if workers.count else 0 if stalled else _THREAD_PATIENCE
        ended = _close(deliveries, patience, other_children if stalled else None)
        if not ended or not pieces.left_alone(patience):
            exits.stuck.set()
        log.close()
        # Grain frees shared memory in a thread, in order, also that of pieces which it has prepared
        # and never delivered. A program that ended before that would leave it allocated.
        freeing = getattr(SharedMemoryArray, "_del_thread_pool", None)
        if workers.count and freeing is not None:
            del deliveries
            gc.collect()
            with contextlib.suppress(ValueError):  # The interpreter is ending.
                freeing.apply_async(int).wait(_MEMORY_PATIENCE)


class _Pieces:
    """Prepares the pieces of all batches by number, and knows which threads have done so."""

    def __init__(self, views: Views, batches: range, size: int) -> None:
        self._views, self._batches, self._size = views, batches, size
        self.places = [range(i, min(i + _PIECE, size)) for i in range(0, size, _PIECE)]
        self._threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return len(self._batches) * len(self.places)

    def __call__(self, i: int) -> ReadableBatch:
        self._threads.add(threading.current_thread())
        _ProgressLog.note(int(i))
        return self._views(*self._locate(i))

    def describe(self, i: int) -> str:
        """Names the images of a piece."""
        return self._views.describe(*self._locate(i))

    def _locate(self, i: int) -> tuple[int, range]:
        """Returns a piece's batch, and its places there."""
        batch, piece = divmod(int(i), len(self.places))
        return self._batches[batch], self.places[piece]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves out the threads, which have no meaning in a worker process."""
        return _Pieces, (self._views, self._batches, self._size)

    def left_alone(self, patience: float) -> bool:
        """Returns whether all threads that prepared pieces end within so many seconds."""
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class _ProgressLog:
    """A small file in which each worker process notes its current piece, in case it dies."""

    _slot: np.memmap | None = None  # In a worker process, its place in the file.

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._file = tempfile.NamedTemporaryFile()
        self._file.write(np.full(workers, -1, np.int64).tobytes())
        self._file.flush()
        self.path = self._file.name

    def latest(self, awaited: int) -> int:
        """Returns the latest piece begun by the worker that the awaited piece belongs to."""
        if not self._workers:
            return awaited
        noted = np.fromfile(self.path, np.int64)
        return max(int(noted[awaited % self._workers]), awaited)  # Workers take pieces in turn.

    def close(self) -> None:
        self._file.close()

    @classmethod
    def open(cls, path: str, worker: int) -> None:
        """Opens a worker's place in the file, in the worker process."""
        cls._slot = np.memmap(path, np.int64, mode="r+")[worker : worker + 1]

    @classmethod
    def note(cls, piece: int) -> None:
        """Notes the piece that is begun; does nothing in threads of the main process."""
        if cls._slot is not None:
            cls._slot[0] = piece


def _start_workers(pieces: _Pieces, workers: int, log: _ProgressLog) -> grain.IterDataset:
    """Returns the pieces in order, as worker processes prepare them, or threads if there are 0."""
    dataset = grain.MapDataset.range(len(pieces)).map(pieces)
    ahead = _AHEAD // _PIECE
    if not workers:
        threads = min(_MAX_THREADS, usable_cores())
        return dataset.to_iter_dataset(grain.ReadOptions(threads, max(ahead, threads)))
    if not flags.FLAGS.is_parsed():  # In notebooks; Grain's workers read absl's flags.
        flags.FLAGS.mark_as_parsed()
    # One piece at a time, so that the log of a worker that dies is exact.
    sequential = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
    start = functools.partial(_start_worker, log.path)
    return sequential.mp_prefetch(options, worker_init_fn=start)


def _start_worker(log: str, index: int, count: int) -> None:
    """Prepares a worker process: it ignores signals, and ends when its parent does."""
    del count
    exits.end_with_parent()
    # Terminals send signals to all processes; the parent alone decides what to do.
    for number in exits.ENDING:
        signal.signal(number, signal.SIG_IGN)
    _ProgressLog.open(log, index)


class _Deliveries:
    """The items of an iterable, each of which must arrive within a time limit.

    A separate thread creates the iterator, reads one item ahead, and closes it. If an item never
    arrives or a worker never ends, as with storage that hangs, only that thread is blocked.
    """

    def __init__(self, source: Iterable[ReadableBatch], timeout: float) -> None:
        self._timeout = min(timeout, threading.TIMEOUT_MAX)
        # The interpreter's lock-free queues cost little per item but are unbounded: the thread
        # reads one item per request.
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._delivered: queue.SimpleQueue[tuple[ReadableBatch | None, BaseException | None]]
        self._delivered = queue.SimpleQueue()
        self._requests.put(True)
        # The thread does not refer to this object, so that without it the queue's items are freed.
        arguments = source, self._requests, self._delivered
        self._thread = threading.Thread(target=_deliver, args=arguments, daemon=True)
        self._thread.start()

    def next(self) -> ReadableBatch:
        """Returns the next item, or raises what the iterable raises.

        If it does not arrive in time, raises queue.Empty; no more items can then be requested.
        """
        self._requests.put(True)
        item, error = self._delivered.get(timeout=self._timeout)
        if error is not None:
            raise error
        return item

    def close(self, patience: float) -> bool:
        """Asks for the iterator to be closed; returns whether that happens in so many seconds."""
        self._requests.put(False)
        self._thread.join(patience)
        return not self._thread.is_alive()


def _deliver(
    source: Iterable[ReadableBatch], requests: queue.SimpleQueue, delivered: queue.SimpleQueue
) -> None:
    """Answers each request with the next item of the source, or with the error that it raises."""
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


def _close(
    deliveries: _Deliveries, patience: float, survivors: list[multiprocessing.Process] | None
) -> bool:
    """Closes an iterator, and returns whether it closed in so many seconds.

    If survivors are given, all other child processes are killed while waiting.
    """
    deadline = time.monotonic() + patience
    while True:
        ended = deliveries.close(min(patience, _END_CHECK))
        if survivors is not None:
            # Grain would wait for a stuck worker, and it starts workers one after the other.
            for child in set(multiprocessing.active_children()) - set(survivors):
                child.kill()
                ended = False
        if ended or time.monotonic() >= deadline:
            return ended


def _explain(error: RuntimeError | queue.Empty, names: str, timeout: float) -> Exception:
    """Returns an error that names the images of a stall or a dead worker; others unchanged."""
    if isinstance(error, queue.Empty):
        return StalledError(
            f"waited {timeout:g} seconds in vain for {names}; check that their storage can be "
            "reached, or wait longer with --config.run.input_timeout"
        )
    exit_code = re.search(r"exit code (-?\d+)", str(error))
    if exit_code is None:
        return error
    return UserError(
        f"a worker process died (exit code {exit_code.group(1)}) while it prepared "
        f"{names}; if memory ran out, lower --config.run.workers"
    )
