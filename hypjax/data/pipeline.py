"""Input batches: Grain's threads or processes prepare pixels ahead of the training step.

Pixels arrive in pieces smaller than batches, so that the first batch is ready soon and prefetching
needs little memory. Labels and flips are already in the plan.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import signal
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import numpy as np
from absl import flags
from jaxtyping import Int, UInt8

from hypjax.data.dataset import Dataset
from hypjax.data.plans import Plan, padded_rows
from hypjax.errors import UserError, reason
from hypjax.system import console, exits
from hypjax.system.machine import usable_cores
from hypjax.types import Batch, Frame, View

if TYPE_CHECKING:
    import grain

_PIECE_SIZE = 32  # Images.
_AHEAD = 8  # Pieces that all threads together, or each process, prepare ahead.
_MAX_THREADS = 8  # More gain nothing because of the interpreter's lock.
_NO_SHARED_MEMORY = 2**62  # Bytes from which Grain would pass an array in shared memory.
_DARK = 18  # Of 255. 12 bits reach 15 in a file of 16, which the bicubic filter exceeds by a few.
_warn_once = functools.lru_cache(console.warn)  # A run reads its test images at each evaluation.

Pixels = UInt8[np.ndarray, "side side channels"]
# Views of a batch's images, black for broken images and padding; by row, why images are broken.
ReadableBatch = tuple[UInt8[np.ndarray, "batch side side channels"], dict[int, str]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Pieces:
    """Reads pieces, which are numbered across batches; picklable, for worker processes."""

    # Reads the image of a batch and a row; returns None beyond the batch's end.
    read_image: Callable[[int, int], Pixels | None]
    batches: range
    rows: range  # Rows of each batch that are delivered.
    view: View
    tolerant: bool  # Whether unreadable images are reported as broken instead of raising.

    @property
    def per_batch(self) -> int:
        return math.ceil(len(self.rows) / _PIECE_SIZE)

    def __call__(self, number: int) -> list[Pixels | str | None]:
        """Reads a piece: for each image its pixels, why it is broken, or None for padding."""
        batch_index, piece = divmod(int(number), self.per_batch)
        images: list[Pixels | str | None] = []
        for row in self.rows[piece * _PIECE_SIZE : (piece + 1) * _PIECE_SIZE]:
            try:
                images.append(self.read_image(self.batches[batch_index], row))
            except UserError as error:
                if not self.tolerant:
                    raise
                images.append(reason(error.__cause__ or error))
        return images

    def assembled(self, workers: int) -> Generator[ReadableBatch, None, None]:
        """Yields batches whose pieces are read by worker processes, or by threads if 0."""
        pieces = iter(_prefetched(self, workers))
        shape = len(self.rows), self.view.side, self.view.side, self.view.channels
        try:
            for _ in self.batches:
                views, broken = np.zeros(shape, np.uint8), {}
                images = itertools.chain.from_iterable(itertools.islice(pieces, self.per_batch))
                # Strict, because a missing image would be taken for a black one.
                for row, image in zip(range(len(self.rows)), images, strict=True):
                    if isinstance(image, str):
                        broken[row] = image
                    elif image is not None:
                        views[row] = image
                yield views, broken
        except RuntimeError as error:
            if "exit code" not in str(error):  # Grain reports the exit code of a dead worker.
                raise
            cause = str(error).partition(". ")[0]
            remedy = "if memory ran out, lower --config.run.workers"
            raise UserError(f"a worker process died: {cause}; {remedy}") from error
        finally:
            pieces.close()


def _prefetched(pieces: _Pieces, workers: int) -> "grain.IterDataset | Generator":
    """Prefetches the pieces, in order, by worker processes, or by threads if 0."""
    count = len(pieces.batches) * pieces.per_batch
    if count == 1 and not workers:  # Such as a query, which would take less time than the import.
        return (pieces(number) for number in range(count))
    import grain

    dataset = grain.MapDataset.range(count).map(pieces)
    if not workers:
        return dataset.to_iter_dataset(grain.ReadOptions(min(_MAX_THREADS, usable_cores()), _AHEAD))
    if not flags.FLAGS.is_parsed():  # In notebooks; Grain's workers read absl's flags.
        flags.FLAGS.mark_as_parsed()
    sequential = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    # Pieces are copied through pipes. Shared memory, which Grain frees in a thread, is reported as
    # leaked if a program ends soon afterwards, and containers have little of it.
    through_pipes = grain.experimental.DatasetOptions(min_shm_size=_NO_SHARED_MEMORY)
    sequential = grain.experimental.WithOptionsIterDataset(sequential, through_pipes)
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=_AHEAD)
    return sequential.mp_prefetch(options, worker_init_fn=_start_worker)


def _start_worker(index: int, count: int) -> None:
    """Makes a worker process ignore signals, and end when its parent does."""
    exits.end_with_parent()
    # Terminals send signals to all processes, but only the parent handles them.
    for signal_number in exits.STATUS_OF_SIGNAL:
        signal.signal(signal_number, signal.SIG_IGN)


@functools.lru_cache(maxsize=16)
def _planned(plans: Callable[[int], Plan], step: int) -> Plan:  # All pieces of a batch share it.
    return plans(step)


def _planned_crop(
    dataset: Dataset, plans: Callable[[int], Plan], view: View, step: int, row: int
) -> Pixels | None:
    plan = _planned(plans, step)
    if row >= len(plan.ids):
        return None
    frame = Frame(tuple(plan.sizes[row].tolist()), tuple(plan.boxes[row].tolist()))
    return dataset.crop(int(plan.ids[row]), frame, view.side, view.channels)


def _test_view(
    dataset: Dataset, view: View, batch_size: int, batch_index: int, row: int
) -> Pixels | None:
    i = batch_index * batch_size + row
    return dataset.test_view(i, view) if i < len(dataset) else None


def training_batches(
    dataset: Dataset,
    plans: Callable[[int], Plan],
    steps: range,
    view: View,
    workers: int = 0,
    rows: range | None = None,
) -> Generator[Batch, None, None]:
    """Yields the batches of the given steps, counted from 0, prefetched.

    Pixels and flips cover the given rows of a batch (default: all), padded with black images beyond
    its end; labels and ids cover the full batch. Close the generator to end the workers.
    """
    # A plan depends only on (seed, step), here and in each worker. So pixels depend neither on the
    # process that prepares them nor on the step at which a run was resumed.
    if not steps:
        return
    rows = range(len(_planned(plans, steps.start).ids)) if rows is None else rows
    read_image = functools.partial(_planned_crop, dataset, plans, view)
    pieces = _Pieces(read_image, steps, rows, view, tolerant=False)
    with contextlib.closing(pieces.assembled(workers)) as batches:
        for step, (images, _) in zip(steps, batches, strict=True):
            yield _planned(plans, step).batch(images, rows)


def readable_batches(
    dataset: Dataset,
    view: View,
    batch_size: int,
    workers: int = 0,
    rows: range | None = None,
    *,
    tolerant: bool = True,
) -> Generator[ReadableBatch, None, None]:
    """Yields batches of the test views of a dataset's images, or of its features, in order.

    The last batch is padded with zeros, so that all batches fit one compiled program. Only the
    given rows of each batch are delivered (default: all). If `tolerant`, unreadable images are
    black and reported; otherwise they raise a UserError. Warns at the end of images that are nearly
    black. Close the generator to end the workers.
    """
    rows = range(batch_size) if rows is None else rows
    batches = range(math.ceil(len(dataset) / batch_size))
    if dataset.vectors is not None:
        for i in batches:
            yield padded_rows(dataset.vectors[i * batch_size : (i + 1) * batch_size], rows, 0), {}
        return
    read_image = functools.partial(_test_view, dataset, view, batch_size)
    pieces = _Pieces(read_image, batches, rows, view, tolerant)
    brightest = np.zeros(len(batches) * batch_size, int)
    with contextlib.closing(pieces.assembled(workers)) as delivered:
        for i, (views, broken) in zip(batches, delivered, strict=True):
            brightest[i * batch_size + np.array(rows)] = views.max(axis=(1, 2, 3))
            yield views, broken
    warn_of_dark(dataset, brightest)


def warn_of_dark(dataset: Dataset, brightest: Int[np.ndarray, " n"]) -> None:
    """Warns once of images whose largest level, from 0 to 255, is nearly black but not black."""
    dark = np.flatnonzero((brightest > 0) & (brightest <= _DARK))
    if len(dark):
        images = f"{len(dark)} of {len(dataset)} images, such as {dataset.name(dark[0])},"
        remedy = "if their files hold fewer bits than they declare, such as 12 of 16, scale them"
        _warn_once(f"{images} stay below a sixteenth of white and are nearly black; {remedy}")
