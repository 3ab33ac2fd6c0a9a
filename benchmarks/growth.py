"""Growth of time and memory: of the loss with batch size and dimension, of recall with gallery."""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks.loss import BALL, gradient
from benchmarks.measure import Task
from hypjax.retrieval import recall_at_k

_BATCH, _DIM, _QUERIES = 900, 128, 2000
_ITEMS_PER_CLASS = 10


class Growth(NamedTuple):
    """A task that is measured at several sizes."""

    work: str
    of: str
    why: str
    make: Callable[[int], Task]
    sizes: Sequence[int]


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
    return Task(f"recall, {items} items", run)


CURVES = (
    Growth(
        "loss and gradient",
        "images in the batch",
        "The distance matrix grows quadratically, and faster once it exceeds a CPU's caches; "
        f"with {_DIM} coordinates the matrix product does not dominate.",
        functools.partial(_loss, dim=_DIM),
        (100, 200, 400, 800, 1600, 3200),
    ),
    Growth(
        "loss and gradient",
        "coordinates",
        f"Only the product of {_BATCH} × {_BATCH} points grows, linearly; the work per "
        "distance is constant.",
        functools.partial(_loss, _BATCH),
        (16, 32, 64, 128, 256, 512, 1024),
    ),
    Growth(
        f"recall of {_QUERIES} queries",
        "gallery items",
        "Each query is compared with each item once; nothing is sorted, and only the items "
        "themselves are stored.",
        _recall,
        (10_000, 30_000, 100_000, 300_000, 1_000_000),
    ),
)


def rows(options: measure.Options) -> measure.Rows:
    """Seconds and bytes of each task at its sizes, the first two if quick, and fitted exponents."""
    rows = []
    for curve in CURVES:
        sizes = curve.sizes[:2] if options.quick else curve.sizes
        # One by one, so that no more than one task's arrays are held.
        found = list(measure.measure((curve.make(size) for size in sizes), options.repeats))
        measured = {
            "seconds": [statistics.median(row["ours"]) for row in found],
            "memory": [row["memory"] for row in found],
        }
        exponents = {name: exponent(sizes, values) for name, values in measured.items()}
        words = {"work": curve.work, "of": curve.of, "why": curve.why, "sizes": sizes}
        rows.append(words | measured | {"exponents": exponents})
    return rows


def exponent(sizes: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Fits b of a·sizeᵇ by least squares in logarithms; None if a value is missing or 0."""
    larger = max(2, math.ceil(len(sizes) / 2))  # Where fixed costs matter least.
    if not all(values[-larger:]):
        return None
    return float(np.polyfit(np.log(sizes[-larger:]), np.log(values[-larger:]), 1)[0])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a Markdown table with one row per size, followed by the explanations."""
    titles = ("task", "grows with", "size", "time", "memory", "exponents of time, memory")
    lines = []
    for curve in rows:
        fitted = ", ".join("–" if b is None else f"{b:.2f}" for b in curve["exponents"].values())
        measured = zip(curve["sizes"], curve["seconds"], curve["memory"], strict=True)
        for size, taken, memory in measured:
            held = "–" if memory is None else f"{memory / 2**20:.1f} MiB"
            cells = (curve["work"], curve["of"], f"{size:,}", f"{taken:.3g} s", held, fitted)
            lines.append(cells)
    reasons = [f"{curve['work']}, {curve['of']}: {curve['why']}" for curve in rows]
    return "\n".join([measure.markdown(titles, lines), "", *reasons])
