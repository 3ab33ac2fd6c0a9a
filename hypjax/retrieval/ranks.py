"""Exact ranks of each query's nearest match."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.retrieval import inputs, scores, subtraction, tiles
from hypjax.retrieval.inputs import Labelled, Rows, SomeRows
from hypjax.retrieval.scores import Factors, Score, widened
from hypjax.retrieval.selection import StreamedGallery

NO_MATCH = np.iinfo(np.int32).max
_Scores = Float[Array, "h w"]  # Scores, or bounds, of a tile's queries and items.


def first_ranks(
    query_set: Labelled, gallery_set: Labelled, space: Space, ks: Sequence[int] | None
) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match: the nearest gallery item of its class.

    The rank is the number of items that an exact search lists before the match: those strictly
    nearer, and those equally far with a smaller index. With `ks`, ranks are only correct in whether
    they are below each K, which takes less time. Takes the results of `inputs.labelled`; returns
    ranks from 0, int32, `NO_MATCH` for queries without a match.
    """
    ranks = np.empty(len(query_set.labels), np.int32)

    def by_products(rows: Rows, score: Score) -> SomeRows:
        bounds = _bound_ranks(query_set, rows, gallery_set, score)
        ranks[rows] = bounds[:, 0]
        if ks is not None:  # Bounds between the same two Ks suffice.
            bounds = np.searchsorted(np.sort(ks), bounds, side="right")
        return rows[bounds[:, 0] != bounds[:, 1]]

    def by_subtraction(rows: Rows) -> None:
        points = inputs.host_rows(query_set.points, rows)
        distinct = subtraction.gallery_separations(space, points, gallery_set.points)
        for copies, separations in distinct:
            for row in rows[copies]:
                matches = np.flatnonzero(gallery_set.labels == query_set.labels[row])
                own_id = -1 if query_set.ids is None else int(query_set.ids[row])
                ranks[row] = _nearest_rank(separations, matches[matches != own_id], own_id)

    score = Score.around(space, StreamedGallery(gallery_set.points).centre)
    inputs.check_in_space(space, query_set.points)
    if gallery_set is not query_set:
        inputs.check_in_space(space, gallery_set.points)
    subtraction.certify("ranks", query_set.points, score, by_products, by_subtraction)
    return ranks


def _nearest_rank(separations: Float[np.ndarray, " m"], matches: Rows, own_id: int) -> int:
    """Number of items before the nearest match, except the query's own item (−1 for none)."""
    match = matches[np.argmin(separations[matches])]  # The smallest index among ties.
    num_before = int(np.count_nonzero(separations < separations[match]))
    num_before += int(np.count_nonzero(separations[:match] == separations[match]))
    if own_id >= 0 and (separations[own_id], own_id) < (separations[match], match):
        num_before -= 1
    return num_before


def _bound_ranks(
    query_set: Labelled, rows: Rows, gallery_set: Labelled, score: Score
) -> Int[np.ndarray, "r 2"]:
    """Lower and upper bounds on the ranks of the nearest matches of some queries."""
    # With points sorted by class, matches lie in few tiles of the score matrix. Scores of these
    # tiles are computed twice: to bound the nearest match, then to count the items that surely,
    # and that may, precede it. Every other item takes one score, two comparisons, and no sort.
    mesh = Mesh(jax.local_devices(), tiles.AXIS)
    queries = tiles.SortedPoints(query_set, rows, score, mesh, "query")
    all_items = np.arange(len(gallery_set.labels))
    items = tiles.SortedPoints(gallery_set, all_items, score, mesh, "gallery")
    symmetric = query_set is gallery_set and score.dtype == scores.SINGLE
    # With several chunks, only items of the queries' classes are searched for matches.
    candidates = items
    in_classes = np.flatnonzero(np.isin(gallery_set.labels, query_set.labels[rows]))
    if len(items.rows) > 1 and 0 < len(in_classes) < len(gallery_set.labels):
        candidates = tiles.SortedPoints(gallery_set, in_classes, score, mesh, "gallery")
    match_sides = queries.match_side, candidates.match_side
    bound, count = programs(mesh, query_set.ids is not None, symmetric, match_sides)
    match_bounds = np.full((2, *queries.rows.shape), -np.inf, score.dtype)
    counts = np.zeros((*queries.rows.shape, 2), np.int32)
    with score.enabled():
        for row, column, lists in tiles.pairs(queries, candidates, symmetric, matching_only=True):
            bounds = bound(score.space, queries.chunk(row), candidates.chunk(column), *lists)
            match_bounds[:, row] = np.maximum(match_bounds[:, row], bounds)
        for row, column, lists in tiles.pairs(queries, items, symmetric):
            bounds = match_bounds[:, row], match_bounds[:, column] if symmetric else None
            pair_counts = count(
                score.space, queries.chunk(row), items.chunk(column), *bounds, *lists
            )
            counts[row] += np.asarray(pair_counts[0])
            if symmetric:
                counts[column] += np.asarray(pair_counts[1])
    counts[match_bounds[1] == -np.inf] = NO_MATCH
    is_point = queries.rows >= 0
    bounds = np.empty((len(query_set.labels), 2), np.int32)
    bounds[queries.rows[is_point]] = counts[is_point]
    return bounds[rows]


class _Thresholds(NamedTuple):
    """Thresholds on scores, around −separation of each query's nearest match."""

    may: Float[Array, " p"]  # An item may come before the match if its score is at least `may`.
    must: Float[Array, " p"]  # It surely does if its lower bound exceeds `must`; −∞ if no match.


@functools.cache
def programs(
    mesh: Mesh, exclude_self: bool, symmetric: bool, match_sides: tuple[int, int]
) -> tuple[Callable, Callable]:
    """Jits `_bound_matches` and `_count_before`; devices share the tiles, each has all points."""
    shared = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
    bound = functools.partial(_bound_matches, exclude_self=exclude_self, sides=match_sides)
    count = functools.partial(_count_before, symmetric=symmetric)
    tile_lists = P(tiles.AXIS)
    return (
        jax.jit(shared(bound, in_specs=(P(), P(), P(), tile_lists))),
        jax.jit(shared(count, in_specs=(P(), P(), P(), P(), P(), tile_lists, tile_lists))),
    )


def _bound_matches(
    space: Space,
    rows: tiles.ChunkPoints,
    columns: tiles.ChunkPoints,
    matching: tiles.Tiles,
    exclude_self: bool,
    sides: tuple[int, int],
) -> Float[Array, "2 p"]:
    """Bounds on −separation of each query's nearest match: lower ones, then upper ones."""
    # The nearest match has the largest −separation, which lies between the largest lower and the
    # largest upper bound of any match.
    height, width = sides

    def update(row: Int[Array, ""], column: Int[Array, ""], best: tuple[Array, Array]) -> Any:
        queries, items = tiles.rows_of(rows, row, height), tiles.rows_of(columns, column, width)
        matches = queries.labels[:, None] == items.labels[None]
        if exclude_self:
            matches &= queries.ids[:, None] != items.ids[None]
        upper = scores.highest(space, queries.factors.query, items.factors.gallery)
        lower = scores.lowest(space, queries.factors, items.factors)
        bounds = (jnp.max(jnp.where(matches, x, -jnp.inf), axis=1) for x in (lower, upper))
        pairs = zip(best, bounds, strict=True)
        return tuple(tiles.merged(x, row, bound, jnp.maximum) for x, bound in pairs)

    no_match = jnp.full_like(rows.factors.slack[0][:, 0], -jnp.inf)
    best = tiles.visit(matching, update, (no_match, no_match))
    return jnp.stack(lax.pmax(best, tiles.AXIS))


def _count_before(
    space: Space,
    rows: tiles.ChunkPoints,
    columns: tiles.ChunkPoints,
    row_matches: Float[Array, "2 p"],
    column_matches: Float[Array, "2 q"] | None,
    matching: tiles.Tiles,
    others: tiles.Tiles,
    symmetric: bool,
) -> tuple[Int[Array, "p 2"], Int[Array, "q 2"]]:
    """Counts the items that surely, or may, precede each query's nearest match.

    If `symmetric`, columns also count as queries, in the tiles `others`.
    """
    height, width = tiles.side(len(rows.ids)), tiles.side(len(columns.ids))
    # Whether each pair has its own lower bound. Otherwise thresholds include the largest slack of
    # any item, which is faster. But in float64, where items of other crowds are far from the
    # centre, that slack is too large, and in spaces of several parts it bounds no distance.
    pairwise = bool(space.parts) or row_matches.dtype == jnp.float64
    thresholds = _thresholds(row_matches, rows.factors, columns.factors, pairwise)
    if column_matches is not None:  # `symmetric`.
        transposed = _thresholds(column_matches, columns.factors, rows.factors, pairwise)

    def count(row: Int[Array, ""], column: Int[Array, ""], counts: Any, *, matching: bool) -> Any:
        row_counts, column_counts = counts
        queries = tiles.rows_of(rows.factors, row, height)
        items = tiles.rows_of(columns.factors, column, width)
        upper = scores.highest(space, queries.query, items.gallery)
        if matching:
            labels = tiles.rows_of(rows.labels, row, height)
            mismatches = labels[:, None] != tiles.rows_of(columns.labels, column, width)[None]
            upper = jnp.where(mismatches, upper, -jnp.inf)
        # The minimum keeps masked scores below all thresholds.
        lower = jnp.minimum(upper, scores.lowest(space, queries, items)) if pairwise else upper
        before = _count_in_rows(upper, lower, tiles.rows_of(thresholds, row, height))
        row_counts = tiles.merged(row_counts, row, before, jnp.add)
        if symmetric and not matching:  # The transposed tile: columns are queries.
            before = _count_in_columns(upper, lower, tiles.rows_of(transposed, column, width))
            column_counts = tiles.merged(column_counts, column, before, jnp.add)
        return row_counts, column_counts

    zeros = [jnp.zeros((len(points.ids), 2), jnp.int32) for points in (rows, columns)]
    counts = tiles.visit(matching, functools.partial(count, matching=True), (zeros[0], None))
    counts = tiles.visit(others, functools.partial(count, matching=False), (counts[0], zeros[1]))
    return lax.psum(counts, tiles.AXIS)


def _thresholds(
    matches: Float[Array, "2 p"], queries: Factors, items: Factors, pairwise: bool
) -> _Thresholds:
    """Thresholds on the scores of items, from bounds on −separation of nearest matches."""
    # An item's score is at least its −separation: with a score below `lower`, it is farther than
    # the match. Its lower bound, the score less twice the slack, is at most its −separation: with
    # a bound above `upper`, it is nearer. Ties lie in between: none is decided here.
    lower, upper = matches
    upper = widened(upper, 1)
    if not pairwise:  # Scores are compared with `must`, instead of lower bounds.
        upper += 2 * scores.largest_slack(queries, items)
    return _Thresholds(widened(lower, -1), widened(upper, 1))


def _count_in_rows(upper: _Scores, lower: _Scores, bounds: _Thresholds) -> Int[Array, "h 2"]:
    """Numbers of items that surely, and may, precede each row's nearest match."""
    # One sum holds both counts: of at most 2¹¹ items in a tile, it stays below 2²⁴, up to which
    # float32 is exact. An item that surely comes before also may: it adds 1 to each count.
    packed = jnp.where(upper >= bounds.may[:, None], jnp.float32(1), jnp.float32(0))
    packed = jnp.where(lower > bounds.must[:, None], jnp.float32(1 + 2 * tiles.SIDE), packed)
    total = jnp.sum(packed, axis=1).astype(jnp.int32)
    return jnp.stack([total // (2 * tiles.SIDE), total % (2 * tiles.SIDE)], axis=1)


def _count_in_columns(upper: _Scores, lower: _Scores, bounds: _Thresholds) -> Int[Array, "w 2"]:
    """Numbers of items that surely, and may, precede each column's nearest match."""
    # Here a CPU is faster with int16, of which it adds twice as many numbers at once as of float32.
    # Counts of 64 rows are at most 64: the low one stays below 256, and both fit into int16.
    packed = jnp.where(upper >= bounds.may[None], jnp.int16(1), jnp.int16(0))
    packed = jnp.where(lower > bounds.must[None], jnp.int16(1 + 256), packed)
    groups = packed.reshape(-1, inputs.MULTIPLE, upper.shape[1])
    sums = jnp.sum(groups, axis=1, dtype=jnp.int16).astype(jnp.int32)
    return jnp.stack([jnp.sum(sums >> 8, axis=0), jnp.sum(sums & 255, axis=0)], axis=1)
