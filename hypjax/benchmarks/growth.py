"""How time and memory grow: of the loss with batch and coordinates, of recall with the gallery."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hypjax.benchmarks.loss import gradient
from hypjax.benchmarks.measure import Work, measure
from hypjax.config import default_config
from hypjax.geometry import PoincareBall
from hypjax.retrieval import recall_at_k

_BATCH, _DIM, _QUERIES = 900, 128, 2000
_ITEMS_OF_CLASS = 10


class Growth(NamedTuple):
    """What is made larger, and what it then takes.

    Attributes:
        work: What is done.
        of: What is made larger.
        why: Which exponent is expected, and for what reason.
        make: From a size to the work.
        sizes: To be measured, ascending.
    """

    work: str
    of: str
    why: str
    make: Callable[[int], Work]
    sizes: Sequence[int]


def curves(quick: bool) -> list[Growth]:
    """What is measured; quick: up to small sizes."""
    return [
        Growth(
            "loss and gradient",
            "images of the batch",
            "The matrix of distances grows as the square, and costs more where it outgrows a CPU's "
            f"caches; {_DIM} coordinates are too few for the product to outweigh it.",
            lambda batch: _loss(batch, _DIM),
            (100, 200, 400) if quick else (100, 200, 400, 800, 1600, 3200),
        ),
        Growth(
            "loss and gradient",
            "coordinates",
            f"Only the product of {_BATCH} × {_BATCH} points grows, linearly; what is done for "
            "each distance does not.",
            lambda dim: _loss(_BATCH, dim),
            (16, 32, 64) if quick else (16, 32, 64, 128, 256, 512, 1024),
        ),
        Growth(
            f"recall of {_QUERIES} queries",
            "items of the gallery",
            "Every query is compared with every item once; nothing is sorted, and only the items "
            "themselves are kept.",
            _recall,
            (1000, 3000) if quick else (10_000, 30_000, 100_000, 300_000, 1_000_000),
        ),
    ]


def _loss(batch: int, dim: int) -> Work:
    features = np.random.default_rng(0).normal(size=(batch, dim)).astype(np.float32)
    run, memory = gradient(features, samples=2)
    return Work(f"loss and gradient, {batch} × {dim}", run, None, "", memory=memory)


def _recall(items: int) -> Work:
    objective = default_config().objective
    ball = PoincareBall(objective.c, objective.clip_radius)
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(items) // _ITEMS_OF_CLASS)
    gallery = np.array(ball.embed(rng.normal(size=(items, _DIM)).astype(np.float32)))
    asked = rng.choice(items, min(_QUERIES, items), replace=False)
    noise = 0.01 * rng.normal(size=(len(asked), _DIM)).astype(np.float32)
    queries = np.array(ball.embed(gallery[asked] + noise))

    def run() -> dict[int, float]:
        ks = (1, 10, 100, 1000)
        return recall_at_k(queries, labels[asked], gallery, labels, ks=ks, space=ball)

    return Work(f"recall, {items} items", run, None, "")


def measured(growth: Growth, repeats: int) -> dict[str, Any]:
    """Seconds and bytes at each size, and the exponents that fit them."""
    outcomes = [measure(growth.make(size), repeats) for size in growth.sizes]
    seconds = [statistics.median(outcome.ours) for outcome in outcomes]
    memory = [outcome.memory for outcome in outcomes]
    found = {"work": growth.work, "of": growth.of, "why": growth.why}
    found |= {"sizes": list(growth.sizes), "seconds": seconds, "memory": memory}
    exponents = {name: exponent(growth.sizes, found[name]) for name in ("seconds", "memory")}
    return found | {"exponents": exponents}


def exponent(sizes: Sequence[float], values: Sequence[float | None]) -> float | None:
    """B of the power law a·sizeᵇ that fits best by the squares of the logarithms.

    Only the larger half of the sizes counts, where what is fixed weighs least. None where nothing
    can be fitted.
    """
    larger = max(2, math.ceil(len(sizes) / 2))
    if not all(values[-larger:]):
        return None
    return float(np.polyfit(np.log(sizes[-larger:]), np.log(values[-larger:]), 1)[0])


def table(curves: Sequence[dict[str, Any]]) -> str:
    """A line a size, as Markdown, and why the exponents are what they are."""
    titles = ("work", "of", "size", "time", "memory", "exponents of time, memory")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for curve in curves:
        fitted = ", ".join("–" if b is None else f"{b:.2f}" for b in curve["exponents"].values())
        for size, seconds, memory in zip(
            curve["sizes"], curve["seconds"], curve["memory"], strict=True
        ):
            held = "–" if memory is None else f"{memory / 2**20:.1f} MiB"
            cells = (curve["work"], curve["of"], f"{size:,}", f"{seconds:.3g} s", held, fitted)
            lines.append(f"| {' | '.join(cells)} |")
    reasons = [f"{curve['work']}, {curve['of']}: {curve['why']}" for curve in curves]
    return "\n".join([*lines, "", *reasons])
