"""Rank of each query's nearest match, by counting: exact, tile by tile, without sorting anything.

Queries and items are sorted by class, so that matches fall into few tiles of the matrix of scores.
Those are looked at twice: for the nearest match, and for what comes before it. In all others every
item that reaches the nearest match's score comes before it, which is one comparison.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from hypjax.geometry import Space
from hypjax.geometry.products import inner_products
from hypjax.retrieval import inputs

NO_MATCH = np.iinfo(np.int32).max
_TILE = 2048  # Queries and items of a tile, whose scores a CPU's cache holds.
_AXIS = "tiles"


def match_ranks(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match, from 0; the largest int32 where there is none.

    It is the number of items that an exact search lists before the nearest item of the query's
    class: those strictly nearer, and those equally far that come earlier in the gallery. Local
    devices share the tiles.

    Args:
        queries: Points of the space.
        query_labels: Their classes.
        gallery: Points to search; None: every query searches the other queries.
        gallery_labels: Their classes.
        space: Measures the distances.

    Raises:
        UserError: A point is not finite or outside the space, or sizes do not fit.
    """
    itself = gallery is None
    if itself:
        gallery, gallery_labels = queries, query_labels
    query_labels, gallery_labels = inputs.check_labelled(
        queries, query_labels, gallery, gallery_labels
    )
    searching = _sorted(space, queries, query_labels)
    searched = searching if itself else _sorted(space, gallery, gallery_labels)
    mesh = Mesh(jax.local_devices(), _AXIS)
    matching, plain = _tiles(searching.labels, searched.labels, itself)
    everywhere = NamedSharding(mesh, P())
    points = jax.device_put((searching, searched), everywhere)
    matching, plain = _deal(mesh, matching), _deal(mesh, plain)
    nearest = _nearest_matches(mesh, itself)(*points, matching)
    ranks = _ranks(mesh, itself)(*points, nearest, matching, plain)
    real = searching.ids != NO_MATCH
    unsorted = np.empty(len(queries), np.int32)
    unsorted[searching.ids[real]] = np.asarray(ranks)[real]
    return unsorted


class _Points(NamedTuple):
    """Points in the order of their classes, padded to whole tiles.

    Attributes:
        query: What is multiplied where they search.
        gallery: What is multiplied where they are searched.
        offset: To subtract from the products; infinite where there is no point.
        labels: Their classes; −1 where there is no point.
        ids: Their places in the order they were given in.
    """

    query: Float[Array, "p k"]
    gallery: Float[Array, "p k"]
    offset: Float[Array, " p"]
    labels: Int[np.ndarray | Array, " p"]
    ids: Int[np.ndarray | Array, " p"]


class _Nearest(NamedTuple):
    """The nearest match of each query.

    Attributes:
        scores: Its score; -inf where there is none.
        ids: Its id, the smallest of equally near ones.
    """

    scores: Float[Array, " p"]
    ids: Int[Array, " p"]


class _Tiles(NamedTuple):
    """Some tiles of the matrix of scores, by the numbers of their row and column.

    Attributes:
        rows: Of each device's tiles.
        columns: Of each device's tiles.
        counts: How many of these are to be computed on each device.
    """

    rows: Int[Array, "devices t"]
    columns: Int[Array, "devices t"]
    counts: Int[Array, " devices"]


def _sorted(
    space: Space, points: Float[ArrayLike, "n d"], labels: Int[np.ndarray, " n"]
) -> _Points:
    points = inputs.float32(points)
    space.check(points)
    terms = inputs.search_terms(space, points)
    order = np.argsort(labels, kind="stable")
    rows = _rows_of_classes(np.bincount(labels), _tile(len(labels)))
    source = np.full(inputs.round_up(rows[-1] + 1, _tile(len(labels))), -1)
    source[rows] = order
    real = source >= 0
    return _Points(
        terms.query[source],
        terms.gallery[source],
        jnp.where(real, terms.offset[source], jnp.inf),
        np.where(real, labels[source], -1).astype(np.int32),
        np.where(real, source, NO_MATCH).astype(np.int32),
    )


def _rows_of_classes(sizes: Int[np.ndarray, " classes"], tile: int) -> Int[np.ndarray, " n"]:
    """Rows of points in the order of their classes, small ones of which never cross a tile's edge.

    So tiles beside the diagonal need not be looked at twice for the sake of one class.
    """
    starts, end = [], 0
    for size in sizes.tolist():
        left = -end % tile
        if left < size <= tile // 16:
            end += left
        starts.append(end)
        end += size
    before = np.cumsum(sizes) - sizes
    return np.repeat(np.array(starts) - before, sizes) + np.arange(sizes.sum())


def _tile(points: int) -> int:
    """Side of the tiles of so many points."""
    return min(_TILE, inputs.round_up(points, inputs.MULTIPLE))


def _tiles(
    query_labels: Int[np.ndarray, " p"], labels: Int[np.ndarray, " q"], itself: bool
) -> tuple[Int[np.ndarray, "t 2"], Int[np.ndarray, "u 2"]]:
    """Tiles (row, column) that may hold matches, and all others.

    Where points search one another, a plain tile stands for its mirror image too.
    """
    rows, columns = (x.reshape(-1, _tile(len(x))) for x in (query_labels, labels))
    row_first, first = rows[:, 0], columns[:, 0]
    row_last, last = rows.max(axis=1), columns.max(axis=1)
    matching = (row_first[:, None] <= last) & (first <= row_last[:, None])
    plain = np.triu(~matching) if itself else ~matching
    return np.argwhere(matching), np.argwhere(plain)


def _deal(mesh: Mesh, tiles: Int[np.ndarray, "t 2"]) -> _Tiles:
    """Shares tiles out; the room for them grows in powers of two, so that programs are reused."""
    devices = mesh.size
    room = 1 << max(len(tiles) - 1, 1).bit_length()
    room = max(inputs.round_up(room, devices) // devices, 1)
    dealt = np.zeros((devices, room, 2), np.int32)
    for device in range(devices):
        share = tiles[device::devices]
        dealt[device, : len(share)] = share
    counts = np.array([len(tiles[device::devices]) for device in range(devices)], np.int32)
    return jax.device_put(
        _Tiles(dealt[..., 0], dealt[..., 1], counts), NamedSharding(mesh, P(_AXIS))
    )


def _part(points: Any, number: Int[Array, ""], tile: int) -> Any:
    """The rows of sorted points, or of what is known of them, that belong to a tile."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, number * tile, tile), points)


def _visit(tiles: _Tiles, visit: Callable[[Array, Array, Any], Any], state: Any) -> Any:
    """Changes a state by each tile in turn.

    A tile's numbers are looked up one step ahead: otherwise XLA, on a CPU, looks them up again for
    every element that it compares.
    """

    def step(i: Int[Array, ""], carried: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        state, row, column = carried
        return visit(row, column, state), tiles.rows[0, i + 1], tiles.columns[0, i + 1]

    first = (state, tiles.rows[0, 0], tiles.columns[0, 0])
    return lax.fori_loop(0, tiles.counts[0], step, first)[0]


@functools.cache
def _nearest_matches(mesh: Mesh, itself: bool) -> Callable[[_Points, _Points, _Tiles], _Nearest]:
    """The function that finds each query's nearest match in the tiles that may hold one."""

    def nearest(searching: _Points, searched: _Points, tiles: _Tiles) -> _Nearest:
        height, width = _tile(len(searching.ids)), _tile(len(searched.ids))

        def look(row: Int[Array, ""], column: Int[Array, ""], best: _Nearest) -> _Nearest:
            queries, items = _part(searching, row, height), _part(searched, column, width)
            matches = queries.labels[:, None] == items.labels
            if itself:
                matches &= queries.ids[:, None] != items.ids
            scores = inner_products(queries.query, items.gallery) - items.offset
            scores = jnp.where(matches, scores, -jnp.inf)
            found = jnp.max(scores, axis=1)
            nearest = matches & (scores == found[:, None])
            ids = jnp.min(jnp.where(nearest, items.ids, NO_MATCH), axis=1)
            nearer = _nearer(_part(best, row, height), _Nearest(found, ids))
            return jax.tree.map(
                lambda x, part: lax.dynamic_update_slice_in_dim(x, part, row * height, axis=0),
                best,
                nearer,
            )

        size = len(searching.ids)
        nothing = _Nearest(jnp.full(size, -jnp.inf), jnp.full(size, NO_MATCH))
        best = _visit(tiles, look, nothing)
        scores = lax.pmax(best.scores, _AXIS)
        ids = jnp.where(best.scores == scores, best.ids, NO_MATCH)
        return _Nearest(scores, lax.pmin(ids, _AXIS))

    return _over_tiles(mesh, nearest, points=2, tiles=1)


def _nearer(best: _Nearest, found: _Nearest) -> _Nearest:
    ids = jnp.where(found.scores > best.scores, found.ids, best.ids)
    ids = jnp.where(found.scores == best.scores, jnp.minimum(found.ids, best.ids), ids)
    return _Nearest(jnp.maximum(found.scores, best.scores), ids)


@functools.cache
def _ranks(
    mesh: Mesh, itself: bool
) -> Callable[[_Points, _Points, _Nearest, _Tiles, _Tiles], Int[Array, " p"]]:
    """The function that counts the items before each query's nearest match."""

    def count_all(
        searching: _Points, searched: _Points, nearest: _Nearest, matching: _Tiles, plain: _Tiles
    ) -> Int[Array, " p"]:
        height, width = _tile(len(searching.ids)), _tile(len(searched.ids))

        def count_others(row: Int[Array, ""], column: Int[Array, ""], counts: Array) -> Array:
            queries, items = _part(searching, row, height), _part(searched, column, width)
            scores = inner_products(queries.query, items.gallery) - items.offset
            before = _before(scores, items.ids, _part(nearest, row, height))
            others = queries.labels[:, None] != items.labels
            return _add(counts, row, _count(before & others, axis=1))

        def count_plain(row: Int[Array, ""], column: Int[Array, ""], counts: Array) -> Array:
            queries, items = _part(searching, row, height), _part(searched, column, width)
            products = inner_products(queries.query, items.gallery)
            scores = products - items.offset
            before = _before(scores, items.ids, _part(nearest, row, height))
            counts = _add(counts, row, _count(before, axis=1))
            if itself:  # The columns' points search the rows'.
                scores = (products - queries.offset[:, None]).T
                before = _before(scores, queries.ids, _part(nearest, column, width))
                counts = _add(counts, column, _count(before.T, axis=0))
            return counts

        counts = jnp.zeros(len(searching.ids), jnp.int32)
        counts = _visit(plain, count_plain, _visit(matching, count_others, counts))
        return jnp.where(nearest.ids == NO_MATCH, NO_MATCH, lax.psum(counts, _AXIS))

    return _over_tiles(mesh, count_all, points=3, tiles=2)


def _before(
    scores: Float[Array, "h w"], ids: Int[Array, " w"], nearest: _Nearest
) -> Bool[Array, "h w"]:
    """Which items an exact search lists before the nearest match: those that reach its score.

    Later ones must exceed it, that is reach the next number.
    """
    earlier = ids < nearest.ids[:, None]
    return scores >= jnp.where(earlier, nearest.scores[:, None], _next(nearest.scores)[:, None])


def _next(x: Float[Array, " h"]) -> Float[Array, " h"]:
    """The next larger number, where those too small to be normal are 0, as in XLA's comparisons."""
    smallest = jnp.finfo(x.dtype).smallest_normal
    above = jnp.nextafter(x, jnp.inf)
    return jnp.where(jnp.abs(above) < smallest, jnp.where(x < 0, 0, smallest), above)


def _count(mask: Bool[Array, "h w"], axis: int) -> Int[Array, " h"]:
    """True elements along an axis, by the sum that a CPU does fastest there."""
    if axis == 1:
        return jnp.sum(mask, axis=1, dtype=jnp.float32).astype(jnp.int32)  # Exact up to 2²⁴.
    groups = mask.astype(jnp.int8).reshape(-1, inputs.MULTIPLE, mask.shape[1])
    return jnp.sum(jnp.sum(groups, axis=1, dtype=jnp.int8), axis=0, dtype=jnp.int32)


def _add(counts: Int[Array, " p"], tile: Int[Array, ""], more: Int[Array, " h"]) -> Array:
    start = tile * len(more)
    more += lax.dynamic_slice_in_dim(counts, start, len(more))
    return lax.dynamic_update_slice_in_dim(counts, more, start, axis=0)


def _over_tiles(mesh: Mesh, function: Callable, *, points: int, tiles: int) -> Callable:
    """A program in which devices share tiles, and each holds all points."""
    specs = (P(),) * points + (P(_AXIS),) * tiles
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )
