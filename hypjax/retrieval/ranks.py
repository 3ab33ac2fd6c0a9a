"""Exact ranks of relevant items: of each query's nearest match, or of all its positives."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Shaped

from hypjax.geometry import Composite, Space
from hypjax.retrieval import inputs, tiles
from hypjax.retrieval.inputs import Labelled, Rows
from hypjax.retrieval.relevance import Lists
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
_BLOCK_SIZE = 512  # Queries whose positives are ranked at once.
_BOUND_BYTES = 2**26  # Largest size of the bounds of their separations from a chunk of the gallery.
_MOST_UNDECIDED = 2**14  # Items of a query that are listed because bounds leave their order open.
_CHUNK_BYTES = 2**25  # Largest size of the points of a chunk of the gallery.
_Scores = Float[Array, "h w"]  # Of a tile.


def match_ranks(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    space: Space,
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
        own_ids: Gallery index to exclude for each query, [n], if there is a gallery that holds the
            queries, perhaps as other points.

    Returns:
        Ranks from 0, [n], int32; `NO_MATCH` for queries without a match.

    Raises:
        UserError: A point is not finite or not in the space, or shapes do not match.
    """
    asked, searched = inputs.labelled(queries, query_labels, gallery, gallery_labels, own_ids)
    return first_ranks(asked, searched, space, None)


def first_ranks(
    asked: Labelled, searched: Labelled, space: Space, ks: Sequence[int] | None
) -> Int[np.ndarray, " n"]:
    """As `match_ranks`, for what `inputs.labelled` returns.

    With numbers of neighbours `ks`, a rank may differ from the true one, but is below the same ones
    of these numbers. That takes less time.
    """
    found = np.empty(len(asked.labels), np.int32)

    def by_products(rows: Int[np.ndarray, " r"], score: Score) -> Int[np.ndarray, " u"]:
        bounds = _bound_ranks(asked, rows, searched, score)
        found[rows] = bounds[:, 0]
        if ks is not None:  # It is enough to know below which K a rank is.
            bounds = np.searchsorted(np.sort(ks), bounds, side="right")
        return rows[bounds[:, 0] != bounds[:, 1]]

    def by_subtraction(rows: Int[np.ndarray, " r"]) -> None:
        for part in inputs.split(rows, inputs.PART_BYTES // (4 * asked.points.shape[1])):
            found[part] = _ranks_by_subtraction(space, asked.part(part), searched)

    score = Score.around(space, sample(searched.points))
    for points in (asked.points,) if asked is searched else (asked.points, searched.points):
        inputs.check_in(space, points)
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


def _bound_ranks(
    asked: Labelled, rows: Rows, searched: Labelled, score: Score
) -> Int[np.ndarray, "r 2"]:
    """Numbers of items that surely, and may, come before the nearest match of some queries.

    Queries and items are sorted by class, so that matches are confined to few tiles of the score
    matrix. These are computed twice: to bound the score of the nearest match, and to count the
    items before it. In all other tiles every item counts, which takes two comparisons of the same
    score, and no sort: so a rank costs little more than the matrix product.

    Queries with ids are left out of their own results. Those without a match have `NO_MATCH`.
    """
    mesh = Mesh(jax.local_devices(), tiles.AXIS)
    queries = tiles.Sorted(asked, rows, score, mesh)
    items = tiles.Sorted(searched, np.arange(len(searched.labels)), score, mesh)
    symmetric = asked is searched and score.precision is Precision.SINGLE
    pairs = _Pairs(mesh, score.space, queries, items, asked.ids is not None, symmetric)
    # Of many items, only those of the queries' classes may be matches.
    wanted, among = np.flatnonzero(np.isin(searched.labels, asked.labels[rows])), pairs
    if len(items.rows) > 1 and 0 < len(wanted) < len(searched.labels):
        among = pairs._replace(items=tiles.Sorted(searched, wanted, score, mesh))
    with score.precision.enabled():
        matches = among.bound_matches(score.precision)
        counts = pairs.count_before(matches)
    counts[matches[1] == -np.inf] = NO_MATCH
    bounds = np.empty((len(asked.labels), 2), np.int32)
    valid = queries.rows >= 0
    bounds[queries.rows[valid]] = counts[valid]
    return bounds[rows]


class _Thresholds(NamedTuple):
    """Scores that tell on which side of a query's nearest match an item is."""

    may: Float[Array, " p"]  # An item with a lower score surely comes after the match.
    must: Float[Array, " p"]  # One with a higher score surely comes before; −∞ without a match.


class _Pairs(NamedTuple):
    """Pairs of a chunk of queries and a chunk of items; one pair, if all factors fit into memory.

    If the queries are the gallery and `symmetric` is set, a pair also stands for its transpose.
    """

    mesh: Mesh
    space: Space
    queries: tiles.Sorted
    items: tiles.Sorted
    exclude_self: bool
    symmetric: bool

    def bound_matches(self, precision: Precision) -> Float[np.ndarray, "2 chunks p"]:
        """Lower and upper bounds on −separation of each query's nearest match; −∞ without one."""
        program, _ = programs(self.mesh, self.exclude_self, self.symmetric)
        bounds = np.full((2, *self.queries.rows.shape), -np.inf, precision.value)
        for row, column in np.ndindex(len(self.queries.rows), len(self.items.rows)):
            matching, _ = tiles.split(self.queries.labels[row], self.items.labels[column])
            if len(matching):
                (shared,) = self._distribute(matching)
                found = program(self.space, *self._points(row, column), shared)
                bounds[:, row] = np.maximum(bounds[:, row], found)
        return bounds

    def count_before(
        self, matches: Float[np.ndarray, "2 chunks p"]
    ) -> Int[np.ndarray, "chunks p 2"]:
        """Numbers of items that surely, and may, come before each query's nearest match."""
        counts = np.zeros((*self.queries.rows.shape, 2), np.int32)
        _, program = programs(self.mesh, self.exclude_self, self.symmetric)
        for row, column in np.ndindex(len(self.queries.rows), len(self.items.rows)):
            matching, others = tiles.split(self.queries.labels[row], self.items.labels[column])
            if self.symmetric:  # Tiles with matches do not stand for their transposes.
                others = others[(row < column) | (row == column) & (others[:, 0] < others[:, 1])]
            if not len(matching) + len(others):
                continue
            shared = self._distribute(matching, others)
            bounds = matches[:, row], matches[:, column] if self.symmetric else None
            found = program(self.space, *self._points(row, column), *bounds, *shared)
            counts[row] += np.asarray(found[0])
            if self.symmetric:
                counts[column] += np.asarray(found[1])
        return counts

    def _points(self, row: int, column: int) -> tuple[tiles.Points, tiles.Points]:
        rows = self.queries.chunk(row)
        return rows, rows if self.symmetric and row == column else self.items.chunk(column)

    def _distribute(self, *lists: Int[np.ndarray, "t 2"]) -> list[tiles.Tiles]:
        sizes = self.queries.rows.shape[1], self.items.rows.shape[1]
        capacity = math.prod(size // tiles.side(size) for size in sizes)
        return [tiles.distribute(self.mesh, each, capacity) for each in lists]


@functools.cache
def programs(mesh: Mesh, exclude_self: bool, symmetric: bool) -> tuple[Callable, Callable]:
    """The jitted `_bound_matches` and `_count_before`; devices share tiles, and hold all points."""

    def jitted(function: Callable, arrays: int, lists: int) -> Callable:
        specs = (P(),) * arrays + (P(tiles.AXIS),) * lists
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        )

    match = functools.partial(_bound_matches, exclude_self=exclude_self)
    count = functools.partial(_count_before, symmetric=symmetric)
    return jitted(match, 3, 1), jitted(count, 5, 2)


def _bound_matches(
    space: Space,
    rows: tiles.Points,
    columns: tiles.Points,
    matching: tiles.Tiles,
    *,
    exclude_self: bool,
) -> Float[Array, "2 p"]:
    """The highest lower bound and the highest upper bound on −separation of any match of a query.

    Between them is −separation of the nearest match.
    """
    height, width = tiles.side(len(rows.ids)), tiles.side(len(columns.ids))

    def update(row: Int[Array, ""], column: Int[Array, ""], best: tuple[Array, Array]) -> Any:
        queries, items = tiles.rows_of(rows, row, height), tiles.rows_of(columns, column, width)
        matches = queries.labels[:, None] == items.labels
        if exclude_self:
            matches &= queries.ids[:, None] != items.ids
        most = highest(space, queries.factors.query, items.factors.gallery)
        least = lowest(space, queries.factors, items.factors)
        found = (jnp.max(jnp.where(matches, x, -jnp.inf), axis=1) for x in (least, most))
        pairs = zip(best, found, strict=True)
        return tuple(tiles.merged(x, row, more, jnp.maximum) for x, more in pairs)

    none_found = jnp.full_like(rows.factors.slack[0][:, 0], -jnp.inf)
    best = tiles.visit(matching, update, (none_found, none_found))
    return jnp.stack(lax.pmax(best, tiles.AXIS))


def _count_before(
    space: Space,
    rows: tiles.Points,
    columns: tiles.Points,
    row_matches: Float[Array, "2 p"],
    column_matches: Float[Array, "2 q"] | None,
    matching: tiles.Tiles,
    others: tiles.Tiles,
    *,
    symmetric: bool,
) -> tuple[Int[Array, "p 2"], Int[Array, "q 2"]]:
    """Counts the items that surely, or may, precede each query's nearest match.

    If `symmetric`, these are also counted for columns as queries, in tiles without matches.
    """
    height, width = tiles.side(len(rows.ids)), tiles.side(len(columns.ids))
    thresholds = _thresholds(space, row_matches, rows.factors, columns.factors)
    if symmetric:
        transposed = _thresholds(space, column_matches, columns.factors, rows.factors)

    def count_matching(row: Int[Array, ""], column: Int[Array, ""], counts: Array) -> Array:
        queries, items = tiles.rows_of(rows, row, height), tiles.rows_of(columns, column, width)
        mismatches = queries.labels[:, None] != items.labels
        scores = highest(space, queries.factors.query, items.factors.gallery)
        scores = jnp.where(mismatches, scores, -jnp.inf)
        least = _least(space, scores, queries.factors, items.factors)
        found = _count_in_rows(scores, least, tiles.rows_of(thresholds, row, height))
        return tiles.merged(counts, row, found, jnp.add)

    def count_other(
        row: Int[Array, ""], column: Int[Array, ""], counts: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        of_rows, of_columns = counts
        queries = tiles.rows_of(rows.factors, row, height)
        items = tiles.rows_of(columns.factors, column, width)
        scores = highest(space, queries.query, items.gallery)
        least = _least(space, scores, queries, items)
        found = _count_in_rows(scores, least, tiles.rows_of(thresholds, row, height))
        of_rows = tiles.merged(of_rows, row, found, jnp.add)
        if symmetric:  # The transposed tile: columns are queries and rows are items.
            found = _count_in_columns(scores, least, tiles.rows_of(transposed, column, width))
            of_columns = tiles.merged(of_columns, column, found, jnp.add)
        return of_rows, of_columns

    none = (jnp.zeros((len(points.ids), 2), jnp.int32) for points in (rows, columns))
    of_rows, of_columns = none
    of_rows = tiles.visit(matching, count_matching, of_rows)
    return lax.psum(tiles.visit(others, count_other, (of_rows, of_columns)), tiles.AXIS)


def _thresholds(
    space: Space, matches: Float[Array, "2 p"], queries: Factors, items: Factors
) -> _Thresholds:
    """Thresholds for the scores of some items, from bounds on −separation of nearest matches."""
    least, most = matches
    most = widened(most, 1)
    if not _bounds_pairs(space, most):  # Then scores are compared with `must`, not lower bounds.
        most += 2 * largest_slack(queries, items)
    return _Thresholds(widened(least, -1), widened(most, 1))


def _bounds_pairs(space: Space, scores: Array) -> bool:
    """Whether each pair has a lower bound of its own.

    In float32, the largest slack of any item is added to thresholds instead, which is faster. In
    float64, where items may be in several crowds, it is large for items of other crowds; and it
    does not bound sums of distances.
    """
    return scores.dtype == jnp.float64 or isinstance(space, Composite)


def _least(space: Space, scores: _Scores, queries: Factors, items: Factors) -> _Scores:
    """Scores that must exceed a threshold for items that surely come before a match."""
    if not _bounds_pairs(space, scores):
        return scores
    return jnp.minimum(scores, lowest(space, queries, items))  # Scores may be masked by −∞.


def _count_in_rows(scores: _Scores, least: _Scores, bounds: _Thresholds) -> Int[Array, "h 2"]:
    """Numbers of items that surely, and may, come before each row's nearest match."""
    # One sum counts both: it is below 2²⁴, up to which float32 is exact.
    both = jnp.where(scores >= bounds.may[:, None], jnp.float32(1), jnp.float32(0))
    both = jnp.where(least > bounds.must[:, None], jnp.float32(1 + 2 * tiles.SIDE), both)
    total = jnp.sum(both, axis=1).astype(jnp.int32)
    return jnp.stack([total // (2 * tiles.SIDE), total % (2 * tiles.SIDE)], axis=1)


def _count_in_columns(scores: _Scores, least: _Scores, bounds: _Thresholds) -> Int[Array, "w 2"]:
    """Like `_count_in_rows`, for columns; this way of adding is the fastest one on a CPU."""
    both = jnp.where(scores >= bounds.may, jnp.int16(1), jnp.int16(0))
    both = jnp.where(least > bounds.must, jnp.int16(1 + 256), both)
    # Of 64 rows, each count is at most 64, so that the low one fits below 256, and both into int16.
    groups = both.reshape(-1, inputs.MULTIPLE, scores.shape[1])
    sums = jnp.sum(groups, axis=1, dtype=jnp.int16).astype(jnp.int32)
    return jnp.stack([jnp.sum(sums >> 8, axis=0), jnp.sum(sums & 255, axis=0)], axis=1)


def positive_ranks(
    queries: inputs.Points,
    gallery: inputs.Points,
    lists: Iterable[Lists],
    space: Space,
) -> Iterator[Int[np.ndarray, " positives"]]:
    """Yields the ranks of each query's positives, in ascending order, from their lists.

    A rank is the number of items that an exact search lists before the positive: those strictly
    nearer, and those equally far with a smaller index, without ignored items. Matrix products bound
    the separations; where the bounds leave the order open, subtraction in float64 decides it.
    Raises UserError if a point is not finite or not in the space.
    """
    score = Score.around(space, sample(gallery))
    inputs.check_in(space, gallery)
    size, lists = min(_BLOCK_SIZE, len(queries)), iter(lists)
    with ThreadPoolExecutor(usable_cores()) as pool:
        for first in range(0, len(queries), size):
            block = inputs.host_rows(queries, np.s_[first : first + size])
            space.check(block, first=first)
            factors = score.factors(inputs.pad_rows(block, size))
            positives = [_Positives(*pair) for pair in itertools.islice(lists, len(block))]
            # Pass the positives, then the whole gallery.
            wanted = np.unique(np.concatenate([each.ids for each in positives]))
            for items, bounds in _bounds_of_items(score, factors, gallery, wanted):
                list(pool.map(functools.partial(_Positives.bound, items=items), positives, bounds))
            for items, bounds in _bounds_of_items(score, factors, gallery, np.arange(len(gallery))):
                list(pool.map(functools.partial(_Positives.count, items=items), positives, bounds))
            ranks = functools.partial(_Positives.ranks, space=space, gallery=gallery)
            yield from pool.map(ranks, positives, block)


def _bounds_of_items(
    score: Score, queries: Factors, gallery: inputs.Points, ids: Rows
) -> Iterator[tuple[Rows, Float[np.ndarray, "b 2 r"]]]:
    """Yields parts of some items, and lower and upper bounds on −separation of queries and them."""
    block = len(queries.slack[0])
    size = min(_BOUND_BYTES // (8 * block), _CHUNK_BYTES // (4 * gallery.shape[1]), len(ids))
    size = max(size, 1)
    for items in inputs.split(ids, size):
        points = inputs.pad_rows(inputs.host_rows(gallery, items), size)
        found = np.asarray(_chunk_bounds(score.space, queries, score.factors(points)))
        yield items, found[..., : len(items)]


@jax.jit
def _chunk_bounds(space: Space, queries: Factors, items: Factors) -> Float[Array, "b 2 r"]:
    least = widened(lowest(space, queries, items), -1)
    return jnp.stack([least, widened(highest(space, queries.query, items.gallery), 1)], axis=1)


class _Positives:
    """The positives of one query, and what is known of the items before each of them.

    The −separation of a positive is in an interval, and so is that of an item. If the item's is
    above that of a positive, it surely comes before it; if they overlap, they are compared later.
    """

    def __init__(self, ids: Int[np.ndarray, " p"], ignored: Int[np.ndarray, " i"]) -> None:
        self.ids, self._ignored = np.sort(ids), ignored
        self._least, self._most = np.empty((2, len(ids)), np.float32)
        self._before = np.zeros(len(ids) + 1, int)
        self._undecided: list[Rows] = []

    def bound(self, bounds: Float[np.ndarray, "2 r"], items: Rows) -> None:
        """Takes the bounds of positives among some items, which are sorted."""
        first, last = np.searchsorted(self.ids, (items[0], items[-1] + 1))
        places = np.searchsorted(items, self.ids[first:last])
        self._least[first:last], self._most[first:last] = bounds[:, places]

    def count(self, bounds: Float[np.ndarray, "2 r"], items: Rows) -> None:
        """Counts those of the next items that surely come before each of the positives."""
        if not len(self.ids) or self._crowded():
            return
        starts, ends = np.sort(self._least), np.sort(self._most)
        reached = np.flatnonzero(bounds[1] >= starts[0])  # Others come after all positives.
        reached = reached[~np.isin(items[reached], self._ignored)]
        least, most = bounds[:, reached]
        # How many positives end below an item, and how many more begin below its end.
        passed = np.searchsorted(ends, least, side="left")
        undecided = np.searchsorted(starts, most, side="right") > passed
        self._before += np.bincount(passed[~undecided], minlength=len(self._before))
        self._undecided.append(items[reached[undecided]])

    def ranks(
        self, query: Float[np.ndarray, " d"], space: Space, gallery: inputs.Points
    ) -> Int[np.ndarray, " p"]:
        """Ranks of the positives, ascending."""
        if not len(self.ids):
            return self.ids
        if self._crowded():
            items = np.setdiff1d(np.arange(len(gallery)), self._ignored)
            found = next(separations(space, query[None], gallery))[items]
            return np.sort(_places(items, found, self.ids))
        items = np.concatenate(self._undecided)
        # Padded to a power of two, so that few programs are compiled.
        size = max(1 << (len(items) - 1).bit_length(), inputs.LANES)
        points = inputs.pad_rows(inputs.host_rows(gallery, items), size)
        with jax.enable_x64(True):
            found = np.asarray(separation_matrix(space, query[None], points))[0, : len(items)]
        before = np.cumsum(self._before[::-1])[::-1][1:]  # Of the positives in order of their ends.
        before = before[np.argsort(np.argsort(self._most))]
        return np.sort(before + _places(items, found, self.ids))

    def _crowded(self) -> bool:
        """Whether so many items are undecided that they are not listed."""
        return sum(map(len, self._undecided)) > _MOST_UNDECIDED


def _places(
    items: Rows, separations: Float[np.ndarray, " r"], wanted: Rows
) -> Int[np.ndarray, " p"]:
    """Places of wanted items among some items, which are sorted, by separation and by index."""
    places = np.empty(len(items), int)
    places[np.argsort(separations, kind="stable")] = np.arange(len(items))
    return places[np.searchsorted(items, wanted)]
