"""Exact nearest neighbours in blocks: in memory, from disk, or over several devices."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, scores, subtraction
from hypjax.retrieval.galleries import Gallery, as_gallery
from hypjax.retrieval.scores import Precision, Score
from hypjax.retrieval.selection import Selector, num_threads
from hypjax.retrieval.subtraction import Neighbors

_BLOCK_SIZE = 512  # Queries of a block.
_SCORE_BYTES = 128 * 2**20  # Largest size of the scores of a block and a chunk.
_CHUNK_BYTES = 32 * 2**20  # Largest size of the points of a chunk.
_PART_BYTES = 32 * 2**20  # Largest size of the queries that are searched for in one pass.
_RESULT_BYTES = 32 * 2**20  # Largest size of the candidates of a block.
_MIN_BLOCK = 4  # Queries of a block are a multiple of this, so that threads can share it.
_SPARE = 4  # Candidates beyond k. The last one's score bounds those of all other items.
_MORE = 48  # Further candidates of queries that are searched for again.


def nearest_neighbors(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    *,
    k: int,
    space: Space,
    exclude_self: bool = False,
    block_size: int | None = None,
) -> tuple[Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
    """Finds the k nearest gallery items of each query, by exact search.

    The result is that of sorting all items by their distances, computed by subtraction in float64
    from the points in float32, and ties by their index. This holds for all points of the space,
    provided that the sums in a matrix product are rounded to nearest, in whatever order.

    Products only exclude items: candidates are taken by scores that bound their distances (see
    `hypjax.retrieval.scores`), and sorted by distances. Queries with candidates that may be
    incomplete are searched again with products in float64, and at last by subtraction alone. Their
    numbers are logged.

    A NumPy gallery may be memory-mapped and larger than a device's memory: it is streamed in
    chunks, and all local devices share each chunk. A JAX array is searched by the devices that hold
    it. Besides inputs and results, this takes at most 512 MB of memory.

    Args:
        queries: Points of the space, [n, d].
        gallery: Points of the space to search, [m, d].
        k: Number of neighbours per query.
        space: Space that measures the distances.
        exclude_self: Whether the gallery is the queries and no query is its own neighbour.
        block_size: Number of queries searched at once, or None for the default. It does not change
            the result.

    Returns:
        Distances [n, k], float32, and indices into the gallery [n, k], int32; nearest first.

    Raises:
        UserError: A point is not finite or not in the space, shapes do not match, or k is not
            between 1 and the number of items.
    """
    queries, gallery = inputs.check_points(queries, gallery)
    k = inputs.check_whole_number("k", k)
    if exclude_self and len(queries) != len(gallery):
        raise UserError(
            f"exclude_self requires the queries as the gallery, got {len(queries)} queries and "
            f"{len(gallery)} items"
        )
    if block_size is not None and inputs.check_whole_number("block_size", block_size) < 1:
        raise UserError(f"block_size is {block_size}; it must be at least 1")
    own_ids = np.arange(len(queries)) if exclude_self else None
    return search(queries, own_ids, gallery, k=k, space=space, block_size=block_size or _BLOCK_SIZE)


def search(
    queries: Float[ArrayLike, "n d"],
    own_ids: Int[np.ndarray, " n"] | None,
    gallery: Float[ArrayLike, "m d"],
    *,
    k: int,
    space: Space,
    block_size: int = _BLOCK_SIZE,
) -> tuple[Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
    """Like `nearest_neighbors`, but excludes a given gallery item from the results of each query.

    Args:
        queries: Points of the space, [n, d].
        own_ids: Gallery index to exclude for each query, [n]; None excludes nothing.
        gallery: Points of the space to search, [m, d].
        k: Number of neighbours per query.
        space: Space that measures the distances.
        block_size: Number of queries searched at once.

    Returns:
        Distances [n, k], float32, and indices into the gallery [n, k], int32; nearest first.

    Raises:
        UserError: A point is not finite or not in the space, or k is not between 1 and the number
            of items.
    """
    items = len(gallery) - (own_ids is not None)
    if not 1 <= k <= items:
        raise UserError(f"k is {k}, but there are {items} items for a query to find")
    if own_ids is not None:
        # If a query is not among its k + 1 nearest items, the last of these is dropped instead.
        found = search(queries, None, gallery, k=k + 1, space=space, block_size=block_size)
        return _remove_self(own_ids, *found)
    found = _nearest(queries, gallery, space, k, block_size)
    return found.distances, found.ids


def _remove_self(
    own_ids: Int[np.ndarray, " n"],
    distances: Float[np.ndarray, "n k"],
    ids: Int[np.ndarray, "n k"],
) -> tuple[Float[np.ndarray, "n k-1"], Int[np.ndarray, "n k-1"]]:
    """Removes one item from each row: the query itself if it is there, otherwise the last."""
    kept = ids != own_ids[:, None]
    kept[kept.all(axis=1), -1] = False
    shape = (len(ids), ids.shape[1] - 1)
    return distances[kept].reshape(shape), ids[kept].reshape(shape)


def _nearest(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    space: Space,
    k: int,
    block_size: int,
) -> Neighbors:
    """Searches with products, and again with more effort for queries with uncertain neighbours."""
    searched = as_gallery(gallery)
    score = Score.around(space, searched.sample())
    depth = _Depth(k, min(k + _SPARE, len(gallery)))
    found = _by_products(queries, searched, score, depth, block_size)
    effort = [len(queries)]
    uncertain = np.flatnonzero(~found.certain)
    effort.append(len(uncertain))
    points = inputs.float32(np.asarray(queries[uncertain]))
    if not subtraction.is_cheapest(points):
        depth = _Depth(k, min(2 * k + _MORE, len(gallery)))
        for rows in scores.crowds(points):
            score = Score.around(space, points[rows], Precision.DOUBLE)
            again = _by_products(points[rows], searched, score, depth, block_size)
            _update(found, uncertain[rows], again)
        uncertain = np.flatnonzero(~found.certain)
    effort.append(len(uncertain))
    if len(uncertain):
        points = inputs.float32(np.asarray(queries[uncertain]))
        _update(found, uncertain, subtraction.nearest(space, points, gallery, k))
    scores.report("neighbours", *effort)
    return found


def _update(found: Neighbors, rows: Int[np.ndarray, " r"], again: Neighbors) -> None:
    for array, part in zip(found, again, strict=True):
        array[rows] = part


class _Depth(NamedTuple):
    """How many items are selected.

    Attributes:
        k: Number of neighbours.
        candidates: Number of items that are selected by their scores.
    """

    k: int
    candidates: int


class _Block(NamedTuple):
    """Some queries, padded to the block size.

    Attributes:
        points: Points of the space, float32.
        vectors: Query vectors of the scores.
    """

    points: Float[Array, "b d"]
    vectors: Float[Array, "b v"]


def _by_products(
    queries: Float[ArrayLike, "n d"],
    gallery: Gallery,
    score: Score,
    depth: _Depth,
    block_size: int,
) -> Neighbors:
    """Selects candidates by their scores, and sorts them by their distances."""
    mesh, (k, candidates) = gallery.mesh, depth
    itemsize, dim = np.dtype(score.precision.value).itemsize, queries.shape[1]
    most = max(_RESULT_BYTES // (2 * itemsize * candidates), _MIN_BLOCK)
    size = inputs.round_up(min(block_size, len(queries), most), _MIN_BLOCK)
    limits = (gallery.rows, _SCORE_BYTES // (itemsize * size), _CHUNK_BYTES // (4 * dim))
    rows = inputs.round_up(max(min(limits), 1), inputs.MULTIPLE)
    per_query = itemsize * max(dim, 2 * candidates)
    step = inputs.round_up(max(_PART_BYTES // per_query, 1), size)
    parts = []
    with ThreadPoolExecutor(num_threads(mesh)) as pool:
        selector = Selector(mesh, candidates, (size, rows), score.precision, pool)
        for start in range(0, len(queries), step):
            blocks = _blocks(
                queries, range(start, min(start + step, len(queries)), size), score, mesh
            )
            best = [None] * len(blocks)
            for chunk in gallery.chunks(score, rows):
                for i, block in enumerate(blocks):
                    best[i] = selector.update(chunk, block.vectors, best[i])
            sort = functools.partial(subtraction.nearest_candidates, score.space, gallery, k)
            parts.extend(pool.map(sort, (block.points for block in blocks), best))
    found = Neighbors(
        *(np.concatenate(arrays)[: len(queries)] for arrays in zip(*parts, strict=True))
    )
    return found._replace(certain=found.certain | (candidates == gallery.size))


def _blocks(
    queries: Float[ArrayLike, "n d"], starts: range, score: Score, mesh: Mesh
) -> list[_Block]:
    blocks, size = [], starts.step
    for start in starts:
        points = inputs.float32(queries[start : min(start + size, starts.stop)])
        score.space.check(points, first=start)
        points = jax.device_put(inputs.pad_rows(points, size), NamedSharding(mesh, P()))
        blocks.append(_Block(points, score.of(points).query))
    return blocks
