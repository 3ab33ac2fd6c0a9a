"""Points sorted by class, in chunks of tiles of the score matrix."""

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

    All devices of a mesh hold the factors of a chunk. `rows` says which of the given points are in
    each chunk, [chunks, p], −1 for padding.
    """

    def __init__(self, given: Labelled, rows: Rows, score: Score, mesh: Mesh) -> None:
        self.mesh, self._given, self._score = mesh, given, score
        self._held: dict[int, Points] = {}
        labels = given.labels[rows]
        height = side(len(rows))
        places = _places(np.unique(labels, return_counts=True)[1], height)
        number = places[-1] // height + 1
        most = _FACTOR_BYTES // (2 * score.dtype.itemsize * given.points.shape[1] * height)
        chunks = -(-number // max(most, 1))
        self.rows = np.full((chunks, -(-number // chunks) * height), -1)
        self.rows.reshape(-1)[places] = rows[np.argsort(labels, kind="stable")]
        self.labels = np.where(self.rows >= 0, given.labels[self.rows], -1).astype(np.int32)

    def chunk(self, index: int) -> Points:
        """The points of a chunk, which are kept until another one is asked for."""
        if index not in self._held:
            self._held.clear()  # Frees its memory first.
            rows, valid = self.rows[index], self.rows[index] >= 0
            ids = rows if self._given.ids is None else self._given.ids[rows]
            factors = self._score.factors(inputs.host_rows(self._given.points, rows), valid)
            points = Points(factors, self.labels[index], np.where(valid, ids, NO_ID).astype("i4"))
            self._held[index] = jax.device_put(points, NamedSharding(self.mesh, P()))
        return self._held[index]


def side(points: int) -> int:
    """Side of the tiles for a number of points."""
    return min(SIDE, inputs.round_up(points, inputs.MULTIPLE))


def _places(sizes: Int[np.ndarray, " classes"], side: int) -> Int[np.ndarray, " n"]:
    """Places of points sorted by class, with gaps, so that small classes cross no tile boundary."""
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
    """Points of a pair of chunks. The caller keeps none, so that others find memory."""
    points = queries.chunk(row)
    return points, points if symmetric and row == column else items.chunk(column)


def pairs(
    queries: Sorted, items: Sorted, symmetric: bool, matching_only: bool = False
) -> Iterator[tuple[int, int, list[Tiles]]]:
    """Yields pairs of chunks: indices, and the tiles that may contain matches, and others.

    If the queries are the items and `symmetric` is set, another tile also stands for its transpose.
    """
    sizes = queries.rows.shape[1], items.rows.shape[1]
    capacity = math.prod(size // side(size) for size in sizes)
    for row, column in np.ndindex(len(queries.rows), len(items.rows)):
        matching, others = _split(queries.labels[row], items.labels[column])
        if symmetric:  # Tiles with matches do not stand for their transposes.
            others = others[(row < column) | (row == column) & (others[:, 0] < others[:, 1])]
        lists = [matching] if matching_only else [matching, others]
        if any(map(len, lists)):
            yield row, column, [distribute(queries.mesh, each, capacity) for each in lists]


def _split(
    rows: Int[np.ndarray, " p"], columns: Int[np.ndarray, " q"]
) -> tuple[Int[np.ndarray, "t 2"], Int[np.ndarray, "u 2"]]:
    """Tiles (row, column) that may contain matches, and all others, from the labels of chunks."""
    rows, columns = (labels.reshape(-1, side(len(labels))) for labels in (rows, columns))
    row_first, first = rows[:, 0], columns[:, 0]
    row_last, last = rows.max(axis=1), columns.max(axis=1)
    matching = (row_first[:, None] <= last) & (first <= row_last[:, None])
    filled = (row_last[:, None] >= 0) & (last >= 0)  # Not with padding alone.
    return np.argwhere(matching & filled), np.argwhere(~matching & filled)


def distribute(mesh: Mesh, tiles: Int[np.ndarray, "t 2"], capacity: int) -> Tiles:
    """Distributes tiles over devices, padded to a power of two so that programs are reused."""
    shares = [tiles[device :: mesh.size] for device in range(mesh.size)]
    capacity = 1 << max(capacity - 1, 1).bit_length()
    indices = np.zeros((mesh.size, -(-capacity // mesh.size), 2), np.int32)
    for share, padded in zip(shares, indices, strict=True):
        padded[: len(share)] = share
    found = Tiles(*np.moveaxis(indices, 2, 0), np.array(list(map(len, shares)), np.int32))
    return jax.device_put(found, NamedSharding(mesh, P(AXIS)))


def visit(tiles: Tiles, update: Callable[[Array, Array, Any], Any], state: Any) -> Any:
    """Updates a state by each tile in turn."""

    def step(i: Int[Array, ""], carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        state, row, column = carry
        # Indices of the next tile. If a step loaded its own, XLA on a CPU would reload them for
        # each comparison.
        return update(row, column, state), tiles.rows[0, i + 1], tiles.columns[0, i + 1]

    first = (state, tiles.rows[0, 0], tiles.columns[0, 0])
    return lax.fori_loop(0, tiles.counts[0], step, first)[0]


def rows_of(points: Any, tile: Int[Array, ""], side: int) -> Any:
    """The rows of a tile, from each array of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile * side, side), points)


def merged(
    state: Array, tile: Int[Array, ""], found: Array, merge: Callable[[Array, Array], Array]
) -> Array:
    """A state, with what was found in the rows of a tile merged into these rows."""
    found = merge(found, rows_of(state, tile, len(found)))
    return lax.dynamic_update_slice_in_dim(state, found, tile * len(found), axis=0)
