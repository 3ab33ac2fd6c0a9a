"""Points sorted by class, and the score matrix in tiles."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from hypjax.geometry.arithmetic import AnyArray
from hypjax.geometry.spaces import Role
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Labelled, Rows
from hypjax.retrieval.scores import Factors, Score

AXIS = "tiles"  # Mesh axis over which tiles are distributed.
SIDE = 2048  # Queries and items of a tile, so that its scores fit into a CPU's cache.
NO_ID = np.iinfo(np.int32).max
_MATCH_SIDE = 256  # Side of tiles that are searched for matches, if classes are small.
# Largest size of the factors of a chunk. On a CPU, they lie beside the points, and up to five
# arrays of a chunk's size exist at once; with a quarter of it, 60,500 points take 5 to 9% longer.
_FACTOR_BYTES, _CPU_FACTOR_BYTES = 2**27, 2**24


class ChunkPoints(NamedTuple):
    """Factors, classes and gallery indices of a chunk's points."""

    factors: Factors
    labels: Int[np.ndarray | Array, " p"]  # −1 for padding.
    ids: Int[np.ndarray | Array, " p"]  # In the gallery; `NO_ID` for padding.


class SortedPoints:
    """Points sorted by class and padded to whole tiles, in chunks of equal size.

    Comparing the labels of a pair takes as long as comparing its score. With points sorted by
    class, matches lie in the tiles along the diagonal, and all other tiles need no labels.

    `rows` and `labels`, [chunks, p], hold the row and class of each chunk's points, −1 for padding.
    `match_side` is the side of tiles that are searched for matches.
    """

    def __init__(
        self, points: Labelled, rows: Rows, score: Score, mesh: Mesh, role: Role | None = None
    ) -> None:
        self.mesh, self._points, self._score, self._role = mesh, points, score, role
        self._chunks: dict[int, ChunkPoints] = {}
        labels = points.labels[rows]
        height = side(len(rows))
        class_sizes = np.unique(labels, return_counts=True)[1]
        positions = _positions(class_sizes, height)
        small = height % _MATCH_SIDE == 0 and class_sizes.mean() <= _MATCH_SIDE / 4
        self.match_side = _MATCH_SIDE if small else height
        num_tiles = int(positions[-1]) // height + 1
        tile_bytes = score.dtype.itemsize * points.points.shape[1] * height
        most = _CPU_FACTOR_BYTES if jax.default_backend() == "cpu" else _FACTOR_BYTES
        num_chunks = -(-num_tiles // max(most // tile_bytes, 1))
        self.rows = np.full((num_chunks, -(-num_tiles // num_chunks) * height), -1)
        self.rows.reshape(-1)[positions] = rows[np.argsort(labels, kind="stable")]
        self.labels = np.where(self.rows >= 0, points.labels[self.rows], -1).astype(np.int32)

    def chunk(self, index: int) -> ChunkPoints:
        """Computes a chunk's points on all devices; keeps only the last chunk in memory.

        Keep no reference to it, so that the next chunk can replace it.
        """
        if index not in self._chunks:
            self._chunks.clear()  # Frees its memory first.
            rows = self.rows[index]
            valid = rows >= 0
            ids = rows if self._points.ids is None else self._points.ids[rows]
            ids = np.where(valid, ids, NO_ID).astype(np.int32)
            coordinates = inputs.host_rows(self._points.points, rows)
            factors = self._score.factors(coordinates, valid, self._role)
            points = ChunkPoints(factors, self.labels[index], ids)
            self._chunks[index] = jax.device_put(points, NamedSharding(self.mesh, P()))
        return self._chunks[index]


def side(points: int) -> int:
    """Number of rows of a tile for a number of queries, or of columns for a number of items."""
    return min(SIDE, inputs.round_up(points, inputs.MULTIPLE))


def _positions(sizes: Int[np.ndarray, " classes"], side: int) -> Int[np.ndarray, " n"]:
    """Positions of points sorted by class, with gaps that keep small classes within a tile."""
    # Gaps leave fewer tiles with matches beside the diagonal; those tiles are computed twice.
    starts = []
    end = 0
    for size in sizes.tolist():
        room = -end % side  # Up to the end of the tile.
        if room < size <= side // 16:
            end += room
        starts.append(end)
        end += size
    starts_without_gaps = np.cumsum(sizes) - sizes
    return np.repeat(np.array(starts) - starts_without_gaps, sizes) + np.arange(sizes.sum())


class Tiles(NamedTuple):
    """Tiles of the score matrix that each device visits, by row and column, padded."""

    rows: Int[AnyArray, "devices t"]
    columns: Int[AnyArray, "devices t"]
    counts: Int[AnyArray, " devices"]  # Number of each device's tiles, without the padding.


def pairs(
    queries: SortedPoints, items: SortedPoints, symmetric: bool, matching_only: bool = False
) -> Iterator[tuple[int, int, list[Tiles]]]:
    """Yields indices of two chunks, with the tiles that may contain matches and all other tiles.

    If `symmetric`, the queries are the items, and a tile without matches also stands for its
    transpose. With `matching_only`, tiles have the points' `match_side`, and tiles without matches
    are left out.
    """
    chunk_sizes = [points.rows.shape[1] for points in (queries, items)]
    sides = [side(size) for size in chunk_sizes]
    capacity = (chunk_sizes[0] // sides[0]) * (chunk_sizes[1] // sides[1])
    if matching_only:
        sides = [points.match_side for points in (queries, items)]
        capacity = 0
    for row, column in np.ndindex(len(queries.rows), len(items.rows)):
        matching, filled = _mark_tiles(queries.labels[row], items.labels[column], sides)
        lists = [np.argwhere(matching)]
        if not matching_only:
            others = np.argwhere(filled & ~matching)
            if symmetric:  # Tiles with matches do not stand for their transposes.
                others = others[(row < column) | (row == column) & (others[:, 0] < others[:, 1])]
            lists.append(others)
        if any(map(len, lists)):
            yield row, column, [distribute(queries.mesh, tiles, capacity) for tiles in lists]


def _mark_tiles(
    row_labels: Int[np.ndarray, " p"], column_labels: Int[np.ndarray, " q"], sides: Sequence[int]
) -> tuple[Bool[np.ndarray, "r c"], Bool[np.ndarray, "r c"]]:
    """Marks the tiles that may contain matches, and the tiles that are not only padding."""
    rows, columns = row_labels.reshape(-1, sides[0]), column_labels.reshape(-1, sides[1])
    row_first, column_first = rows[:, None, 0], columns[:, 0]
    row_last, column_last = rows.max(axis=1)[:, None], columns.max(axis=1)
    filled = (row_last >= 0) & (column_last >= 0)  # The label of padding is −1.
    return (row_first <= column_last) & (column_first <= row_last) & filled, filled


def distribute(mesh: Mesh, tiles: Int[np.ndarray, "t 2"], capacity: int) -> Tiles:
    """Deals tiles out to devices, in lists for `capacity` tiles, or for more if there are more."""
    # Lists have room for a power of two, so that programs are compiled for few sizes.
    capacity = 1 << max(capacity - 1, len(tiles) - 1, 1).bit_length()
    indices = np.zeros((mesh.size, -(-capacity // mesh.size), 2), np.int32)
    counts = np.zeros(mesh.size, np.int32)
    for device in range(mesh.size):
        share = tiles[device :: mesh.size]
        indices[device, : len(share)] = share
        counts[device] = len(share)
    tiles_of_devices = Tiles(indices[..., 0], indices[..., 1], counts)
    return jax.device_put(tiles_of_devices, NamedSharding(mesh, P(AXIS)))


def visit(tiles: Tiles, update: Callable[[Array, Array, Any], Any], state: Any) -> Any:
    """Updates a state with this device's tiles, at [0], one after the other."""

    def step(i: Int[Array, ""], carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        state, row, column = carry
        # A step loads the next tile's indices: XLA on a CPU would reload its own per comparison.
        return update(row, column, state), tiles.rows[0, i + 1], tiles.columns[0, i + 1]

    first = (state, tiles.rows[0, 0], tiles.columns[0, 0])
    return lax.fori_loop(0, tiles.counts[0], step, first)[0]


def rows_of(points: Any, tile: Int[Array, ""], side: int) -> Any:
    """Rows of a tile in each array of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile * side, side), points)


def merged(
    state: Array, tile: Int[Array, ""], update: Array, merge: Callable[[Array, Array], Array]
) -> Array:
    """Merges an update into a tile's rows of a state."""
    rows = merge(update, rows_of(state, tile, len(update)))
    return lax.dynamic_update_slice_in_dim(state, rows, tile * len(rows), axis=0)
