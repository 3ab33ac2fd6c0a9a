"""Growth of time and memory: of the loss with batch size and dimension, of recall with gallery."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.loss import BALL, gradient
from hypjax.retrieval import recall_at_k

COLUMNS = {
    "task": "{name}",
    "grows with": "{of}",
    "seconds": "{seconds:.3g}",
    "memory": "{memory_mib:.1f} MiB",
    "exponent of time": "{time_exponent:.2f}",
    "of memory": "{memory_exponent:.2f}",
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


# What grows, the task of a size, and the sizes.
_CURVES = (
    ("images", functools.partial(_loss, dim=_DIM), (100, 200, 400, 800, 1600, 3200)),
    ("coordinates", functools.partial(_loss, _BATCH), (16, 32, 64, 128, 256, 512, 1024)),
    ("items", _recall, (10_000, 30_000, 100_000, 300_000, 1_000_000)),
)


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Seconds and memory of each task at its sizes, the first two if quick, and their exponents."""
    for of, make, sizes in _CURVES:
        sizes = sizes[:2] if options.quick else sizes
        # One by one, so that no more than one task's arrays are held.
        found = list(measure.measure(map(make, sizes), options))
        exponents = {
            "time_exponent": _exponent(sizes, [row["seconds"] for row in found]),
            "memory_exponent": _exponent(sizes, [row["memory_mib"] for row in found]),
        }
        yield from ({"of": of, **row, **exponents} for row in found)


def _exponent(sizes: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Fits b of a·sizeᵇ by least squares in logarithms; None if a value is missing or 0."""
    larger = max(2, -(-len(sizes) // 2))  # Where fixed costs matter least.
    if not all(values[-larger:]):
        return None
    return float(np.polyfit(np.log(sizes[-larger:]), np.log(values[-larger:]), 1)[0])
