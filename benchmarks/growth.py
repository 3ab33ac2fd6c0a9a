"""Growth of time and memory: of the loss with batch size and dimension, of recall with gallery."""

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
    asked = rng.choice(items, _QUERIES, replace=False)
    noise = 0.01 * rng.normal(size=(_QUERIES, _DIM)).astype(np.float32)
    queries = np.array(BALL.embed(gallery[asked] + noise))
    given = queries, labels[asked], gallery, labels
    run = functools.partial(recall_at_k, *given, ks=(1, 10, 100, 1000), space=BALL)
    return measure.Task(f"recall of {_QUERIES} queries, {items} items", run)


_CURVES = (  # The task of a size, and the sizes: images, coordinates, and items of a gallery.
    (functools.partial(_loss, dim=_DIM), (100, 200, 400, 800, 1600, 3200)),
    (functools.partial(_loss, _BATCH), (16, 32, 64, 128, 256, 512, 1024)),
    (_recall, (10_000, 30_000, 100_000, 300_000, 1_000_000)),
)


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times each task at its sizes, the first two if quick; b of a·sizeᵇ, fitted in logarithms."""
    for make, sizes in _CURVES:
        sizes = sizes[:2] if options.quick else sizes
        # One by one, so that no more than one task's arrays are held.
        measured = list(measure.measure(map(make, sizes), options))
        larger, exponents = max(2, -(-len(sizes) // 2)), {}  # Where fixed costs matter least.
        for field in ("seconds", "memory_mib"):
            values = [row[field] for row in measured[-larger:]]
            slope = all(values) and np.polyfit(np.log(sizes[-larger:]), np.log(values), 1)[0]
            exponents[f"{field}_exponent"] = float(slope) if slope else None
        yield from (row | exponents for row in measured)
