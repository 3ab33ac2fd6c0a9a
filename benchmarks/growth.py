"""Growth of the loss with batch size and dimension, and of recall with the gallery's size."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.loss import BALL, gradient
from hypjax.retrieval import recall_at_k

COLUMNS = {
    **measure.COLUMNS,
    "exponent of time": "{seconds_exponent:.2f}",
    "of memory": "{memory_mib_exponent:.2f}",
}
_BATCH, _DIM, _QUERIES = 900, 128, 2000
_ITEMS_PER_CLASS = 10


def _loss(batch: int, dim: int) -> measure.Task:
    features = np.random.default_rng(0).normal(size=(batch, dim)).astype(np.float32)
    run, memory = gradient(features, samples=2)
    return measure.Task(f"loss and gradient, {batch} × {dim}", run, memory=memory)


def _recall(items: int) -> measure.Task:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(items) // _ITEMS_PER_CLASS)
    gallery = np.array(BALL.embed(rng.normal(size=(items, _DIM)).astype(np.float32)))
    rows = rng.choice(items, _QUERIES, replace=False)
    noise = 0.01 * rng.normal(size=(_QUERIES, _DIM)).astype(np.float32)
    queries = np.array(BALL.embed(gallery[rows] + noise))
    arrays = queries, labels[rows], gallery, labels
    run = functools.partial(recall_at_k, *arrays, ks=(1, 10, 100, 1000), space=BALL)
    return measure.Task(f"recall of {_QUERIES} queries, {items} items", run)


_CURVES = (  # Functions from a size to a task, and the sizes: images, coordinates, gallery items.
    (functools.partial(_loss, dim=_DIM), (100, 200, 400, 800, 1600, 3200)),
    (functools.partial(_loss, _BATCH), (16, 32, 64, 128, 256, 512, 1024)),
    (_recall, (10_000, 30_000, 100_000, 300_000, 1_000_000)),
)


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times each task at all sizes, or two if quick; fits the exponent b of a·sizeᵇ."""
    for create_task, sizes in _CURVES:
        sizes = sizes[:2] if options.quick else sizes
        # `map` creates one task at a time, so that memory holds the arrays of only one.
        measured = list(measure.measure(map(create_task, sizes), options))
        num_fitted = max(2, -(-len(sizes) // 2))  # The larger sizes, where fixed costs matter less.
        exponents = {}
        for field in ("seconds", "memory_mib"):
            values, exponent = [row[field] for row in measured[-num_fitted:]], None
            if all(values):
                log_sizes = np.log(sizes[-num_fitted:])
                exponent = float(np.polyfit(log_sizes, np.log(values), 1)[0])
            exponents[f"{field}_exponent"] = exponent
        for row in measured:
            yield row | exponents
