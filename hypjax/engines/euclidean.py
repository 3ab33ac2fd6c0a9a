"""Hyperbolic neighbours from an index of Euclidean distances, exact or approximate.

A ball of the Poincaré metric is also a Euclidean ball, with another centre. So the k nearest points
of a query are the k nearest, in Euclidean distance, to the centre of the ball on whose surface the
k-th of them lies. A first search at the query bounds the separation of the k-th; a second one at
that centre finds the neighbours. Near the boundary, where the Euclidean neighbours of the query
itself are others, this finds what the first search misses.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from hypjax.engines.candidates import rank, separation_factors
from hypjax.geometry import PoincareBall, Space, Sphere

# From points and a number m to the indices of the m items nearest to each point in Euclidean
# distance, [n, m]; −1 where there is none.
Search = Callable[[Float32[np.ndarray, "n d"], int], Int[np.ndarray, "n m"]]


def centres(
    points: Float[np.ndarray, "n d"], separations: Float[np.ndarray, " n"], space: Space
) -> Float32[np.ndarray, "n d"]:
    """Euclidean centres of the balls of given separations around points.

    {y: separation(x, y) ≤ s} is the Euclidean ball around x / (1 + c·s·(1 − c‖x‖²)).

    Args:
        points: Points of a ball or of the sphere, [n, d].
        separations: Separations, [n].
        space: Their space. On the sphere, the centres are the points.

    Returns:
        Centres, [n, d].
    """
    c = float(space.c) if isinstance(space, PoincareBall) else 0.0
    shrunk = points / (1 + c * separations / separation_factors(points, space))[:, None]
    return shrunk.astype(np.float32)


def nearest(
    search: Search,
    gallery: Float32[np.ndarray, "m d"],
    queries: Float32[np.ndarray, "n d"],
    *,
    k: int,
    space: Space,
    candidates: int,
) -> tuple[Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
    """Finds the nearest items of a gallery by two searches in an index of Euclidean distances.

    Args:
        search: Searches the index.
        gallery: The points in the index, a ball's or the sphere's.
        queries: Points.
        k: Number of neighbours.
        space: Their space.
        candidates: Number of items of each search, among which the nearest are chosen by the
            distance of the space; at least k, and better five times that.

    Returns:
        Separations, float64, and indices of the items, nearest first. Where the index returns
        fewer than k items, the separation is infinite.
    """

    def best(points: Any) -> tuple[np.ndarray, np.ndarray]:
        found = search(points, candidates)
        rows, places = np.nonzero(found >= 0)
        return rank(queries, gallery, rows, found[rows, places], k=k, space=space)

    first = best(queries)
    if isinstance(space, Sphere):
        return first
    reached = np.isfinite(first[0][:, -1])
    return best(centres(queries, np.where(reached, first[0][:, -1], 0), space))
