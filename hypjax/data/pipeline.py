"""Input batches: worker threads or processes carry plans out, ahead of the training step.

Workers deliver only pixels; labels and flips are already in the plan.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from hypjax.data import pixels
from hypjax.data.dataset import Dataset
from hypjax.data.plans import Plan
from hypjax.data.workers import ReadableBatch, assemble_batches
from hypjax.errors import UserError
from hypjax.types import Batch, View


@dataclasses.dataclass(frozen=True, eq=False)
class _CachedPlans:
    """Plans, the latest of which are cached, since each serves several pieces of a batch."""

    plan: Callable[[int], Plan]

    def __call__(self, step: int) -> Plan:
        return self._cached(step)

    @functools.cached_property
    def _cached(self) -> Callable[[int], Plan]:
        return functools.lru_cache(maxsize=16)(self.plan)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the cache: each worker process has its own."""
        return {name: value for name, value in vars(self).items() if name != "_cached"}


@dataclasses.dataclass(frozen=True, eq=False)
class _PlannedViews:
    """The crops that a step's plan specifies for some rows of the batch, padded with black."""

    dataset: Dataset
    plan: Callable[[int], Plan]
    rows: range
    view: View

    def __call__(self, step: int, piece: range) -> ReadableBatch:
        plan, view = self.plan(step), self.view
        images = _black(view, len(piece))
        for image, row in zip(images, self._rows(plan, piece), strict=False):
            box, size = plan.boxes[row].tolist(), tuple(plan.sizes[row].tolist())
            image[...] = self.dataset.crop(int(plan.ids[row]), box, view.side, view.channels, size)
        return ReadableBatch(images, {})

    def _rows(self, plan: Plan, piece: range) -> range:
        """Rows of the batch at some places, without those that pad it."""
        rows = self.rows[piece.start : piece.stop]
        return range(rows.start, min(rows.stop, len(plan.ids)))


@dataclasses.dataclass(frozen=True, eq=False)
class _TestViews:
    """The test views of the images in some rows of a batch; the last batch is padded with black."""

    dataset: Dataset
    rows: range
    view: View
    batch_size: int
    tolerant: bool  # Images that cannot be read are black too, and the reasons are reported.

    def __call__(self, batch: int, piece: range) -> ReadableBatch:
        images, broken = _black(self.view, len(piece)), {}
        for image, place, i in zip(images, piece, self._images(batch, piece), strict=False):
            try:
                image[...] = self.dataset.test_view(i, self.view)
            except UserError as error:
                if not self.tolerant:
                    raise
                broken[str(place)] = pixels.reason(error.__cause__)
        return ReadableBatch(images, broken)

    def _images(self, batch: int, piece: range) -> range:
        """Images at some places of a batch, without those that pad it."""
        rows, first = self.rows[piece.start : piece.stop], batch * self.batch_size
        return range(first + rows.start, min(first + rows.stop, len(self.dataset)))

    def batches(self, workers: int) -> Generator[ReadableBatch, None, None]:
        """Yields all batches."""
        numbers = range(-(-len(self.dataset) // self.batch_size))
        return assemble_batches(self, numbers, len(self.rows), workers)


def _black(view: View, count: int) -> UInt8[np.ndarray, "count side side channels"]:
    return np.zeros((count, view.side, view.side, view.channels), np.uint8)


def training_batches(
    dataset: Dataset,
    plan: Callable[[int], Plan],
    steps: range,
    view: View,
    workers: int = 0,
    rows: range | None = None,
) -> Generator[Batch, None, None]:
    """Yields the batches of the given steps, prepared ahead of their use.

    Images and flips are those of the given rows of a batch, black beyond its end, or of all rows;
    labels and ids are those of the whole batch. Steps are counted from 0. Close the generator to
    end the workers. Raises UserError as `assemble_batches` does.
    """
    # A step's plan is made from (seed, step) alone, here and in each worker, so pixels depend
    # neither on who prepares them nor on where a run was resumed.
    plan = _CachedPlans(plan)
    if not steps:
        return
    rows = range(len(plan(steps.start).ids)) if rows is None else rows
    views = _PlannedViews(dataset, plan, rows, view)
    batches = assemble_batches(views, steps, len(rows), workers)
    with contextlib.closing(batches):
        for step, (images, _) in zip(steps, batches, strict=True):
            planned, flips = plan(step), np.zeros(len(rows), bool)
            local = planned.flips[rows.start : rows.stop]
            flips[: len(local)] = local
            yield Batch(images=images, labels=planned.labels, ids=planned.ids, flips=flips)


def evaluation_batches(
    dataset: Dataset,
    view: View,
    batch_size: int,
    workers: int = 0,
    rows: range | None = None,
) -> Generator[UInt8[np.ndarray, "rows side side channels"], None, None]:
    """Yields the test views of all images in order; the last batch is padded with black ones.

    Embeddings that are given instead of pixels are yielded as they are, float32, and zero rows.

    All batches have the same size, so that one compiled program serves them. Of each, the given
    rows are delivered, or all. Close the generator to end the workers. Raises UserError as
    `assemble_batches` does.
    """
    rows = range(batch_size) if rows is None else rows
    if dataset.vectors is not None:
        yield from (batch[rows.start : rows.stop] for batch in _given_batches(dataset, batch_size))
        return
    batches = _TestViews(dataset, rows, view, batch_size, tolerant=False).batches(workers)
    with contextlib.closing(batches):
        for images, _ in batches:
            yield images


def readable_batches(
    dataset: Dataset, view: View, batch_size: int, workers: int = 0
) -> Generator[ReadableBatch, None, None]:
    """Yields what `evaluation_batches` yields, but tolerates and reports unreadable images."""
    if dataset.vectors is not None:
        return (ReadableBatch(batch, {}) for batch in _given_batches(dataset, batch_size))
    views = _TestViews(dataset, range(batch_size), view, batch_size, tolerant=True)
    return views.batches(workers)


def _given_batches(
    dataset: Dataset, batch_size: int
) -> Generator[Float[np.ndarray, "batch dim"], None, None]:
    for start in range(0, len(dataset), batch_size):
        batch = dataset.given_vectors(slice(start, start + batch_size))
        yield np.pad(batch, [(0, batch_size - len(batch)), (0, 0)])
