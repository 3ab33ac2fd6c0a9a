"""Growth of time and memory: of the loss with batch size and dimension, of recall with gallery."""

import functools
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks import measure
from benchmarks.loss import BALL, gradient
from benchmarks.measure import Task
from hypjax.retrieval import recall_at_k

_BATCH, _DIM, _QUERIES = 900, 128, 2000
_ITEMS_PER_CLASS = 10


def _loss(batch: int, dim: int) -> Task:
    features = np.random.default_rng(0).normal(size=(batch, dim)).astype(np.float32)
    run, memory = gradient(features, samples=2)
    return Task(f"loss and gradient, {batch} × {dim}", run, memory=memory)


def _recall(items: int) -> Task:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(items) // _ITEMS_PER_CLASS)
    gallery = np.array(BALL.embed(rng.normal(size=(items, _DIM)).astype(np.float32)))
    asked = rng.choice(items, min(_QUERIES, items), replace=False)
    noise = 0.01 * rng.normal(size=(len(asked), _DIM)).astype(np.float32)
    queries = np.array(BALL.embed(gallery[asked] + noise))
    given = queries, labels[asked], gallery, labels
    run = functools.partial(recall_at_k, *given, ks=(1, 10, 100, 1000), space=BALL)
    return Task(f"recall of {len(asked)} queries, {items} items", run)


# What grows, the task of a size, and the sizes.
CURVES = (
    ("images", functools.partial(_loss, dim=_DIM), (100, 200, 400, 800, 1600, 3200)),
    ("coordinates", functools.partial(_loss, _BATCH), (16, 32, 64, 128, 256, 512, 1024)),
    ("items", _recall, (10_000, 30_000, 100_000, 300_000, 1_000_000)),
)


def rows(options: measure.Options) -> measure.Rows:
    """Seconds and bytes of each task at its sizes, the first two if quick, and fitted exponents."""
    rows = []
    for of, make, sizes in CURVES:
        sizes = sizes[:2] if options.quick else sizes
        # One by one, so that no more than one task's arrays are held.
        found = list(measure.measure(map(make, sizes), options.repeats))
        seconds = [statistics.median(row["ours"]) for row in found]
        memory = [row["memory"] for row in found]
        exponents = [exponent(sizes, values) for values in (seconds, memory)]
        for row, taken, held in zip(found, seconds, memory, strict=True):
            row = {"task": row["name"], "of": of, "seconds": taken, "memory": held}
            rows.append(row | {"exponents": exponents})
    return rows


def exponent(sizes: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Fits b of a·sizeᵇ by least squares in logarithms; None if a value is missing or 0."""
    larger = max(2, -(-len(sizes) // 2))  # Where fixed costs matter least.
    if not all(values[-larger:]):
        return None
    return float(np.polyfit(np.log(sizes[-larger:]), np.log(values[-larger:]), 1)[0])


def table(rows: measure.Rows) -> str:
    """Formats a Markdown table with one row per size."""
    lines = []
    for row in rows:
        fitted = ", ".join("–" if b is None else f"{b:.2f}" for b in row["exponents"])
        held = "–" if row["memory"] is None else f"{row['memory'] / 2**20:.1f} MiB"
        lines.append((row["task"], row["of"], f"{row['seconds']:.3g} s", held, fitted))
    return measure.markdown(
        ("task", "grows with", "time", "memory", "exponents of time, memory"), lines
    )
