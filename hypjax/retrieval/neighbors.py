"""Exact nearest neighbours in blocks: in memory, from disk, or over several devices."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, selection, subtraction
from hypjax.retrieval.box_tree import BoxTree
from hypjax.retrieval.inputs import GalleryPoints, Ids, Nearest, OwnIds, Points, Rows, SomeRows
from hypjax.retrieval.scores import DOUBLE, Score
from hypjax.retrieval.selection import StreamedGallery

_BLOCK_SIZE = 512  # Queries of a block.
_SCORE_BYTES = 128 * 2**20  # Largest size of the scores of a block and a chunk.
_CHUNK_BYTES = 32 * 2**20  # Largest size of the points of a chunk.
_RESULT_BYTES = 4 * 2**20  # Largest size of the candidates of a block.
_MIN_BLOCK = 4  # Queries of a block are a multiple of this, unless there is only one.
_SPARE_CANDIDATES = 2  # Beyond k. The last one's score bounds the scores of all other items.
_MORE_CANDIDATES = 48  # Candidates beyond 2·k in a second search.


def nearest_neighbors(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    *,
    k: int,
    space: Space,
    exclude_self: bool = False,
    block_size: int | None = None,
) -> Nearest:
    """Finds the k nearest gallery items of each query, by exact search.

    Queries and gallery are points of the space. With `exclude_self`, the gallery is the queries and
    no query is its own neighbour. `block_size` is the number of queries searched at once. Returns
    distances, float32, and gallery indices, int32, both [n, k], nearest first. Raises UserError if
    a point is not finite or not in the space, or if shapes or k do not fit.

    The result equals sorting all items by separation, ties by index, where `Space.separation`
    subtracts points, float32, in float64. No rounding error of a product changes the result, see
    `hypjax.retrieval`. Exactness holds for points with normal float32 coordinates if sums in matrix
    products are rounded to nearest, in any order. Items whose distances differ by roundings in
    float64 may come in either order; duplicates stay in the gallery's order.

    The gallery may be memory-mapped and larger than a device's memory: it is streamed in chunks,
    and all local devices share each chunk. In addition to inputs and results, a search holds at
    most 512 MB of host and device memory; the C library may keep some of the freed memory.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Sphere
        >>> from hypjax.retrieval import nearest_neighbors
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> distances, ids = nearest_neighbors(points[:1], points, k=3, space=Sphere())
        >>> print(ids, distances.round(2))
        [[0 1 2]] [[0.  0.4 2. ]]
    """
    queries, gallery = inputs.check_points(queries, gallery)
    if exclude_self and not np.array_equal(queries, gallery):
        raise UserError("exclude_self requires the queries as the gallery")
    own_ids = np.arange(len(queries)) if exclude_self else None
    return search(queries, own_ids, gallery, k=k, space=space, block_size=block_size or _BLOCK_SIZE)


def search(
    queries: Points,
    own_ids: OwnIds,
    gallery: GalleryPoints | StreamedGallery,
    *,
    k: int,
    space: Space,
    block_size: int = _BLOCK_SIZE,
) -> Nearest:
    """Finds nearest neighbours, as `nearest_neighbors` does, without each query's own item.

    `own_ids` holds the gallery indices of own items, [n], −1 for none; None excludes no item.
    """
    inputs.check_search(k, own_ids, len(queries), len(gallery))
    if not isinstance(gallery, StreamedGallery):
        gallery = StreamedGallery(gallery)
    queries = np.asarray(queries)
    if (dim := queries.shape[-1]) != gallery.array.shape[1]:
        raise UserError(f"queries have {dim} coordinates, the gallery {gallery.array.shape[1]}")
    running = _Search(queries, own_ids, gallery, space, k, block_size)
    tree = gallery.tree(space, queries, running.num_listed) if len(queries) else None
    if tree is not None:
        running.by_tree(tree)
    elif len(queries):
        functions = running.by_products, running.by_subtraction
        subtraction.certify("neighbours", queries, Score.around(space, gallery.centre), *functions)
    return running.distances, running.ids


@dataclasses.dataclass
class _Search:
    """A search, with its results: `distances` and `ids`, which are filled in by blocks."""

    queries: Points
    own_ids: OwnIds
    gallery: StreamedGallery
    space: Space
    k: int
    block_size: int

    def __post_init__(self) -> None:
        shape = len(self.queries), self.k
        self.distances = np.empty(shape, np.float32)
        self.ids = np.empty(shape, np.int32)
        self.certain = np.zeros(len(self.queries), bool)
        self.num_listed = self.k + (self.own_ids is not None)  # A query may find itself.

    def by_products(self, rows: Rows, score: Score) -> SomeRows:
        """Selects candidates by scores and sorts them by distance; returns uncertain queries."""
        spare = self.k + _MORE_CANDIDATES if score.dtype == DOUBLE else _SPARE_CANDIDATES
        # Separations are computed for a multiple of `LANES` items in any case.
        num_candidates = inputs.round_up(self.num_listed + spare, inputs.LANES)
        num_candidates = min(num_candidates, len(self.gallery))
        height, width, blocks_at_once = self._sizes(len(rows), num_candidates, score)
        shape = height, width
        with ThreadPoolExecutor(self.gallery.num_threads) as pool:
            selector = selection.Selector(self.gallery, num_candidates, shape, score, pool)
            for pass_rows in inputs.split(rows, height * blocks_at_once):
                # The gallery is streamed once for several blocks: it may lie on a disk.
                blocks = inputs.split(pass_rows, height)
                points = [self._points(block, height) for block in blocks]
                vectors = [score.factors(queries, role="query").query for queries in points]
                best: list[selection.TopK | None] = [None] * len(blocks)
                for chunk in self.gallery.chunks(score, width):
                    for i, queries in enumerate(vectors):
                        best[i] = selector.update(chunk, queries, best[i])
                list(pool.map(self._sort, blocks, points, best))
        return rows[~self.certain[rows]]

    def _sizes(self, num_queries: int, num_candidates: int, score: Score) -> tuple[int, int, int]:
        """Numbers of queries in a block, items of a chunk on a device, and blocks in a pass."""
        itemsize, dim = score.dtype.itemsize, self.queries.shape[1]
        max_height = max(_RESULT_BYTES // (2 * itemsize * num_candidates), _MIN_BLOCK)
        height = min(self.block_size, num_queries, max_height)
        height = 1 if num_queries == 1 else inputs.round_up(height, _MIN_BLOCK)
        max_width = min(_SCORE_BYTES // (itemsize * height), _CHUNK_BYTES // (itemsize * dim))
        num_chunks = -(-self.gallery.rows // max(max_width, 1))
        # Chunks of equal widths need little padding.
        width = inputs.round_up(-(-self.gallery.rows // num_chunks), inputs.MULTIPLE)
        block_bytes = itemsize * max(dim, 2 * num_candidates) * height
        return height, width, max(inputs.PART_BYTES // block_bytes, 1)

    def by_tree(self, tree: BoxTree) -> None:
        """Searches a tree; where a space's own separations decide the order, for candidates."""
        is_ball = self.space.ball() is self.space
        size = min(self.num_listed + (0 if is_ball else _SPARE_CANDIDATES), len(self.gallery))
        most = inputs.PART_BYTES // (16 * size + 12 * self.queries.shape[1])
        for rows in inputs.split(np.arange(len(self.queries)), most):
            queries = inputs.host_rows(self.queries, rows)
            self.space.check(queries, first=int(rows[0]))
            (separations, ids), _ = tree.search(queries, size)
            uncertain = np.empty(0, int)
            if not is_ball:
                others = tree.least_separations(queries, separations[:, -1])
                separations, ids = subtraction.nearest_candidates(
                    self.space, queries, self.gallery, ids, self.num_listed
                )
                uncertain = rows[(separations[:, -1] >= others) & (size < len(self.gallery))]
            self._store(rows, subtraction.distances(self.space, separations), ids)
            if len(uncertain):
                self.by_subtraction(uncertain)

    def by_subtraction(self, rows: Rows) -> None:
        """Sorts all items by their separations from these queries."""
        queries = inputs.host_rows(self.queries, rows)
        items = self.gallery.array
        self._store(rows, *subtraction.nearest_items(self.space, queries, items, self.num_listed))

    def _points(self, rows: Rows, size: int) -> Float[Array, "b d"]:
        """Checks queries, pads them to a block, and copies it to all devices."""
        points = inputs.host_rows(self.queries, rows)
        self.space.check(points, first=int(rows[0]))
        return jax.device_put(inputs.pad_rows(points, size), NamedSharding(self.gallery.mesh, P()))

    def _sort(self, rows: Rows, points: Float[Array, "b d"], best: selection.TopK) -> None:
        """Stores each query's nearest candidates, and whether they surely are the nearest items."""
        # They are if the k-th is nearer than all items that are no candidates. Such an item scores
        # at most as high as the last candidate, and scores bound −separations: so −separation of
        # the k-th must exceed the last candidate's score. Equality is not enough, because the item
        # that is no candidate may have the smaller index.
        candidates = np.asarray(best.ids)
        last_scores = np.asarray(best.scores)[:, -1]
        separations, ids = subtraction.nearest_candidates(
            self.space, points, self.gallery, candidates, self.num_listed
        )
        all_measured = candidates.shape[1] == len(self.gallery)
        count = len(rows)  # The rest of the block is padding.
        self.certain[rows] = ((-separations[:, -1] > last_scores) | all_measured)[:count]
        self._store(rows, subtraction.distances(self.space, separations)[:count], ids[:count])

    def _store(self, rows: Rows, distances: Float[np.ndarray, "r l"], ids: Ids) -> None:
        """Stores results without the queries' own items."""
        if self.own_ids is not None:
            is_kept = ids != self.own_ids[rows, None]
            is_kept[is_kept.all(axis=1), -1] = False  # The own item is not listed: drop the last.
            distances, ids = (x[is_kept].reshape(len(rows), -1) for x in (distances, ids))
        self.distances[rows], self.ids[rows] = distances, ids
