"""Workers: threads or processes of Grain that prepare batches piece by piece.

Pieces are smaller than batches, so that the first batch arrives soon and little memory is needed
for what is prepared ahead, however many workers there are.
"""

import dataclasses
import signal
from collections.abc import Generator
from typing import NamedTuple, Protocol

import grain
import numpy as np
from absl import flags
from jaxtyping import UInt8

from hypjax.errors import UserError
from hypjax.system import exits
from hypjax.system.machine import usable_cores

_PIECE = 32  # Images.
_AHEAD = 8  # Pieces that all threads together, or each process, prepare ahead.
_MAX_BYTES = 2**62
_MAX_THREADS = 8  # More gain nothing because of the interpreter's lock.


class ReadableBatch(NamedTuple):
    """Views of images, some of which may be broken, for a batch or a piece of one."""

    images: UInt8[np.ndarray, "batch side side channels"]  # Black for broken images and padding.
    broken: dict[str, str]  # Reasons by place in the batch.


class Views(Protocol):
    """Prepares pieces of batches; must be picklable."""

    def __call__(self, batch: int, piece: range) -> ReadableBatch:
        """Returns the images at the given places of a batch."""


def assemble_batches(
    views: Views, batches: range, size: int, workers: int
) -> Generator[ReadableBatch, None, None]:
    """Yields batches of so many images, whose pieces worker processes prepare, or threads if 0.

    Close the generator to end the workers. Raises UserError if an image cannot be read or a worker
    process dies.
    """
    places = [range(i, min(i + _PIECE, size)) for i in range(0, size, _PIECE)]
    pieces = iter(_prefetched(_Pieces(views, batches, places), workers))
    try:
        for _ in batches:
            images, broken = None, {}
            for piece in places:
                delivered = next(pieces)
                if images is None:
                    images = np.empty((size, *delivered.images.shape[1:]), np.uint8)
                images[piece.start : piece.stop] = delivered.images
                broken |= delivered.broken
            yield ReadableBatch(images, broken)
    except RuntimeError as error:
        if "exit code" not in str(error):
            raise
        raise UserError(
            f"a worker process died ({str(error).partition('. ')[0]}); if memory ran out, lower "
            "--config.run.workers"
        ) from error
    finally:
        pieces.close()


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Prepares the pieces of all batches by number."""

    views: Views
    batches: range
    places: list[range]  # Of each piece in its batch.

    def __call__(self, number: int) -> ReadableBatch:
        batch, piece = divmod(int(number), len(self.places))
        return self.views(self.batches[batch], self.places[piece])


def _prefetched(pieces: _Pieces, workers: int) -> grain.IterDataset:
    """Returns the pieces in order, prepared ahead by processes, or by threads if there are none."""
    dataset = grain.MapDataset.range(len(pieces.batches) * len(pieces.places)).map(pieces)
    if not workers:
        threads = min(_MAX_THREADS, usable_cores())
        return dataset.to_iter_dataset(grain.ReadOptions(threads, _AHEAD))
    if not flags.FLAGS.is_parsed():  # In notebooks; Grain's workers read absl's flags.
        flags.FLAGS.mark_as_parsed()
    sequential = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    # Pieces are copied through pipes. Shared memory, which Grain frees in a thread, is reported as
    # leaked if a program ends soon afterwards, and containers have little of it.
    without_shared = grain.experimental.DatasetOptions(min_shm_size=_MAX_BYTES)
    sequential = grain.experimental.WithOptionsIterDataset(sequential, without_shared)
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=_AHEAD)
    return sequential.mp_prefetch(options, worker_init_fn=_start_worker)


def _start_worker(index: int, count: int) -> None:
    """Prepares a worker process: it ignores signals, and ends when its parent does."""
    del index, count
    exits.end_with_parent()
    # Terminals send signals to all processes; the parent alone decides what to do.
    for number in exits.ENDING:
        signal.signal(number, signal.SIG_IGN)
