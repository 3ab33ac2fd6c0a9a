"""Separations by subtraction in float64: the arithmetic that defines the order of all results.

Coordinates are float32, taken as exact, and their differences lose no digits. Subtraction takes
several times as long as a matrix product. So only a query's candidates are measured, or the whole
gallery for the few queries whose order products cannot certify, see `certify`.
"""

import itertools
import logging
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import GalleryPoints, Ids, Nearest, Points, Rows
from hypjax.retrieval.scores import DOUBLE, Score
from hypjax.retrieval.selection import StreamedGallery

_LOG = logging.getLogger(__name__)
_FETCH_BYTES = 16 * 2**20  # Largest size of items that are read at once.
_SEPARATION_BYTES = 64 * 2**20  # Largest size of separations that are in memory at once.
_BATCH_ELEMENTS = 2**16  # Coordinates that are subtracted at once, so that they fit into a cache.
_MAX_CROWDS, _CROWD_SIZE = 16, 1024  # Largest number of crowds, and their least mean size.
_CENTRED_POINTS = 4096  # Largest number of points whose mean is the centre of a crowd.
_FEW_QUERIES = 64  # Distinct queries for which subtraction costs less than products in float64.


def certify(
    result: str, queries: Points, score: Score, by_products: Callable, by_subtraction: Callable
) -> None:
    """Answers all queries exactly, and logs how many queries each arithmetic answered.

    Products in float32 answer most queries. Where points crowd, rounding their lengths hides their
    differences: products in float64 around the centre of each crowd answer those queries. Queries
    with duplicates or near-ties beyond the candidates remain for `by_subtraction`. `by_products`
    returns the rows of queries that it cannot certify. `result` names what is searched for.
    """
    uncertain = by_products(np.arange(len(queries)), score)
    num_uncertain_in_float32 = len(uncertain)
    if not _are_few(queries, uncertain):
        remaining = []
        for crowd in _crowds(queries, uncertain):
            sample = inputs.host_rows(queries, crowd[:: -(-len(crowd) // _CENTRED_POINTS)])
            remaining.append(by_products(crowd, Score.around(score.space, sample, DOUBLE)))
        uncertain = np.sort(np.concatenate(remaining))
    for rows in inputs.split(uncertain, inputs.PART_BYTES // (4 * queries.shape[1])):
        by_subtraction(rows)
    in_float32 = len(queries) - num_uncertain_in_float32
    in_float64 = num_uncertain_in_float32 - len(uncertain)
    _LOG.info(
        f"{result} of {len(queries)} queries, all exact: certified={in_float32} by products in "
        f"float32, {in_float64} by products in float64, {len(uncertain)} by subtraction"
    )


def _are_few(queries: Points, rows: Rows) -> bool:
    """Whether the rows hold few distinct queries: then subtraction beats products in float64."""
    distinct: set[bytes] = set()
    for block in inputs.split(rows, _CROWD_SIZE):
        distinct.update(row.tobytes() for row in inputs.host_rows(queries, block))
        if len(distinct) > _FEW_QUERIES:
            return False
    return True


def _crowds(queries: Points, rows: Rows) -> list[Rows]:
    """Splits rows at the widest gaps between projections of their points on a random line."""
    line = np.random.default_rng(0).normal(size=queries.shape[1])
    blocks = inputs.split(rows, _CROWD_SIZE)
    projected = np.concatenate([inputs.host_rows(queries, block) @ line for block in blocks])
    order = np.argsort(projected)
    num_cuts = int(np.clip(len(rows) // _CROWD_SIZE, 1, _MAX_CROWDS)) - 1
    widest = np.argsort(np.diff(projected[order]))[len(rows) - 1 - num_cuts :]
    return np.split(rows[order], np.sort(widest) + 1)


def candidate_separations(
    space: Space, queries: Points | Array, gallery: StreamedGallery, ids: Ids
) -> Float[np.ndarray, "n k"]:
    """Separations of queries from their candidates `ids`, which are read in blocks."""
    separations = np.empty(ids.shape)
    max_items = max(_FETCH_BYTES // (4 * queries.shape[1]), 1)
    query_blocks = inputs.blocks(len(ids), max_items // ids.shape[1])
    for block in itertools.product(query_blocks, inputs.blocks(ids.shape[1], max_items)):
        points, rows = gallery.points(ids[block])
        padded_rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % inputs.LANES)])
        with jax.enable_x64(True):
            padded = _row_separations(space, queries[block[0]], points, padded_rows)
        separations[block] = np.asarray(padded)[:, : rows.shape[1]]
    return separations


def item_separations(
    space: Space, query: Float[np.ndarray, " d"], gallery: StreamedGallery, items: Rows
) -> Float[np.ndarray, " r"]:
    """Separations of one query from items."""
    # Padded by repetition to a power of two, so that few programs are compiled.
    padded = np.resize(items, (1, max(1 << (len(items) - 1).bit_length(), inputs.LANES)))
    return candidate_separations(space, query[None], gallery, padded)[0, : len(items)]


@jax.jit
def _row_separations(
    space: Space, queries: Float[Array, "b d"], points: Float[Array, "m d"], rows: Int[Array, "b c"]
) -> Float[Array, "b c"]:
    """Separations of each query from the points at its rows."""

    def separations(query_and_rows: tuple[Array, Array]) -> Array:
        query, rows = query_and_rows
        return space.separation(query.astype(jnp.float64), points[rows].astype(jnp.float64))

    batch = max(1, _BATCH_ELEMENTS // (rows.shape[1] * queries.shape[1]))
    return lax.map(separations, (queries, rows), batch_size=batch)


def gallery_separations(
    space: Space, queries: Points, gallery: GalleryPoints
) -> Iterator[tuple[Rows, Float[np.ndarray, " m"]]]:
    """Yields, for each distinct query, the rows that hold it and its separations from all items."""
    # Queries are often duplicates: a collapsed model maps all images to one point.
    unique, inverse = unique_rows(queries)
    copies = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    size, dim = len(gallery), queries.shape[1]
    # Powers of two, or each evaluation would compile a program for its number of queries.
    largest = 1 << (len(unique) - 1).bit_length()
    height = int(np.clip(_SEPARATION_BYTES // (8 * size), 1, largest))
    width = inputs.round_up(min(max(_FETCH_BYTES // (4 * dim), 1), size), inputs.LANES)
    for rows in inputs.blocks(len(unique), height):
        block = inputs.pad_rows(unique[rows], height)
        separations = np.empty((height, size))
        for columns in inputs.blocks(size, width):
            items = inputs.host_rows(gallery, columns)
            with jax.enable_x64(True):
                matrix = _all_separations(space, block, inputs.pad_rows(items, width))
            separations[:, columns] = np.asarray(matrix)[:, : len(items)]
        yield from zip(copies[rows], separations, strict=False)


@jax.jit
def _all_separations(
    space: Space, queries: Float[Array, "b d"], items: Float[Array, "r d"]
) -> Float[Array, "b r"]:
    items = items.astype(jnp.float64)
    return lax.map(lambda query: space.separation(query, items), queries.astype(jnp.float64))


def unique_rows(x: Points) -> tuple[Float[np.ndarray, "u d"], Rows]:
    """The distinct rows of an array, and the index among them of each row of the array."""
    rows = np.ascontiguousarray(x).view(np.dtype((np.void, x.shape[1] * x.itemsize))).ravel()
    _, distinct, inverse = np.unique(rows, return_index=True, return_inverse=True)
    return x[distinct], inverse


def nearest_candidates(
    space: Space, queries: Points | Array, gallery: StreamedGallery, ids: Ids, k: int
) -> Nearest:
    """Separations and ids of each query's k nearest candidates, ties by id."""
    separations = candidate_separations(space, queries, gallery, ids)
    # Sorting by two keys is slow, and ties are rare.
    order = np.argsort(separations, axis=1)
    tied = np.diff(np.take_along_axis(separations, order, axis=1), axis=1) == 0
    for row in np.flatnonzero(tied.any(axis=1)):
        order[row] = np.lexsort((ids[row], separations[row]))
    order = order[:, :k]
    return np.take_along_axis(separations, order, axis=1), np.take_along_axis(ids, order, axis=1)


def nearest_items(space: Space, queries: Points, gallery: GalleryPoints, k: int) -> Nearest:
    """Distances and ids of each query's k nearest items in the whole gallery, ties by id."""
    ids = np.empty((len(queries), k), np.int32)
    separations = np.empty((len(queries), k))
    for rows, all_separations in gallery_separations(space, queries, gallery):
        kth = np.partition(all_separations, k - 1)[k - 1]
        nearest = np.flatnonzero(all_separations <= kth)
        nearest = nearest[np.argsort(all_separations[nearest], kind="stable")][:k]
        ids[rows] = nearest
        separations[rows] = all_separations[nearest]
    return distances(space, separations), ids


def distances(space: Space, separations: Float[np.ndarray, "b k"]) -> Float[np.ndarray, "b k"]:
    """Converts ascending separations to distances, in float32."""
    # Padded, by at most a quarter beyond `LANES`, so that few programs are compiled.
    count = separations.size
    size = inputs.round_up(count, max(1 << count.bit_length() >> 3, inputs.LANES))
    padded = inputs.pad_rows(separations.ravel(), size)
    with jax.enable_x64(True):
        converted = np.asarray(_distance_at(space, padded), np.float32)
    converted = converted[:count].reshape(separations.shape)
    converted = np.where(np.isinf(separations), np.inf, converted)  # Where there are fewer items.
    # `distance_at` may be off by a rounding, but distances of results must not descend.
    return np.maximum.accumulate(converted, axis=1)


_distance_at = jax.jit(lambda space, separations: space.distance_at(separations))
