"""Points sorted by class, and the score matrix in tiles."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Labelled, Rows
from hypjax.retrieval.scores import Factors, Score

AXIS = "tiles"  # Mesh axis over which tiles are distributed.
SIDE = 2048  # Queries and items of a tile, so that its scores fit into a CPU's cache.
NO_ID = np.iinfo(np.int32).max
_FACTOR_BYTES = 2**27  # Largest size of the factors of a chunk.


class Points(NamedTuple):
    """Points of a chunk."""

    factors: Factors
    labels: Int[np.ndarray | Array, " p"]  # −1 for padding.
    ids: Int[np.ndarray | Array, " p"]  # In the gallery; `NO_ID` for padding.


class Sorted:
    """Points sorted by class and padded to whole tiles, in equal chunks that are made when needed.

    All devices hold the factors of a chunk. `rows`, [chunks, p], are its points, −1 for padding.
    """

    # Comparing the labels of each pair costs as much as comparing its score. Sorted by class,
    # matches lie in the tiles along the diagonal; all other tiles need no labels.

    def __init__(self, points: Labelled, rows: Rows, score: Score, mesh: Mesh) -> None:
        self.mesh, self._points, self._score = mesh, points, score
        self._chunks: dict[int, Points] = {}
        labels = points.labels[rows]
        height = side(len(rows))
        positions = _positions(np.unique(labels, return_counts=True)[1], height)
        number = positions[-1] // height + 1
        most = _FACTOR_BYTES // (2 * score.dtype.itemsize * points.points.shape[1] * height)
        chunks = -(-number // max(most, 1))
        self.rows = np.full((chunks, -(-number // chunks) * height), -1)
        self.rows.reshape(-1)[positions] = rows[np.argsort(labels, kind="stable")]
        self.labels = np.where(self.rows >= 0, points.labels[self.rows], -1).astype(np.int32)

    def chunk(self, index: int) -> Points:
        """The points of a chunk; only the last one stays in memory."""
        if index not in self._chunks:
            self._chunks.clear()  # Frees its memory first.
            rows, valid = self.rows[index], self.rows[index] >= 0
            ids = rows if self._points.ids is None else self._points.ids[rows]
            factors = self._score.factors(inputs.host_rows(self._points.points, rows), valid)
            points = Points(factors, self.labels[index], np.where(valid, ids, NO_ID).astype("i4"))
            self._chunks[index] = jax.device_put(points, NamedSharding(self.mesh, P()))
        return self._chunks[index]


def side(points: int) -> int:
    """Side of the tiles for a number of points."""
    return min(SIDE, inputs.round_up(points, inputs.MULTIPLE))


def _positions(sizes: Int[np.ndarray, " classes"], side: int) -> Int[np.ndarray, " n"]:
    """Positions of points sorted by class; gaps keep small classes within one tile."""
    # Fewer tiles next to the diagonal then contain matches and are computed twice.
    starts, end = [], 0
    for size in sizes.tolist():
        left = -end % side
        if left < size <= side // 16:
            end += left
        starts.append(end)
        end += size
    before = np.cumsum(sizes) - sizes
    return np.repeat(np.array(starts) - before, sizes) + np.arange(sizes.sum())


class Tiles(NamedTuple):
    """Indices of the tiles of the score matrix that each device visits, padded."""

    rows: Int[Array, "devices t"]
    columns: Int[Array, "devices t"]
    counts: Int[Array, " devices"]  # Tiles of each device, without the padding.


def points_of(
    queries: Sorted, items: Sorted, row: int, column: int, symmetric: bool
) -> tuple[Points, Points]:
    """Points of a pair of chunks; callers drop them before they ask for the next pair."""
    points = queries.chunk(row)
    return points, points if symmetric and row == column else items.chunk(column)


def pairs(
    queries: Sorted, items: Sorted, symmetric: bool, matching_only: bool = False
) -> Iterator[tuple[int, int, list[Tiles]]]:
    """Yields indices of two chunks, their tiles that may contain matches, and their other tiles.

    If `symmetric`, queries are the items, and a tile without matches stands for its transpose, too.
    """
    sizes = queries.rows.shape[1], items.rows.shape[1]
    capacity = math.prod(size // side(size) for size in sizes)
    for row, column in np.ndindex(len(queries.rows), len(items.rows)):
        matching, others = _split(queries.labels[row], items.labels[column])
        if symmetric:  # Tiles with matches do not stand for their transposes.
            others = others[(row < column) | (row == column) & (others[:, 0] < others[:, 1])]
        lists = [matching] if matching_only else [matching, others]
        if any(map(len, lists)):
            yield row, column, [distribute(queries.mesh, indices, capacity) for indices in lists]


def _split(
    rows: Int[np.ndarray, " p"], columns: Int[np.ndarray, " q"]
) -> tuple[Int[np.ndarray, "t 2"], Int[np.ndarray, "u 2"]]:
    """Tiles (row, column) that may contain matches, and all others, from the labels of chunks."""
    rows, columns = (labels.reshape(-1, side(len(labels))) for labels in (rows, columns))
    row_first, first = rows[:, 0], columns[:, 0]
    row_last, last = rows.max(axis=1), columns.max(axis=1)
    matching = (row_first[:, None] <= last) & (first <= row_last[:, None])
    filled = (row_last[:, None] >= 0) & (last >= 0)  # Not only padding.
    return np.argwhere(matching & filled), np.argwhere(~matching & filled)


def distribute(mesh: Mesh, tiles: Int[np.ndarray, "t 2"], capacity: int) -> Tiles:
    """Distributes tiles over devices, padded to a power of two so that programs are reused."""
    shares = [tiles[device :: mesh.size] for device in range(mesh.size)]
    capacity = 1 << max(capacity - 1, 1).bit_length()
    indices = np.zeros((mesh.size, -(-capacity // mesh.size), 2), np.int32)
    for share, of_device in zip(shares, indices, strict=True):
        of_device[: len(share)] = share
    padded = Tiles(*np.moveaxis(indices, 2, 0), np.array(list(map(len, shares)), np.int32))
    return jax.device_put(padded, NamedSharding(mesh, P(AXIS)))


def visit(tiles: Tiles, update: Callable[[Array, Array, Any], Any], state: Any) -> Any:
    """Updates a state by one tile after the other."""

    def step(i: Int[Array, ""], carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        state, row, column = carry
        # A step loads the next tile's indices: XLA on a CPU would reload its own per comparison.
        return update(row, column, state), tiles.rows[0, i + 1], tiles.columns[0, i + 1]

    first = (state, tiles.rows[0, 0], tiles.columns[0, 0])
    return lax.fori_loop(0, tiles.counts[0], step, first)[0]


def rows_of(points: Any, tile: Int[Array, ""], side: int) -> Any:
    """The rows of a tile, from each array of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile * side, side), points)


def merged(
    state: Array, tile: Int[Array, ""], update: Array, merge: Callable[[Array, Array], Array]
) -> Array:
    """Merges an update into the rows of a state that belong to a tile."""
    rows = merge(update, rows_of(state, tile, len(update)))
    return lax.dynamic_update_slice_in_dim(state, rows, tile * len(rows), axis=0)
