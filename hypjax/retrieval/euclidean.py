"""Hyperbolic neighbours from an index of Euclidean distances, or from any other candidates.

A ball of the Poincaré metric is also a Euclidean ball, with another centre. A first search, at the
query, bounds the separation of the k-th neighbour. The ball of this separation holds at least k
points, so the k Euclidean neighbours of its centre lie in it: a second search, there, finds them.
If the k-th separation stays, the ball holds nothing else; if not, a search of the smaller ball
follows. An exact index finds all neighbours, in three searches on average. A graph loses some in
each; where points lie at very different depths, it finds more in each shell, see `shells_of`.

Candidates are ranked by their exact distances, and the share of neighbours among them is measured.
Points of a space that is isometric to a ball are compared in that ball.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import GalleryPoints, Nearest, Points, Rows, SomeRows
from hypjax.system import console

TARGET_RECALL, NEAREST = 0.98, 10  # An export aims at this recall of this many neighbours.
LINKS, ADDED = 32, 256  # Links of a point in a graph, and candidates when a point is added.
_SAMPLE = 500  # Largest number of queries with which an export measures recall.
_BLOCK_SIZE = 2**19  # Coordinates of a thread's block; with fewer, threads wait for each other.
_TIE_TOLERANCE = 1e-5  # Distances within this relative difference are equal.
_SHELL = 4.0  # Factor that the gaps of a shell's points span.

_Way = TypeVar("_Way")  # A way to search, such as a number of candidates.
_Points = Float32[np.ndarray, "n d"]
# Search of an index: the m items nearest to each point in Euclidean distance, −1 for none.
Search = Callable[[Points, int], Int[np.ndarray, "n m"]]
# A gallery's points, and the items of it that a search lists for each query, −1 for none.
Candidates = tuple[Points, Int[np.ndarray, "n m"]]


def centres(points: Points, separations: Float[np.ndarray, " n"], space: Space) -> Points:
    """Euclidean centres of balls around points from `in_ball`, with separations as radii.

    {y: separation(x, y) ≤ s} is the Euclidean ball around x / (1 + c·s·(1 − c‖x‖²)).
    """
    factors = 1 + curvature(space) * separations / separation_factors(points, space)
    return points / factors[:, None]


def shells_of(points: Points, space: Space) -> Int[np.ndarray, " n"]:
    """Numbers of the shells in which points from `in_ball` lie; all 0 on the sphere.

    In a shell, gaps 1 − c‖x‖² differ by a factor of up to four: Euclidean distances to a query have
    nearly the order of separations.
    """
    return np.floor(np.log(separation_factors(points, space)) / np.log(_SHELL)).astype(int)


def nearest(
    search: Search,
    gallery: GalleryPoints,
    queries: _Points,
    *,
    k: int,
    space: Space,
    candidates: int,
) -> Nearest:
    """Finds the nearest items of a gallery by repeated searches in an index of Euclidean distances.

    The index of `search` holds the gallery's points as `in_ball` returns them. Each search lists
    `candidates` items, at least k and better 5·k, and the k nearest by the space's distance are
    taken; exact if the index is. Returns separations, float64, and indices of the items, nearest
    first. Where the index returns fewer than k items, the separation is infinite.
    """
    return repeat(lambda x, _: (gallery, search(x, candidates)), queries, k=k, space=space)


def repeat(
    search: Callable[[Points, Rows], Candidates],
    queries: _Points,
    *,
    k: int,
    space: Space,
    once: bool = False,
) -> Nearest:
    """Searches at the queries, then, unless `once`, at centres until k-th separations stay.

    `search` takes points at which to search, and the rows of their queries. When it returns a
    longer gallery, items keep their numbers. Returns separations and items as `nearest` does.
    """
    space.check(queries)
    points, rows = in_ball(queries, space), np.arange(len(queries))
    separations, items = np.full((len(queries), k), np.inf), np.full((len(queries), k), -1)
    at = points
    while len(rows):
        gallery, listed = search(at, rows)
        listed = np.concatenate([items[rows], listed], axis=1)  # A graph may not list them again.
        numbers, columns = np.nonzero(listed >= 0)
        candidates = listed[numbers, columns]
        found = rank(queries[rows], gallery, numbers, candidates, k=k, space=space)
        closer = found[0][:, -1] < separations[rows, -1]
        separations[rows], items[rows] = found
        rows = rows[closer & (curvature(space) > 0 and not once)]
        at = centres(points[rows], separations[rows, -1], space)
    return separations, items


def curvature(space: Space) -> float:
    """Returns c of the ball in which points of a space are compared; 0 for the sphere.

    Raises UserError unless the space is the sphere or isometric to a ball.
    """
    if space.squared:
        return 0.0
    if (ball := space.ball()) is None:
        raise UserError(f"there is no approximate search in {space}; search the .npz file")
    return float(ball.c)


def in_ball(points: Points, space: Space) -> Points:
    """Maps points to the space's ball, in float64; points of balls and spheres are unchanged."""
    return _converted(_to_ball, space, points)


def from_ball(points: Points, space: Space) -> Points:
    """Maps points of the space's ball back to the space; inverse of `in_ball`."""
    return _converted(_from_ball, space, points)


def _converted(convert: Callable, space: Space, points: Points) -> Points:
    if space.squared or space.ball() is space:
        return points
    with jax.enable_x64(True):
        return inputs.by_blocks(functools.partial(convert, space), points.astype(np.float64))


_to_ball = jax.jit(lambda space, points: space.to_ball(points))
_from_ball = jax.jit(lambda space, points: space.from_ball(points))


def separation_factors(points: Points, space: Space) -> Float64[np.ndarray, " n"]:
    """Factor of each point in separations: 1 / (1 − c‖x‖²), or 1 on the sphere.

    For points from `in_ball`, the separation is ‖x − y‖² times the factors of x and y.
    """
    return 1 / (1 - curvature(space) * np.einsum("nd,nd->n", points, points, dtype=np.float64))


def sample_queries(num_rows: int, gallery_size: int, most: int = _SAMPLE) -> tuple[Rows, SomeRows]:
    """Splits rows at random into sample queries, a tenth of the gallery's size, and other rows.

    Recall is measured on a graph without the queries, as for new ones: points in a graph are linked
    to their neighbours, so their neighbours are easier to find. Both results ascend.
    """
    rows = np.random.default_rng(0).permutation(num_rows)
    # Rounded so that a gallery of two has one query, but a gallery of one has none.
    num_queries = min(most, (gallery_size + 8) // 10)
    return np.sort(rows[:num_queries]), np.sort(rows[num_queries:])


def recall_bound(hits: Bool[np.ndarray, "s k"]) -> float:
    """Lower bound on recall for new queries: a sample's mean less two standard errors."""
    shares = hits.mean(axis=1) if len(hits) else np.ones(1)
    return max(0.0, float(shares.mean() - 2 * shares.std() / len(shares) ** 0.5))


def rank(
    queries: _Points, gallery: GalleryPoints, rows: Rows, items: Rows, *, k: int, space: Space
) -> Nearest:
    """Ranks candidates by separations, which are computed by subtraction.

    Query `rows[i]` has the candidate `items[i]`; pairs may repeat. The gallery may be
    memory-mapped. Ties keep the gallery's order. Where a query has fewer than k candidates, the
    separation is infinite and the index −1.
    """
    pairs = np.sort(rows * len(gallery) + items)  # A number for each pair.
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    rows, items = np.divmod(pairs, max(len(gallery), 1))
    points = in_ball(queries, space)
    query_factors = separation_factors(points, space)

    def measure(block: slice) -> Float64[np.ndarray, " b"]:
        candidates = in_ball(gallery[items[block]], space).astype(np.float64)
        factors = separation_factors(candidates, space) * query_factors[rows[block]]
        candidates -= points[rows[block]]
        return factors * np.einsum("pd,pd->p", candidates, candidates)

    blocks = inputs.blocks(len(rows), _BLOCK_SIZE // gallery.shape[1] + 1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Threads take longer than a single block.
        measured = (pool.map if len(blocks) > 1 else map)(measure, blocks)
        separations = np.concatenate([np.empty(0), *measured])
    columns = np.arange(len(rows)) - np.searchsorted(rows, rows)
    shape = len(queries), max(k, columns.max(initial=0) + 1)
    table, ids = np.full(shape, np.inf), np.full(shape, -1)
    table[rows, columns] = separations
    ids[rows, columns] = items
    order = np.argsort(table, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(table, order, axis=1), np.take_along_axis(ids, order, axis=1)


def recall_hits(exact: Nearest, approximate: Nearest) -> Bool[np.ndarray, "n k"]:
    """Marks each query's exact neighbours that an approximate search found, in any order."""
    # Of items at one distance, such as copies, any counts: as many are marked as were found there.
    (separations, _), (found_separations, _) = exact, approximate
    at_one_distance = functools.partial(np.isclose, rtol=_TIE_TOLERANCE, atol=0)
    ties = at_one_distance(separations[:, :, None], separations[:, None])
    num_found = at_one_distance(found_separations[:, None], separations[:, :, None]).sum(axis=2)
    return np.tril(ties).sum(axis=2) <= num_found


def tune(search: Callable[[_Way], Nearest], exact: Nearest, ways: Sequence[_Way]) -> float:
    """Searches in ever costlier ways until 98% of the exact neighbours are found.

    `search` takes a way, such as a number of candidates, and searches for sampled queries. Returns
    the recall of the last search, the lower one of the k nearest and of the single nearest
    neighbour: all neighbours of a query are easy or hard to reach together. Warns if the recall
    stays below 98%.
    """
    recall = 0.0
    for way in ways:
        hits = recall_hits(exact, search(way))
        recall = min(recall_bound(hits), recall_bound(hits[:, :1]))
        if recall >= TARGET_RECALL:
            return recall
    k = exact[1].shape[1]
    console.warn(f"the graph finds {recall:.1%} of the {k} nearest; the .npz file finds all")
    return recall
