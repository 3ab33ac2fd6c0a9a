"""Exact ranks of relevant items: of each query's nearest match, or of all its positives."""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Shaped

from hypjax.geometry import Fused, Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Labelled
from hypjax.retrieval.relevance import Relevance
from hypjax.retrieval.scores import (
    Factors,
    Precision,
    Score,
    certify,
    highest,
    largest_slack,
    lowest,
    separation_matrix,
    separations,
    unique_rows,
    widened,
)
from hypjax.retrieval.selection import sample
from hypjax.system.machine import usable_cores

NO_MATCH = np.iinfo(np.int32).max
_TILE = 2048  # Queries and items of a tile, so that its scores fit into a CPU's cache.
_AXIS = "tiles"  # Mesh axis over which tiles are distributed.
_BOUND_BYTES = 2**28  # Largest size of the bounds of a block of queries.
_CHUNK_BYTES = 2**25  # Largest size of the points of a chunk of the gallery.
_Scores = Float[Array, "h w"]  # Of a tile.


def match_ranks(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    space: Space,
    ks: Sequence[int] | None = None,
    own_ids: Int[np.ndarray, " n"] | None = None,
) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match: the nearest gallery item of the same class.

    The rank is the number of items that an exact search lists before it: those strictly nearer, and
    those equally far with a smaller index. It is exact in the sense of `nearest_neighbors`. All
    local devices share the work.

    Args:
        queries: Points of the space, [n, d].
        query_labels: Class numbers or names of the queries, [n].
        gallery: Points of the space to search, [m, d]. If None, the gallery is the queries, and
            each query is excluded from its own results.
        gallery_labels: Classes of the gallery, [m]; required if there is a gallery.
        space: Space that measures the distances.
        ks: Numbers of neighbours of interest. If given, a rank may differ from the true one, but is
            below the same ones of these numbers. That takes less time.
        own_ids: Gallery index to exclude for each query, [n], if there is a gallery that holds the
            queries, perhaps as other points.

    Returns:
        Ranks from 0, [n], int32; `NO_MATCH` for queries without a match.

    Raises:
        UserError: A point is not finite or not in the space, or shapes do not match.
    """
    asked, searched = inputs.labelled(queries, query_labels, gallery, gallery_labels, own_ids)
    return first_ranks(asked, searched, space, ks)


def first_ranks(
    asked: Labelled, searched: Labelled, space: Space, ks: Sequence[int] | None
) -> Int[np.ndarray, " n"]:
    """As `match_ranks`, for what `inputs.labelled` returns."""
    found = np.empty(len(asked.labels), np.int32)

    def by_products(rows: Int[np.ndarray, " r"], score: Score) -> Int[np.ndarray, " u"]:
        # In float32 all queries are asked, and halve the products if they are the gallery, too.
        part = asked if score.precision is Precision.SINGLE else asked.part(rows)
        bounds = _bound_ranks(part, searched, score)
        found[rows] = bounds[:, 0]
        if ks is not None:  # It is enough to know below which K a rank is.
            bounds = np.searchsorted(np.sort(ks), bounds, side="right")
        return rows[bounds[:, 0] != bounds[:, 1]]

    def by_subtraction(rows: Int[np.ndarray, " r"]) -> None:
        found[rows] = _ranks_by_subtraction(space, asked.part(rows), searched)

    score = Score.around(space, sample(searched.points))
    certify("ranks", asked.points, score, by_products, by_subtraction)
    return found


def _ranks_by_subtraction(
    space: Space, queries: Labelled, gallery: Labelled
) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match, which exists, from its distances to the whole gallery."""
    found = np.empty(len(queries.labels), np.int32)
    own_ids = np.full(len(found), -1) if queries.ids is None else queries.ids
    of_class = inputs.items_of_classes(gallery.labels)
    unique, inverse = unique_rows(inputs.host_rows(queries.points, np.s_[:]))
    copies = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse)))
    for rows, own in zip(copies, separations(space, unique, gallery.points), strict=False):
        for row in rows:
            items = of_class[queries.labels[row]]
            found[row] = _rank(own, items[items != own_ids[row]], own_ids[row])
    return found


def _rank(separations: Float[np.ndarray, " m"], matches: Int[np.ndarray, " r"], own: int) -> int:
    """Number of items before the nearest match, without the query's own (−1 for none)."""
    first = matches[np.argmin(separations[matches])]  # The smallest index among ties.
    nearest = separations[first]
    before = np.count_nonzero(separations < nearest)
    before += np.count_nonzero(separations[:first] == nearest)
    return before - (own >= 0 and (separations[own], own) < (nearest, first))


def _bound_ranks(queries: Labelled, gallery: Labelled, score: Score) -> Int[np.ndarray, "n 2"]:
    """Numbers of items that surely, and may, come before each query's nearest match.

    Queries and items are sorted by class, so that matches are confined to few tiles of the score
    matrix. These are computed twice: to bound the score of the nearest match, and to count the
    items before it. In all other tiles every item counts, which takes two comparisons of the same
    score, and no sort: so a rank costs little more than the matrix product.

    Queries with ids are left out of their own results. Those without a match have `NO_MATCH`.
    """
    symmetric = queries is gallery and score.precision is Precision.SINGLE
    rows = _sort_by_class(score, queries)
    columns = rows if queries is gallery else _sort_by_class(score, gallery)
    mesh = Mesh(jax.local_devices(), _AXIS)
    with score.precision.enabled():
        points = jax.device_put((rows, columns), NamedSharding(mesh, P()))
        tiles = [_distribute(mesh, each) for each in _tiles(rows.labels, columns.labels, symmetric)]
        program = _rank_program(mesh, queries.ids is not None, symmetric)
        counts = np.asarray(program(score.space, *points, *tiles))
    valid = rows.place >= 0
    bounds = np.empty((len(queries.labels), 2), np.int32)
    bounds[rows.place[valid]] = counts[valid]
    return bounds


class _Points(NamedTuple):
    """Points sorted by class and padded to whole tiles."""

    factors: Factors
    labels: Int[np.ndarray | Array, " p"]  # −1 for padding.
    ids: Int[np.ndarray | Array, " p"]  # In the gallery; `NO_MATCH` for padding.
    place: Int[np.ndarray | Array, " p"]  # Before the sort; −1 for padding.


class _Thresholds(NamedTuple):
    """Scores that tell on which side of a query's nearest match an item is."""

    may: Float[Array, " p"]  # An item with a lower score surely comes after the match.
    must: Float[Array, " p"]  # One with a higher score surely comes before; −∞ without a match.


class _Tiles(NamedTuple):
    """Indices of the tiles of the score matrix that each device visits, padded."""

    rows: Int[Array, "devices t"]
    columns: Int[Array, "devices t"]
    counts: Int[Array, " devices"]  # Tiles of each device, without the padding.


def _sort_by_class(score: Score, given: Labelled) -> _Points:
    points, labels = inputs.float32(given.points), given.labels
    ids = np.arange(len(labels)) if given.ids is None else given.ids
    score.space.check(points)
    order = np.argsort(labels, kind="stable")
    rows = _rows_of_classes(np.bincount(labels), _tile_side(len(labels)))
    place = np.full(inputs.round_up(rows[-1] + 1, _tile_side(len(labels))), -1)
    place[rows] = order
    valid = place >= 0
    return _Points(
        score.factors(points[place], valid),
        np.where(valid, labels[place], -1).astype(np.int32),
        np.where(valid, ids[place], NO_MATCH).astype(np.int32),
        place,
    )


def _rows_of_classes(sizes: Int[np.ndarray, " classes"], tile: int) -> Int[np.ndarray, " n"]:
    """Rows of points sorted by class, with gaps, so that small classes cross no tile boundary."""
    # Fewer tiles next to the diagonal then contain matches and are computed twice.
    starts, end = [], 0
    for size in sizes.tolist():
        left = -end % tile
        if left < size <= tile // 16:
            end += left
        starts.append(end)
        end += size
    before = np.cumsum(sizes) - sizes
    return np.repeat(np.array(starts) - before, sizes) + np.arange(sizes.sum())


def _tile_side(points: int) -> int:
    """Side of the tiles for a number of points."""
    return min(_TILE, inputs.round_up(points, inputs.MULTIPLE))


def _tiles(
    query_labels: Int[np.ndarray, " p"], labels: Int[np.ndarray, " q"], symmetric: bool
) -> tuple[Int[np.ndarray, "t 2"], Int[np.ndarray, "u 2"]]:
    """Tiles (row, column) that may contain matches, and all others."""
    rows, columns = (x.reshape(-1, _tile_side(len(x))) for x in (query_labels, labels))
    row_first, first = rows[:, 0], columns[:, 0]
    row_last, last = rows.max(axis=1), columns.max(axis=1)
    matching = (row_first[:, None] <= last) & (first <= row_last[:, None])
    # If the gallery is the queries, each of the others also stands for its transpose.
    others = np.triu(~matching) if symmetric else ~matching
    return np.argwhere(matching), np.argwhere(others)


def _distribute(mesh: Mesh, tiles: Int[np.ndarray, "t 2"]) -> _Tiles:
    """Distributes tiles over devices, padded to a power of two so that programs are reused."""
    shares = [tiles[device :: mesh.size] for device in range(mesh.size)]
    capacity = 1 << max(len(tiles) - 1, 1).bit_length()
    indices = np.zeros((mesh.size, -(-capacity // mesh.size), 2), np.int32)
    for share, padded in zip(shares, indices, strict=True):
        padded[: len(share)] = share
    found = _Tiles(*np.moveaxis(indices, 2, 0), np.array(list(map(len, shares)), np.int32))
    return jax.device_put(found, NamedSharding(mesh, P(_AXIS)))


def _rows(points: Any, tile: Int[Array, ""], side: int) -> Any:
    """The rows of a tile, from each array of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile * side, side), points)


def _visit(tiles: _Tiles, visit: Callable[[Array, Array, Any], Any], state: Any) -> Any:
    """Updates a state by each tile in turn."""

    def step(i: Int[Array, ""], carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        state, row, column = carry
        # Indices of the next tile. If a step loaded its own, XLA on a CPU would reload them for
        # each comparison.
        return visit(row, column, state), tiles.rows[0, i + 1], tiles.columns[0, i + 1]

    first = (state, tiles.rows[0, 0], tiles.columns[0, 0])
    return lax.fori_loop(0, tiles.counts[0], step, first)[0]


@functools.cache
def _rank_program(mesh: Mesh, exclude_self: bool, symmetric: bool) -> Callable:
    """The jitted `_count_before`, of replicated points and tiles that devices share."""
    count = functools.partial(_count_before, exclude_self=exclude_self, symmetric=symmetric)
    specs = (P(), P(), P(), P(_AXIS), P(_AXIS))
    return jax.jit(jax.shard_map(count, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


def _thresholds(
    space: Space, rows: _Points, columns: _Points, tiles: _Tiles, exclude_self: bool
) -> _Thresholds:
    """Bounds the score of each query's nearest match."""
    height, width = _tile_side(len(rows.ids)), _tile_side(len(columns.ids))

    def update(row: Int[Array, ""], column: Int[Array, ""], best: _Thresholds) -> _Thresholds:
        queries, items = _rows(rows, row, height), _rows(columns, column, width)
        matches = queries.labels[:, None] == items.labels
        if exclude_self:
            matches &= queries.ids[:, None] != items.ids
        most = highest(space, queries.factors.query, items.factors.gallery)
        least = lowest(space, queries.factors, items.factors)
        found = (jnp.max(jnp.where(matches, x, -jnp.inf), axis=1) for x in (least, most))
        pairs = zip(best, found, strict=True)
        return _Thresholds(*(_merged(x, row, more, jnp.maximum) for x, more in pairs))

    # −separation of the nearest match is at least the highest lower bound of any match, and at most
    # the highest upper bound.
    none_found = jnp.full_like(rows.factors.slack[0][:, 0], -jnp.inf)
    least, most = lax.pmax(_visit(tiles, update, _Thresholds(none_found, none_found)), _AXIS)
    most = widened(most, 1)
    if not _bounds_pairs(space, most):  # Then scores are compared with `must`, not lower bounds.
        most += 2 * largest_slack(rows.factors, columns.factors)
    return _Thresholds(widened(least, -1), widened(most, 1))


def _count_before(
    space: Space,
    rows: _Points,
    columns: _Points,
    matching: _Tiles,
    others: _Tiles,
    *,
    exclude_self: bool,
    symmetric: bool,
) -> Int[Array, "p 2"]:
    """Counts the items that surely, or may, precede each query's nearest match."""
    height, width = _tile_side(len(rows.ids)), _tile_side(len(columns.ids))
    thresholds = _thresholds(space, rows, columns, matching, exclude_self)

    def count_matching(row: Int[Array, ""], column: Int[Array, ""], counts: Array) -> Array:
        queries, items = _rows(rows, row, height), _rows(columns, column, width)
        mismatches = queries.labels[:, None] != items.labels
        scores = highest(space, queries.factors.query, items.factors.gallery)
        scores = jnp.where(mismatches, scores, -jnp.inf)
        least = _least(space, scores, queries.factors, items.factors)
        found = _count_in_rows(scores, least, _rows(thresholds, row, height))
        return _merged(counts, row, found, jnp.add)

    def count_other(row: Int[Array, ""], column: Int[Array, ""], counts: Array) -> Array:
        queries, items = _rows(rows.factors, row, height), _rows(columns.factors, column, width)
        scores = highest(space, queries.query, items.gallery)
        least = _least(space, scores, queries, items)
        found = _count_in_rows(scores, least, _rows(thresholds, row, height))
        counts = _merged(counts, row, found, jnp.add)
        if symmetric:  # The transposed tile: columns are queries and rows are items.
            found = _count_in_columns(scores, least, _rows(thresholds, column, width))
            counts = _merged(counts, column, found, jnp.add)
        return counts

    counts = jnp.zeros((len(rows.ids), 2), jnp.int32)
    counts = _visit(others, count_other, _visit(matching, count_matching, counts))
    matched = thresholds.must > -jnp.inf
    return jnp.where(matched[:, None], lax.psum(counts, _AXIS), NO_MATCH)


def _bounds_pairs(space: Space, scores: Array) -> bool:
    """Whether each pair has a lower bound of its own.

    In float32, the largest slack of any item is added to thresholds instead, which is faster. In
    float64, where items may be in several crowds, it is large for items of other crowds; and it
    does not bound sums of distances.
    """
    return scores.dtype == jnp.float64 or isinstance(space, Fused)


def _least(space: Space, scores: _Scores, queries: Factors, items: Factors) -> _Scores:
    """Scores that must exceed a threshold for items that surely come before a match."""
    if not _bounds_pairs(space, scores):
        return scores
    return jnp.minimum(scores, lowest(space, queries, items))  # Scores may be masked by −∞.


def _count_in_rows(scores: _Scores, least: _Scores, bounds: _Thresholds) -> Int[Array, "h 2"]:
    """Numbers of items that surely, and may, come before each row's nearest match."""
    # One sum counts both: it is below 2²⁴, up to which float32 is exact.
    both = jnp.where(scores >= bounds.may[:, None], jnp.float32(1), jnp.float32(0))
    both = jnp.where(least > bounds.must[:, None], jnp.float32(1 + 2 * _TILE), both)
    total = jnp.sum(both, axis=1).astype(jnp.int32)
    return jnp.stack([total // (2 * _TILE), total % (2 * _TILE)], axis=1)


def _count_in_columns(scores: _Scores, least: _Scores, bounds: _Thresholds) -> Int[Array, "w 2"]:
    """Like `_count_in_rows`, for columns; this way of adding is the fastest one on a CPU."""
    both = jnp.where(scores >= bounds.may, jnp.int16(1), jnp.int16(0))
    both = jnp.where(least > bounds.must, jnp.int16(1 + 256), both)
    # Of 64 rows, each count is at most 64, so that the low one fits below 256, and both into int16.
    groups = both.reshape(-1, inputs.MULTIPLE, scores.shape[1])
    sums = jnp.sum(groups, axis=1, dtype=jnp.int16).astype(jnp.int32)
    return jnp.stack([jnp.sum(sums >> 8, axis=0), jnp.sum(sums & 255, axis=0)], axis=1)


def _merged(state: Array, tile: Int[Array, ""], found: Array, merge: Callable) -> Array:
    """A state, with what was found in the rows of a tile merged into these rows."""
    found = merge(found, _rows(state, tile, len(found)))
    return lax.dynamic_update_slice_in_dim(state, found, tile * len(found), axis=0)


def positive_ranks(
    queries: Float[np.ndarray | Array, "n d"],
    gallery: Float[np.ndarray | Array, "m d"],
    relevance: Relevance,
    space: Space,
) -> Iterator[Int[np.ndarray, " positives"]]:
    """Yields the ranks of each query's positives, in ascending order.

    A rank is the number of items that an exact search lists before the positive: those strictly
    nearer, and those equally far with a smaller index, without ignored items. Matrix products bound
    the separations; where the bounds leave the order open, subtraction in float64 decides it.
    Raises UserError if a point is not finite or not in the space.
    """
    score = Score.around(space, sample(gallery))
    size = max(min(_BOUND_BYTES // (8 * len(gallery)), len(queries)), 1)
    with ThreadPoolExecutor(usable_cores()) as pool:
        for first in range(0, len(queries), size):
            block = inputs.host_rows(queries, np.s_[first : first + size])
            space.check(block, first=first)
            bounds = _score_bounds(score, inputs.pad_rows(block, size), gallery)
            rows = range(first, first + len(block))
            positives, ignored = ([items[i] for i in rows] for items in relevance)
            ranks = functools.partial(_ranks_of_query, space, gallery)
            yield from pool.map(ranks, block, *bounds, positives, ignored)


def _score_bounds(
    score: Score, queries: Float[np.ndarray, "b d"], gallery: Float[np.ndarray | Array, "m d"]
) -> Float[np.ndarray, "2 b m"]:
    """Lower and upper bounds on −separation of some queries and all items."""
    rows = min(max(_CHUNK_BYTES // (4 * gallery.shape[1]), 1), len(gallery))
    bounds = np.empty((2, len(queries), len(gallery)), np.float32)
    factors = score.factors(queries)
    for first in range(0, len(gallery), rows):
        points = inputs.host_rows(gallery, np.s_[first : first + rows])
        score.space.check(points, first=first)
        found = _chunk_bounds(score.space, factors, score.factors(inputs.pad_rows(points, rows)))
        bounds[..., first : first + rows] = np.asarray(found)[..., : len(points)]
    return bounds


@jax.jit
def _chunk_bounds(space: Space, queries: Factors, items: Factors) -> Float[Array, "2 b r"]:
    least = lowest(space, queries, items)
    return jnp.stack([widened(least, -1), widened(highest(space, queries.query, items.gallery), 1)])


def _ranks_of_query(
    space: Space,
    gallery: Float[np.ndarray | Array, "m d"],
    query: Float[np.ndarray, " d"],
    least: Float[np.ndarray, " m"],
    most: Float[np.ndarray, " m"],
    positives: Int[np.ndarray, " p"],
    ignored: Int[np.ndarray, " i"],
) -> Int[np.ndarray, " p"]:
    """Ranks of one query's positives from the bounds on −separation of all items."""
    least[ignored] = most[ignored] = -np.inf
    own_least, own_most = least[positives], most[positives]
    surely = len(least) - np.searchsorted(np.sort(least), own_most, side="right")
    perhaps = len(most) - np.searchsorted(np.sort(most), own_least, side="left") - 1
    undecided = np.flatnonzero(surely != perhaps)
    if len(undecided):
        windows = [(most >= own_least[p]) & (least <= own_most[p]) for p in undecided]
        items = np.flatnonzero(np.logical_or.reduce(windows))
        # Padded to a power of two, so that few programs are compiled.
        size = max(1 << (len(items) - 1).bit_length(), inputs.LANES)
        points = inputs.pad_rows(inputs.host_rows(gallery, items), size)
        with jax.enable_x64(True):
            matrix = separation_matrix(space, query[None], points)
        separations = np.asarray(matrix)[0, : len(items)]
        for p, window in zip(undecided, windows, strict=True):
            own = separations[np.searchsorted(items, positives[p])]
            first = (separations < own) | ((separations == own) & (items < positives[p]))
            surely[p] += np.count_nonzero(first & window[items])
    return np.sort(surely)
