"""Exact nearest neighbours in blocks: in memory, from disk, or over several devices."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, scores, subtraction
from hypjax.retrieval.galleries import as_gallery
from hypjax.retrieval.scores import Precision, Score
from hypjax.retrieval.selection import Best, Selector, num_threads
from hypjax.retrieval.subtraction import Neighbors

_BLOCK_SIZE = 512  # Queries of a block.
_SCORE_BYTES = 128 * 2**20  # Largest size of the scores of a block and a chunk.
_CHUNK_BYTES = 32 * 2**20  # Largest size of the points of a chunk.
_PART_BYTES = 32 * 2**20  # Largest size of the queries that are searched for in one pass.
_RESULT_BYTES = 4 * 2**20  # Largest size of the candidates of a block.
_MIN_BLOCK = 4  # Queries of a block are a multiple of this.
_SPARE = 2  # Candidates beyond k. The last one's score bounds those of all other items.
_MORE = 48  # The same beyond 2·k, for queries that are searched for again.
_SAMPLE = 4096  # Queries whose mean is the centre of a crowd.


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
    from the points in float32, and ties by their index: no rounding error of a product changes it.
    This holds for all points of the space with normal float32 coordinates, provided that each sum
    of a matrix product is rounded to nearest, in whatever order; items whose distances differ by no
    more than roundings in float64 may come in either order, but duplicates are in their order.

    Products only exclude items: candidates are taken by scores that bound their distances (see
    `hypjax.retrieval.scores`), and sorted by distances. Queries with candidates that may be
    incomplete are searched again with products in float64, and at last by subtraction alone. Their
    numbers are logged.

    A NumPy gallery may be memory-mapped and larger than a device's memory: it is streamed in
    chunks, and all local devices share each chunk. A JAX array is searched by the devices that hold
    it. Besides inputs and results, this holds at most 512 MB of memory, of host and devices
    together; the C library may keep some of what was freed.

    Args:
        queries: Points of the space, [n, d].
        gallery: Points of the space to search, [m, d].
        k: Number of neighbours per query.
        space: Space that measures the distances.
        exclude_self: Whether the gallery is the queries and no query is its own neighbour.
        block_size: Number of queries searched at once, or None for the default. It does not change
            the result, except for the order of items whose distances agree but for roundings.

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
    inputs.check_own_ids(own_ids, len(queries), len(gallery))
    check_number(k, gallery, own_ids)
    if not len(queries):
        return np.empty((0, k), np.float32), np.empty((0, k), np.int32)
    task = _Search(queries, own_ids, gallery, k, space, block_size)
    task.by_products(np.arange(len(queries)), Score.around(space, task.gallery.sample()), _SPARE)
    uncertain = task.uncertain()
    effort = [len(queries), len(uncertain)]
    if not subtraction.is_cheapest(task.points(uncertain)):
        for crowd in scores.crowds(task.points(uncertain)):
            score = Score.around(space, task.sample(uncertain[crowd]), Precision.DOUBLE)
            task.by_products(uncertain[crowd], score, k + _MORE)
        uncertain = task.uncertain()
    effort.append(len(uncertain))
    task.by_subtraction(uncertain)
    scores.report("neighbours", *effort)
    return task.found.distances, task.found.ids


def check_number(
    k: int, gallery: Float[ArrayLike, "m d"], own_ids: Int[np.ndarray, " n"] | None
) -> None:
    """Checks the number of neighbours to find.

    Raises:
        UserError: It is not between 1 and the number of items.
    """
    items = len(gallery) - (own_ids is not None)
    if not 1 <= k <= items:
        raise UserError(f"k is {k}, but there are {items} items for a query to find")


class _Block(NamedTuple):
    """Some queries, padded to the block size.

    Attributes:
        rows: Rows of the queries.
        points: Points of the space, float32.
        vectors: Query vectors of the scores.
    """

    rows: Int[np.ndarray, " r"]
    points: Float[Array, "b d"]
    vectors: tuple[Float[Array, "b v"], ...]


class _Search:
    """A search, and what it has found so far."""

    def __init__(
        self,
        queries: Float[ArrayLike, "n d"],
        own_ids: Int[np.ndarray, " n"] | None,
        gallery: Float[ArrayLike, "m d"],
        k: int,
        space: Space,
        block_size: int,
    ) -> None:
        """Allocates the results; the arguments are those of `search`."""
        self._queries, self._own_ids, self._points = queries, own_ids, gallery
        self._space, self._block_size = space, block_size
        self.gallery = as_gallery(gallery)
        # A query that is not among its k + 1 nearest items is not among its k nearest ones either.
        self._listed = k + (own_ids is not None)
        shape = (len(queries), k)
        arrays = np.empty(shape, np.float32), np.empty(shape, np.int32)
        self.found = Neighbors(*arrays, np.zeros(len(queries), bool))

    def uncertain(self) -> Int[np.ndarray, " r"]:
        """Rows of the queries whose neighbours are not known yet."""
        return np.flatnonzero(~self.found.certain)

    def points(self, rows: Int[np.ndarray, " r"]) -> Iterator[Float[np.ndarray, "c d"]]:
        """Yields some of the queries in order, not too many at once."""
        return (self._take(part) for part in _split(rows, _PART_BYTES // (4 * self._dim)))

    def sample(self, rows: Int[np.ndarray, " r"]) -> Float[np.ndarray, "s d"]:
        """At most `_SAMPLE` of the given queries."""
        return self._take(rows[:: -(-len(rows) // _SAMPLE)])

    def by_products(self, rows: Int[np.ndarray, " r"], score: Score, spare: int) -> None:
        """Sorts the items with the highest scores by their distances.

        Args:
            rows: Rows of the queries to search for.
            score: How points are compared.
            spare: Number of items beyond those needed. The last one's score bounds those of all
                others.
        """
        candidates = min(self._listed + spare, self.gallery.size)
        itemsize = np.dtype(score.precision.value).itemsize
        most = max(_RESULT_BYTES // (2 * itemsize * candidates), _MIN_BLOCK)
        size = inputs.round_up(min(self._block_size, len(rows), most), _MIN_BLOCK)
        limits = _SCORE_BYTES // (itemsize * size), _CHUNK_BYTES // (itemsize * self._dim)
        shape = size, inputs.round_up(max(min(self.gallery.rows, *limits), 1), inputs.MULTIPLE)
        blocks_of_part = _PART_BYTES // (itemsize * max(self._dim, 2 * candidates) * size)
        with ThreadPoolExecutor(num_threads(self.gallery.mesh)) as pool:
            selector = Selector(self.gallery.mesh, candidates, shape, score, pool)
            for part in _split(rows, size * max(blocks_of_part, 1)):
                blocks = [self._block(rows, score, size) for rows in _split(part, size)]
                best = [None] * len(blocks)
                for chunk in self.gallery.chunks(score, shape[1]):
                    for i, block in enumerate(blocks):
                        best[i] = selector.update(chunk, block.vectors, best[i])
                list(pool.map(self._sort, blocks, best))

    def by_subtraction(self, rows: Int[np.ndarray, " r"]) -> None:
        """Measures all distances of some queries."""
        for part in _split(rows, _PART_BYTES // (4 * self._dim)):
            listed = subtraction.nearest(self._space, self._take(part), self._points, self._listed)
            self._store(part, listed)

    @property
    def _dim(self) -> int:
        return self._queries.shape[1]

    def _take(self, rows: Int[np.ndarray, " r"]) -> Float[np.ndarray, "r d"]:
        return inputs.float32(np.asarray(self._queries[rows]))

    def _block(self, rows: Int[np.ndarray, " r"], score: Score, size: int) -> _Block:
        points = inputs.float32(self._queries[rows])
        self._space.check(points, first=rows[0])
        everywhere = NamedSharding(self.gallery.mesh, P())
        points = jax.device_put(inputs.pad_rows(points, size), everywhere)
        return _Block(rows, points, score.of(points).query)

    def _sort(self, block: _Block, best: Best) -> None:
        listed = subtraction.nearest_candidates(
            self._space, self.gallery, self._listed, block.points, best
        )
        self._store(block.rows, Neighbors(*(array[: len(block.rows)] for array in listed)))

    def _store(self, rows: Int[np.ndarray, " r"], listed: Neighbors) -> None:
        distances, ids, certain = listed
        if self._own_ids is not None:
            kept = ids != self._own_ids[rows, None]
            kept[kept.all(axis=1), -1] = False  # The query was not found: drop the last item.
            distances, ids = (x[kept].reshape(len(rows), -1) for x in (distances, ids))
        self.found.distances[rows], self.found.ids[rows] = distances, ids
        self.found.certain[rows] = certain


def _split(rows: Int[np.ndarray, " r"], size: int) -> list[Int[np.ndarray, " s"]]:
    """Splits rows into parts of a size; the last one may be smaller."""
    return np.split(rows, range(max(size, 1), len(rows), max(size, 1))) if len(rows) else []
