"""Input: carries plans out in worker threads or processes, ahead of the training step."""

import dataclasses
import gc
import signal
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

import grain
import jax
import numpy as np
from absl import flags
from jaxtyping import UInt8

from hypjax import interrupts
from hypjax.data import pixels
from hypjax.data.dataset import Dataset
from hypjax.data.plans import Plan
from hypjax.errors import UserError
from hypjax.interfaces import Batch

_THREADS = 2  # A process's interpreter lock leaves no work for more.
_BATCHES_AHEAD = 4

Made = TypeVar("Made")


class ReadableBatch(NamedTuple):
    """The test views of images, some of which may be broken.

    Attributes:
        images: Black where there is none.
        broken: {place in the batch: reason}, both as texts.
    """

    images: UInt8[np.ndarray, "batch side side channels"]
    broken: dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class _PlannedBatch:
    """Turns a step's number into its batch."""

    dataset: Dataset
    plan: Callable[[int], Plan]
    side: int
    channels: int

    def __call__(self, step: int) -> Batch:
        plan = self.plan(int(step))
        images = np.empty((len(plan.ids), self.side, self.side, self.channels), np.uint8)
        for i, (image_id, box) in enumerate(zip(plan.ids, plan.boxes, strict=True)):
            image = self.dataset.image(int(image_id), self.channels)
            images[i] = pixels.crop_and_resize(image, box, self.side)
        return Batch(images=images, labels=plan.labels, ids=plan.ids, flips=plan.flips)


@dataclasses.dataclass(frozen=True, eq=False)
class _CentralBatch:
    """Turns a batch's number into the test view of the images in it, the last one padded.

    Where broken images are tolerated, these are black, and told by their places and reasons.
    """

    dataset: Dataset
    shorter_side: int
    side: int
    channels: int
    batch_size: int
    tolerant: bool = False

    def __call__(self, index: int) -> UInt8[np.ndarray, "batch side side channels"] | ReadableBatch:
        images = np.zeros((self.batch_size, self.side, self.side, self.channels), np.uint8)
        broken = {}
        first = int(index) * self.batch_size
        for i in range(first, min(first + self.batch_size, len(self.dataset))):
            try:
                image = self.dataset.image(i, self.channels)
                images[i - first] = pixels.central_view(image, self.shorter_side, self.side)
            except UserError as error:
                if not self.tolerant:
                    raise
                broken[str(i - first)] = pixels.reason(error.__cause__)
        return ReadableBatch(images, broken) if self.tolerant else images


def training_batches(
    dataset: Dataset,
    plan: Callable[[int], Plan],
    *,
    first_step: int,
    last_step: int,
    side: int,
    channels: int,
    workers: int,
) -> Generator[Batch, None, None]:
    """Yields the batches of steps [first_step, last_step), prepared ahead of their use.

    Close it to end what prepares them.

    Args:
        dataset: The training set.
        plan: Which images, and which boxes of them, a step wants.
        first_step: Where to begin; a resumed run continues with the same pixels.
        last_step: Where to end.
        side: Of the square images, in pixels.
        channels: 1 for greyscale, 3 for RGB.
        workers: Processes that decode; 0 uses threads of this one.
    """
    make = _PlannedBatch(dataset, plan, side, channels)
    return _iterate(make, range(first_step, last_step), workers)


def evaluation_batches(
    dataset: Dataset,
    *,
    shorter_side: int,
    side: int,
    channels: int,
    batch_size: int,
    workers: int,
) -> Generator[UInt8[np.ndarray, "batch side side channels"], None, None]:
    """Yields the test views of all images in order, the last batch filled up with black ones.

    Close it to end what prepares them.

    Args:
        dataset: What to embed.
        shorter_side: Length it is resized to.
        side: Of the square cut from the centre.
        channels: 1 for greyscale, 3 for RGB.
        batch_size: The same for all batches, so that one compilation serves.
        workers: Processes that decode; 0 uses threads of this one.
    """
    make = _CentralBatch(dataset, shorter_side, side, channels, batch_size)
    return _iterate(make, range(-(-len(dataset) // batch_size)), workers)


def readable_batches(
    dataset: Dataset,
    *,
    shorter_side: int,
    side: int,
    channels: int,
    batch_size: int,
    workers: int,
) -> Generator[ReadableBatch, None, None]:
    """Yields what `evaluation_batches` does, beside the images that could not be read."""
    make = _CentralBatch(dataset, shorter_side, side, channels, batch_size, tolerant=True)
    return _iterate(make, range(-(-len(dataset) // batch_size)), workers)


def _iterate(
    make: Callable[[int], Made], numbers: range, workers: int
) -> Generator[Made, None, None]:
    batches = grain.MapDataset.range(numbers.start, numbers.stop).map(make)
    ahead = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD)
    batches = batches.to_iter_dataset(ahead)
    if workers:
        if not flags.FLAGS.is_parsed():  # In notebooks; Grain's workers read absl's flags.
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(options, worker_init_fn=_ignore_signals)
    iterator = iter(batches)
    try:
        yield from map(_copy, iterator) if workers else iterator
    finally:
        iterator.close()
        if workers:
            del iterator, batches
            gc.collect()  # Frees what is left in shared memory, while its owners are there.


def _copy(batch: Made) -> Made:
    """Takes a batch out of shared memory."""
    return jax.tree.map(np.array, batch)


def _ignore_signals(index: int, count: int) -> None:
    """Leaves signals, which terminals send to all processes, to the one that saves."""
    del index, count
    for number in interrupts.ENDING:
        signal.signal(number, signal.SIG_IGN)
