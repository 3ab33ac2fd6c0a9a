"""Exact ranks of all relevant items of each query."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.galleries import sample
from hypjax.retrieval.relevance import Relevance
from hypjax.retrieval.scores import Score, Scored, highest, lowest, widened
from hypjax.system.machine import usable_cores

_BOUND_BYTES = 2**28  # Largest size of the bounds of a block of queries.
_CHUNK_BYTES = 2**25  # Largest size of the points of a chunk of the gallery.


def positive_ranks(
    queries: Float[np.ndarray | Array, "n d"],
    gallery: Float[np.ndarray | Array, "m d"],
    relevance: Relevance,
    space: Space,
) -> Iterator[Int[np.ndarray, " positives"]]:
    """Yields the ranks of each query's positives, in ascending order.

    A rank is the number of items that an exact search lists before the positive: those strictly
    nearer, and those equally far with a smaller index, without ignored items. Matrix products bound
    the separations; where the bounds leave the order open, subtraction in float64 decides it.

    Args:
        queries: Points of the space, [n, d].
        gallery: Points of the space, [m, d].
        relevance: Positives and ignored items, checked.
        space: Space that measures the distances.

    Raises:
        UserError: A point is not finite or not in the space.
    """
    score = Score.around(space, sample(gallery))
    size = max(min(_BOUND_BYTES // (8 * len(gallery)), len(queries)), 1)
    with ThreadPoolExecutor(usable_cores()) as pool:
        for first in range(0, len(queries), size):
            block = inputs.float32(np.asarray(queries[first : first + size]))
            space.check(block, first=first)
            bounds = _bounds(score, inputs.pad_rows(block, size), gallery)
            rows = range(first, first + len(block))
            positives, ignored = ([items[i] for i in rows] for items in relevance)
            ranks = functools.partial(_ranks, space, gallery)
            yield from pool.map(ranks, block, *bounds, positives, ignored)


def _bounds(
    score: Score, queries: Float[np.ndarray, "b d"], gallery: Float[np.ndarray | Array, "m d"]
) -> Float[np.ndarray, "2 b m"]:
    """Lower and upper bounds on −separation of some queries and all items."""
    rows = min(max(_CHUNK_BYTES // (4 * gallery.shape[1]), 1), len(gallery))
    bounds = np.empty((2, len(queries), len(gallery)), np.float32)
    factors = score.of(queries)
    for first in range(0, len(gallery), rows):
        points = inputs.float32(np.asarray(gallery[first : first + rows]))
        score.space.check(points, first=first)
        found = _bounds_of_chunk(score.space, factors, score.of(inputs.pad_rows(points, rows)))
        bounds[..., first : first + rows] = np.asarray(found)[..., : len(points)]
    return bounds


@jax.jit
def _bounds_of_chunk(space: Space, queries: Scored, items: Scored) -> Float[Array, "2 b r"]:
    least = lowest(space, queries, items)
    return jnp.stack([widened(least, -1), widened(highest(space, queries.query, items.gallery), 1)])


def _ranks(
    space: Space,
    gallery: Float[np.ndarray | Array, "m d"],
    query: Float[np.ndarray, " d"],
    least: Float[np.ndarray, " m"],
    most: Float[np.ndarray, " m"],
    positives: Int[np.ndarray, " p"],
    ignored: Int[np.ndarray, " i"],
) -> Int[np.ndarray, " p"]:
    """Ranks of one query's positives from the bounds on −separation of all items."""
    least[ignored] = most[ignored] = -np.inf
    own_least, own_most = least[positives], most[positives]
    surely = len(least) - np.searchsorted(np.sort(least), own_most, side="right")
    perhaps = len(most) - np.searchsorted(np.sort(most), own_least, side="left") - 1
    undecided = np.flatnonzero(surely != perhaps)
    if len(undecided):
        windows = [(most >= own_least[p]) & (least <= own_most[p]) for p in undecided]
        items = np.flatnonzero(np.logical_or.reduce(windows))
        separations = _separations(space, query, np.asarray(gallery[items]))
        for p, window in zip(undecided, windows, strict=True):
            own = separations[np.searchsorted(items, positives[p])]
            first = (separations < own) | ((separations == own) & (items < positives[p]))
            surely[p] += np.count_nonzero(first & window[items])
    return np.sort(surely)


def _separations(
    space: Space, query: Float[np.ndarray, " d"], items: Float[np.ndarray, "m d"]
) -> Float[np.ndarray, " m"]:
    """Separations by subtraction in float64."""
    # A power of two, so that few programs are compiled.
    size = max(1 << (len(items) - 1).bit_length(), inputs.LANES)
    padded = inputs.pad_rows(inputs.float32(items), size)
    with jax.enable_x64(True):
        return np.asarray(_separations_of(space, query, padded))[: len(items)]


@jax.jit
def _separations_of(
    space: Space, query: Float[Array, " d"], items: Float[Array, "r d"]
) -> Float[Array, " r"]:
    return space.separation(query.astype(jnp.float64), items.astype(jnp.float64))
