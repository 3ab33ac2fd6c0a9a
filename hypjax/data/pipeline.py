"""Input: carries plans out in worker threads or processes, ahead of the training step.

Workers are given pieces of batches, so that the first batch comes soon and little memory holds what
is ahead, however many they are. They deliver pixels alone: labels and flips are in the plan.
"""

import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import flags
from jaxtyping import UInt8

from hypjax.data import pixels
from hypjax.data.dataset import Dataset
from hypjax.data.plans import Plan
from hypjax.data.timeouts import Deliveries, Overdue, Watched
from hypjax.errors import StalledError, UserError
from hypjax.system import exits, interrupts
from hypjax.system.cores import usable_cores
from hypjax.types import Batch, View, Workers

_THREADS = Workers()
_PIECE = 32  # Images.
_AHEAD = 256  # Images that threads, or each process, prepare before they are asked for.
_NAMED = 6  # Most images that a message names.
_GLANCE = 2  # Seconds between looks whether the parent lives.
_BLINK = 0.2  # Seconds between looks whether workers have ended.
_PATIENCE = 30  # Seconds to wait for worker processes to end; Grain kills them after 25.
_PATIENCE_WITH_THREADS = 2  # The same for threads; Python waits for them at its end.
_PATIENCE_FOR_MEMORY = 2  # Seconds to wait until what was shared is freed.
_INSTANT = 0.001  # Seconds between looks whether it is.
_MOST_THREADS = 8  # The interpreter's lock leaves no work for more.


class ReadableBatch(NamedTuple):
    """Views of images, or a piece of it, of which some may be broken.

    Attributes:
        images: Black where there is none.
        broken: {place in the batch: reason}, both as texts.
    """

    images: UInt8[np.ndarray, "batch side side channels"]
    broken: dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class _KeptPlans:
    """Plans, of which the latest are kept, since each serves several pieces."""

    plan: Callable[[int], Plan]

    def __call__(self, step: int) -> Plan:
        return self._kept(step)

    @functools.cached_property
    def _kept(self) -> Callable[[int], Plan]:
        return functools.lru_cache(maxsize=16)(self.plan)

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes, which keep their own."""
        return {name: value for name, value in vars(self).items() if name != "_kept"}


@dataclasses.dataclass(frozen=True, eq=False)
class _PlannedViews:
    """The crops that a step's plan wants in some rows of the batch, black ones after the last."""

    dataset: Dataset
    plan: Callable[[int], Plan]
    rows: range
    view: View

    def __call__(self, step: int, places: range) -> ReadableBatch:
        plan = self.plan(step)
        images = _black(self.view, len(places))
        for image, place in zip(images, places, strict=True):
            if (i := self.rows[place]) >= len(plan.ids):
                break
            image_id, box = int(plan.ids[i]), plan.boxes[i]
            image[...] = self.dataset.crop(image_id, box, self.view.side, self.view.channels)
        return ReadableBatch(images, {})

    def names(self, step: int, places: range) -> str:
        first = self.rows.start
        ids = self.plan(step).ids[first + places.start : first + places.stop]
        return f"step {step + 1}, {_list(self.dataset, ids)}"


@dataclasses.dataclass(frozen=True, eq=False)
class _CentralViews:
    """The test views of the images in some rows of a batch, the last batch padded.

    Where broken images are tolerated, these are black, and told by their places and reasons.
    """

    dataset: Dataset
    rows: range
    view: View
    batch_size: int
    tolerant: bool = False

    def __call__(self, batch: int, places: range) -> ReadableBatch:
        images = _black(self.view, len(places))
        broken = {}
        for image, place in zip(images, places, strict=True):
            if (i := batch * self.batch_size + self.rows[place]) >= len(self.dataset):
                break
            try:
                image[...] = self.dataset.central_view(i, self.view)
            except UserError as error:
                if not self.tolerant:
                    raise
                broken[str(place)] = pixels.reason(error.__cause__)
        return ReadableBatch(images, broken)

    def names(self, batch: int, places: range) -> str:
        first = batch * self.batch_size + self.rows.start
        ids = range(first + places.start, min(first + places.stop, len(self.dataset)))
        return f"an evaluation, {_list(self.dataset, ids)}"


def _black(view: View, count: int) -> UInt8[np.ndarray, "count side side channels"]:
    return np.zeros((count, view.side, view.side, view.channels), np.uint8)


def training_batches(
    dataset: Dataset,
    plan: Callable[[int], Plan],
    steps: range,
    view: View,
    workers: Workers = _THREADS,
    rows: range | None = None,
) -> Generator[Batch, None, None]:
    """Yields the batches of some steps, prepared ahead of their use.

    Images and flips are those of some rows of a batch, labels and ids those of all. Close it to end
    what prepares them.

    Args:
        dataset: The training set.
        plan: Which images, and which boxes of them, a step wants.
        steps: Steps to yield, counted from 0; a resumed run continues with the same pixels.
        view: Size of the images.
        workers: What decodes them.
        rows: Which images of each batch to deliver, black ones after its last; None: all.

    Raises:
        UserError: An image cannot be read, or a worker process died; the message tells its images.
        StalledError: A piece of a batch did not come in time.
    """
    plan = _KeptPlans(plan)
    if not steps:
        return
    rows = range(len(plan(steps.start).ids)) if rows is None else rows
    views = _PlannedViews(dataset, plan, rows, view)
    batches = _iterate(views, steps, len(rows), workers)
    with contextlib.closing(batches):
        for step, (images, _) in zip(steps, batches, strict=True):
            ids, labels, _, flips = plan(step)
            own = np.zeros(len(rows), bool)
            own[: max(len(flips) - rows.start, 0)] = flips[rows.start : rows.stop]
            yield Batch(images=images, labels=labels, ids=ids, flips=own)


def evaluation_batches(
    dataset: Dataset,
    view: View,
    batch_size: int,
    workers: Workers = _THREADS,
    rows: range | None = None,
) -> Generator[UInt8[np.ndarray, "rows side side channels"], None, None]:
    """Yields the test views of all images in order, the last batch filled up with black ones.

    Close it to end what prepares them.

    Args:
        dataset: What to embed.
        view: The test view.
        batch_size: The same for all batches, so that one compilation serves.
        workers: What decodes images.
        rows: Which images of each batch to deliver; None: all.

    Raises:
        UserError: An image cannot be read, or a worker process died; the message tells its images.
        StalledError: A piece of a batch did not come in time.
    """
    rows = range(batch_size) if rows is None else rows
    views = _CentralViews(dataset, rows, view, batch_size)
    numbers = range(-(-len(dataset) // batch_size))
    batches = _iterate(views, numbers, len(rows), workers)
    with contextlib.closing(batches):
        for images, _ in batches:
            yield images


def readable_batches(
    dataset: Dataset, view: View, batch_size: int, workers: Workers = _THREADS
) -> Generator[ReadableBatch, None, None]:
    """Yields what `evaluation_batches` does, beside the images that could not be read."""
    views = _CentralViews(dataset, range(batch_size), view, batch_size, tolerant=True)
    numbers = range(-(-len(dataset) // batch_size))
    return _iterate(views, numbers, batch_size, workers)


def _iterate(
    views: _PlannedViews | _CentralViews, batches: range, size: int, workers: Workers
) -> Generator[ReadableBatch, None, None]:
    """Yields batches of the given size, whose pieces workers prepare."""
    pieces = [range(i, min(i + _PIECE, size)) for i in range(0, size, _PIECE)]
    log = _WorkLog(workers.count)
    work = Watched(functools.partial(_make, views, batches, pieces))
    others = multiprocessing.active_children()
    shared: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
    prepared = _prepared(work, len(batches) * len(pieces), workers.count, log, shared)
    deliveries = Deliveries(prepared, workers.timeout)
    stalled = False
    try:
        for number in range(len(batches)):
            images, broken = None, {}
            for i, piece in enumerate(pieces, start=number * len(pieces)):
                try:
                    delivered = deliveries.next()
                except (RuntimeError, Overdue) as error:
                    at, part = divmod(log.latest(of=i), len(pieces))
                    names = views.names(batches[at], pieces[part])
                    stalled = isinstance(error, Overdue)
                    raise _explained(error, names, workers.timeout) from error
                if images is None:
                    images = np.empty((size, *delivered.images.shape[1:]), np.uint8)
                images[piece.start : piece.stop] = delivered.images
                broken |= delivered.broken
                del delivered  # Its shared memory can go.
            yield ReadableBatch(images, broken)
    finally:
        patience = _PATIENCE if workers.count else 0 if stalled else _PATIENCE_WITH_THREADS
        ended = _close(deliveries, patience, others if stalled else None)
        if not ended or not work.has_ended(patience):
            exits.mark_stuck()
        log.close()
        if workers.count:
            del deliveries
            gc.collect()  # Gives up what is left in shared memory ...
            deadline = time.monotonic() + _PATIENCE_FOR_MEMORY
            while shared and time.monotonic() < deadline:  # ... which a thread of Grain's frees.
                time.sleep(_INSTANT)


class _WorkLog:
    """A small file in which worker processes note what they are about, should one of them die."""

    _slots: np.memmap | None = None  # In a worker process, its own place.

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._file = tempfile.NamedTemporaryFile()
        self._file.write(np.full(workers, -1, np.int64).tobytes())
        self._file.flush()
        self.path = self._file.name

    def latest(self, of: int) -> int:
        """What the worker has begun last from which piece `of` is awaited."""
        if not self._workers:
            return of
        noted = np.fromfile(self.path, np.int64)
        return max(int(noted[of % self._workers]), of)  # Workers take pieces in turn.

    def close(self) -> None:
        self._file.close()

    @classmethod
    def open(cls, path: str, worker: int) -> None:
        """Opens a worker's place."""
        cls._slots = np.memmap(path, np.int64, mode="r+")[worker : worker + 1]

    @classmethod
    def note(cls, piece: int) -> None:
        """Notes what is begun; threads need not."""
        if cls._slots is not None:
            cls._slots[0] = piece


def _make(
    views: _PlannedViews | _CentralViews, batches: range, pieces: list[range], i: int
) -> ReadableBatch:
    """Makes a piece, of which `i` counts those of all batches."""
    _WorkLog.note(int(i))
    batch, piece = divmod(int(i), len(pieces))
    return views(batches[batch], pieces[piece])


def _prepared(
    make: Callable[[int], ReadableBatch],
    count: int,
    workers: int,
    log: _WorkLog,
    shared: "weakref.WeakSet[SharedMemory]",
) -> grain.IterDataset:
    """What is made of the numbers from 0 up to a count, in order; notes what memory is shared."""
    dataset = grain.MapDataset.range(count).map(make)
    ahead = _AHEAD // _PIECE
    if not workers:
        threads = min(_MOST_THREADS, usable_cores())
        return dataset.to_iter_dataset(grain.ReadOptions(threads, max(ahead, threads)))
    if not flags.FLAGS.is_parsed():  # In notebooks; Grain's workers read absl's flags.
        flags.FLAGS.mark_as_parsed()
    # One piece at a time, so that a worker that dies tells which it was about.
    one = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
    start = functools.partial(_start_worker, log.path, os.getpid())

    def noted(piece: ReadableBatch) -> ReadableBatch:
        if (memory := getattr(piece.images, "shm", None)) is not None:  # Grain may send it whole.
            shared.add(memory)
        return piece

    return one.mp_prefetch(options, worker_init_fn=start).map(noted)


def _close(
    deliveries: Deliveries[ReadableBatch],
    patience: float,
    others: list[multiprocessing.Process] | None,
) -> bool:
    """Closes an iterator, and tells whether it was within so many seconds.

    Kills meanwhile, if other children are named, those that are not among them: Grain would wait
    for a worker that is stuck, and starts workers one after the other.
    """
    deadline = time.monotonic() + patience
    while True:
        ended = deliveries.close(min(patience, _BLINK))
        if others is not None:
            for child in set(multiprocessing.active_children()) - set(others):
                child.kill()
                ended = False
        if ended or time.monotonic() >= deadline:
            return ended


def _explained(error: RuntimeError | Overdue, names: str, timeout: float) -> Exception:
    """Tells what was awaited in vain, or a worker that died was about; others stay as they are."""
    if isinstance(error, Overdue):
        return StalledError(
            f"waited {timeout:g} seconds in vain for {names}; see whether their storage can be "
            "reached, or wait longer with --config.run.input_timeout"
        )
    exit_code = re.search(r"exit code (-?\d+)", str(error))
    if exit_code is None:
        return error
    return UserError(
        f"a worker process died (exit code {exit_code.group(1)}) while it prepared "
        f"{names}; if memory ran out, lower --config.run.workers"
    )


def _list(dataset: Dataset, ids: Iterable[int]) -> str:
    """Names of images, the first and the last of many."""
    names = [dataset.name(int(i)) for i in ids]
    if len(names) > _NAMED:
        names = [*names[: _NAMED - 1], "...", names[-1]]
    return f"images {', '.join(names)}"


def _start_worker(log: str, parent: int, index: int, count: int) -> None:
    """Leaves signals, which terminals send to all processes, to the parent, and ends with it."""
    del count
    for number in interrupts.ENDING:
        signal.signal(number, signal.SIG_IGN)
    _WorkLog.open(log, index)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(_GLANCE)
    os._exit(1)
