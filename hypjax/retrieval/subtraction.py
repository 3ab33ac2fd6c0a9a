"""Distances by subtraction in float64, which decide where the scores of products cannot.

Points are float32 numbers, taken as exact. Items at equal separations tie, and ties are in the
order of the gallery.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.galleries import Gallery
from hypjax.retrieval.inputs import Labelled
from hypjax.retrieval.selection import Best

_FEW = 64  # Different queries for which subtraction costs less than products in float64.
_FETCH_BYTES = 16 * 2**20  # Largest size of points that are fetched at once.
_SEPARATION_BYTES = 64 * 2**20  # Largest size of separations that are held at once.
_BATCH_ELEMENTS = 2**16  # Coordinates that are subtracted at once, so that they fit into a cache.


class Neighbors(NamedTuple):
    """The nearest items of each query, nearest first.

    Attributes:
        distances: Distances, rounded from float64.
        ids: Indices into the gallery.
        certain: Whether no other item can be among them.
    """

    distances: Float[np.ndarray, "n k"]
    ids: Int[np.ndarray, "n k"]
    certain: Bool[np.ndarray, " n"]


def nearest_candidates(
    space: Space, gallery: Gallery, k: int, queries: Float[Array, "b d"], best: Best
) -> Neighbors:
    """Sorts candidates by their distances.

    Args:
        space: Space of the points.
        gallery: Points that were searched.
        k: Number of neighbours, at most c.
        queries: Points of the space, [b, d].
        best: Candidates, [b, c]. No other item has a higher score than the last one.

    Returns:
        The k nearest candidates. They are certain if all others surely come after the k-th.
    """
    size, candidates = best.ids.shape
    items = max(_FETCH_BYTES // (4 * queries.shape[1]), 1)
    width, height = min(items, candidates), max(items // candidates, 1)
    separations = np.empty((size, candidates))
    for row, column in itertools.product(range(0, size, height), range(0, candidates, width)):
        part = np.s_[row : row + height, column : column + width]
        points, rows = gallery.points(best.ids[part])
        with jax.enable_x64(True):
            lanes = [(0, 0), (0, -rows.shape[1] % inputs.LANES)]
            rows = (np if isinstance(rows, np.ndarray) else jnp).pad(rows, lanes)
            found = _candidate_separations(space, queries[part[0]], points, rows)
        separations[part] = np.asarray(found)[:, : separations[part].shape[1]]
    ids, last = np.asarray(best.ids), np.asarray(best.scores)[:, -1]
    order = _ascending(separations, ids)[:, :k]
    separations = np.take_along_axis(separations, order, axis=1)
    return Neighbors(
        _distances(space, separations),
        np.take_along_axis(ids, order, axis=1),
        (-separations[:, -1] > last) | (candidates == gallery.size),
    )


@jax.jit
def _candidate_separations(
    space: Space, queries: Float[Array, "b d"], points: Float[Array, "m d"], rows: Int[Array, "b c"]
) -> Float[Array, "b c"]:
    def separations(inputs: tuple[Array, Array]) -> Float[Array, " c"]:
        query, rows = inputs
        return space.separation(query.astype(jnp.float64), points[rows].astype(jnp.float64))

    batch = max(1, _BATCH_ELEMENTS // (rows.shape[1] * queries.shape[1]))
    return lax.map(separations, (queries, rows), batch_size=batch)


def _ascending(
    separations: Float[np.ndarray, "b c"], ids: Int[np.ndarray, "b c"]
) -> Int[np.ndarray, "b c"]:
    """Places of the candidates in each row by separation, ties by id."""
    order = np.argsort(separations, axis=1)
    tied = np.diff(np.take_along_axis(separations, order, axis=1), axis=1) == 0
    for row in np.flatnonzero(tied.any(axis=1)):
        order[row] = np.lexsort((ids[row], separations[row]))
    return order


def _distances(space: Space, separations: Float[np.ndarray, "b k"]) -> Float[np.ndarray, "b k"]:
    """Distances at ascending separations, in float32 and ascending, too."""
    with jax.enable_x64(True):
        distances = np.asarray(_distance_at(space, separations), np.float32)
    return np.maximum.accumulate(distances, axis=1)


@jax.jit
def _distance_at(space: Space, separations: Float[Array, "b k"]) -> Float[Array, "b k"]:
    return space.distance_at(separations)


def nearest(
    space: Space, queries: Float[np.ndarray, "n d"], gallery: Float[np.ndarray, "m d"], k: int
) -> Neighbors:
    """The k nearest items of each query, from its distances to the whole gallery."""
    unique, inverse = _unique_rows(queries)
    ids, found = np.empty((len(unique), k), np.int32), np.empty((len(unique), k))
    for row, separations in _separations(space, unique, gallery):
        kth = np.partition(separations, k - 1)[k - 1]
        nearer = np.flatnonzero(separations < kth)
        tied = np.flatnonzero(separations == kth)[: k - len(nearer)]
        order = np.argsort(separations[nearer], kind="stable")
        ids[row] = np.concatenate([nearer[order], tied])
        found[row] = separations[ids[row]]
    return Neighbors(_distances(space, found)[inverse], ids[inverse], np.ones(len(queries), bool))


def ranks(space: Space, queries: Labelled, gallery: Labelled) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match, from its distances to the whole gallery.

    Args:
        space: Space of the points.
        queries: Queries with at least one match. If they have ids, each is left out of its own
            results.
        gallery: Points to search.

    Returns:
        Ranks from 0, [n], int32.
    """
    found = np.empty(len(queries.labels), np.int32)
    own_ids = np.full(len(found), -1) if queries.ids is None else queries.ids
    of_class = inputs.items_of_classes(gallery.labels)
    unique, inverse = _unique_rows(inputs.float32(np.asarray(queries.points)))
    copies = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse)))
    for point, separations in _separations(space, unique, gallery.points):
        for row in copies[point]:
            items = of_class[queries.labels[row]]
            found[row] = _rank(separations, items[items != own_ids[row]], own_ids[row])
    return found


def _rank(separations: Float[np.ndarray, " m"], matches: Int[np.ndarray, " r"], own: int) -> int:
    """Number of items before the nearest match, without the query's own (−1 for none)."""
    first = matches[np.argmin(separations[matches])]  # The smallest index among ties.
    nearest = separations[first]
    before = np.count_nonzero(separations < nearest)
    before += np.count_nonzero(separations[:first] == nearest)
    return before - (own >= 0 and (separations[own], own) < (nearest, first))


def is_cheapest(queries: Iterable[Float[np.ndarray, "n d"]]) -> bool:
    """Whether subtraction costs less than another search with products.

    Args:
        queries: Points to search for, in parts.
    """
    found: set[bytes] = set()
    for part in queries:
        for rows in (part[: _FEW + 1], part[_FEW + 1 :]):
            found.update(row.tobytes() for row in _unique_rows(rows)[0])
            if len(found) > _FEW:
                return False
    return True


def _unique_rows(
    x: Float[np.ndarray, "n d"],
) -> tuple[Float[np.ndarray, "u d"], Int[np.ndarray, " n"]]:
    """The different rows, and which of them each row is."""
    rows = np.ascontiguousarray(x).view(np.dtype((np.void, x.shape[1] * x.itemsize))).ravel()
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    return x[first], inverse


def _separations(
    space: Space, queries: Float[np.ndarray, "n d"], gallery: Float[np.ndarray, "m d"]
) -> Iterator[tuple[int, Float[np.ndarray, " m"]]]:
    """Yields each query's number and its separations from all items, in float64."""
    size, dim = len(gallery), queries.shape[1]
    block = int(np.clip(_SEPARATION_BYTES // (8 * size), 1, len(queries)))
    rows = inputs.round_up(min(max(_FETCH_BYTES // (4 * dim), 1), size), inputs.LANES)
    for start in range(0, len(queries), block):
        part = inputs.pad_rows(queries[start : start + block], block)
        separations = np.empty((block, size))
        for first in range(0, size, rows):
            items = inputs.float32(np.asarray(gallery[first : first + rows]))
            with jax.enable_x64(True):
                found = _separation_matrix(space, part, inputs.pad_rows(items, rows))
            separations[:, first : first + rows] = np.asarray(found)[:, : len(items)]
        yield from zip(range(start, min(start + block, len(queries))), separations, strict=False)


@jax.jit
def _separation_matrix(
    space: Space, queries: Float[Array, "b d"], items: Float[Array, "r d"]
) -> Float[Array, "b r"]:
    items = items.astype(jnp.float64)
    return lax.map(lambda query: space.separation(query, items), queries.astype(jnp.float64))
