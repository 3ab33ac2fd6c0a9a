"""Hyperbolic neighbours from an index of Euclidean distances, or from any other candidates.

A ball of the Poincaré metric is also a Euclidean ball, with another centre. So the k nearest points
of a query are the k nearest, in Euclidean distance, to the centre of the ball on whose surface the
k-th of them lies. A first search at the query bounds the separation of the k-th; a second one at
that centre finds the neighbours. Near the boundary, the first centre misses them.

Candidates are ranked by their exact distances, and the share of neighbours among them is measured.
Points of a space that is isometric to a ball are compared in that ball.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Nearest, Points, Rows
from hypjax.system import console

WANTED, NEAREST = 0.98, 10  # An export aims at this recall of this many neighbours.
LINKS, ADDED = 32, 256  # Links of a point in a graph, and candidates when it is added.
SAMPLE = 500  # Queries by which an export measures recall.
_CANDIDATES = (64, 128, 256, 512, 1024)  # Numbers of candidates that an export tries.
_CACHED = 2**16  # Coordinates of candidates that fit into the cache of a core.
_TIED = 1e-5  # Distances within this relative difference are equal.

_Points = Float32[np.ndarray, "n d"]
# Indices of the m items nearest to each point in Euclidean distance, −1 where there is none.
Search = Callable[[_Points, int], Int[np.ndarray, "n m"]]


def centres(points: Points, separations: Float[np.ndarray, " n"], space: Space) -> _Points:
    """Euclidean centres of balls around points, whose radii are separations; see `in_ball`.

    {y: separation(x, y) ≤ s} is the Euclidean ball around x / (1 + c·s·(1 − c‖x‖²)).
    """
    factors = 1 + curvature(space) * separations / separation_factors(points, space)
    return (points / factors[:, None]).astype(np.float32)


def nearest(
    search: Search, gallery: _Points, queries: _Points, *, k: int, space: Space, candidates: int
) -> Nearest:
    """Finds the nearest items of a gallery by two searches in an index of Euclidean distances.

    The index of `search` holds the gallery's points as `in_ball` returns them. Each search lists
    `candidates`, at least k and better five times that, of which the nearest by the space's
    distance are taken. Returns separations, float64, and indices of the items, nearest first. Where
    the index returns fewer than k items, the separation is infinite.
    """
    space.check(queries)

    def best(points: Any) -> tuple[np.ndarray, np.ndarray]:
        listed = search(points, candidates)
        rows, columns = np.nonzero(listed >= 0)
        return rank(queries, gallery, rows, listed[rows, columns], k=k, space=space)

    points = in_ball(queries, space).astype(np.float32)
    first = best(points)
    if space.squared:
        return first
    separations = first[0][:, -1]
    return best(centres(points, np.where(np.isfinite(separations), separations, 0), space))


def curvature(space: Space) -> float:
    """The c of the ball in which points of a space are compared; 0 for the sphere.

    Raises UserError for any space that is neither isometric to a ball nor the sphere.
    """
    if space.squared:
        return 0.0
    if (ball := space.ball()) is None:
        raise UserError(f"there is no approximate search in {space}; search the .npz file")
    return float(ball.c)


def in_ball(points: Points, space: Space) -> Points:
    """Maps points to the space's ball, in float64; points of balls and spheres stay."""
    return _converted(_to_ball, space, points)


def from_ball(points: Points, space: Space) -> Points:
    """Maps points of the space's ball back, see `in_ball`."""
    return _converted(_from_ball, space, points)


def _converted(convert: Callable, space: Space, points: Points) -> Points:
    if space.squared or space.ball() is space:
        return points
    with jax.enable_x64(True):
        return inputs.by_blocks(functools.partial(convert, space), points.astype(np.float64))


_to_ball = jax.jit(lambda space, points: space.to_ball(points))
_from_ball = jax.jit(lambda space, points: space.from_ball(points))


def separation_factors(points: Points, space: Space) -> Float64[np.ndarray, " n"]:
    """Each point's factor in separations: 1 / (1 − c‖x‖²), or 1 on the sphere.

    For points from `in_ball`, the separation is ‖x − y‖² times the factors of x and y.
    """
    return 1 / (1 - curvature(space) * np.einsum("nd,nd->n", points, points, dtype=np.float64))


def held_out(count: int, total: int, most: int = SAMPLE) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows at random into a sample of about a tenth of `total`, and the others; ascending.

    Recall is measured on a graph without the sample, as for new queries: points in a graph are
    linked to their neighbours, which makes these easier to find.
    """
    rows = np.random.default_rng(0).permutation(count)
    size = min(most, (total + 8) // 10)  # One of two rows, but none of a single row.
    return np.sort(rows[:size]), np.sort(rows[size:])


def assured(hits: Bool[np.ndarray, "s k"]) -> float:
    """Lower bound on recall for new queries: the sample's mean less two standard errors.

    A sample does not show misses that are rare and come together.
    """
    shares = hits.mean(axis=1) if len(hits) else np.ones(1)
    return max(0.0, float(shares.mean() - 2 * shares.std() / len(shares) ** 0.5))


def rank(
    queries: _Points, gallery: _Points, rows: Rows, items: Rows, *, k: int, space: Space
) -> Nearest:
    """Ranks candidates, pairs of a query and an item, by separations computed by subtraction.

    Pairs may repeat, and the gallery may be memory-mapped. Ties keep the gallery's order. Where a
    query has fewer than k candidates, the separation is infinite and the index −1.
    """
    pairs = np.sort(rows * len(gallery) + items)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    rows, items = np.divmod(pairs, max(len(gallery), 1))
    points = in_ball(queries, space)
    query_factors = separation_factors(points, space)

    def measure(block: slice) -> Float64[np.ndarray, " b"]:
        candidates = in_ball(gallery[items[block]], space).astype(np.float64)
        scales = separation_factors(candidates, space) * query_factors[rows[block]]
        candidates -= points[rows[block]]
        return scales * np.einsum("pd,pd->p", candidates, candidates)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        measured = pool.map(measure, inputs.blocks(len(rows), _CACHED // gallery.shape[1] + 1))
        separations = np.concatenate([np.empty(0), *measured])
    columns = np.arange(len(rows)) - np.searchsorted(rows, rows)
    shape = len(queries), max(k, columns.max(initial=0) + 1)
    listed = np.full(shape, np.inf), np.full(shape, -1)
    listed[0][rows, columns], listed[1][rows, columns] = separations, items
    order = np.argsort(listed[0], axis=1, kind="stable")[:, :k]
    return tuple(np.take_along_axis(array, order, axis=1) for array in listed)


def recalled(exact: Nearest, approximate: Nearest) -> Bool[np.ndarray, "n k"]:
    """Marks the exact neighbours, ascending, that an approximate search lists in any order."""
    hits = (exact[1][:, :, None] == approximate[1][:, None]).any(axis=2)
    known = (approximate[1][:, :, None] == exact[1][:, None]).any(axis=2)
    # If several items are as far as the k-th, any of them counts.
    last = exact[0][:, -1:]
    ties = ~hits & (exact[0] >= last * (1 - _TIED))
    others = ~known & (approximate[0] <= last * (1 + _TIED))
    return hits | (ties & (np.cumsum(ties, axis=1) <= others.sum(axis=1, keepdims=True)))


def tune(
    search: Callable[[int], Nearest], exact: Nearest, candidates: Sequence[int] = _CANDIDATES
) -> float:
    """Raises the candidates of a sample's search until it finds 98% of the exact neighbours.

    Recall of the single nearest ones must be as high, since a query's neighbours are easy or hard
    to reach together. Returns the recall, see `assured`; warns if it stays below.
    """
    recall = 0.0
    for number in candidates:
        hits = recalled(exact, search(number))
        recall = min(assured(hits), assured(hits[:, :1]))
        if recall >= WANTED:
            return recall
    k = exact[1].shape[1]
    console.warn(f"the graph finds {recall:.1%} of the {k} nearest; the .npz file finds all")
    return recall
