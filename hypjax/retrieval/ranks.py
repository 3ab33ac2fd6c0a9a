"""Exact rank of each query's nearest match, by counting items tile by tile without sorting scores.

Queries and items are sorted by class, so that matches are confined to few tiles of the score
matrix. These are computed twice: to find the nearest match, and to count the items before it. In
all other tiles, every item that reaches the nearest match's score counts, which takes a single
comparison.
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
from jaxtyping import Array, Bool, Float, Int, Shaped

from hypjax.geometry import Space
from hypjax.geometry.products import inner_products
from hypjax.retrieval import inputs

NO_MATCH = np.iinfo(np.int32).max
_TILE = 2048  # Queries and items of a tile, so that its scores fit into a CPU's cache.
_AXIS = "tiles"


def match_ranks(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match: the nearest gallery item of the same class.

    The rank is the number of items that an exact search lists before it: those strictly nearer, and
    those equally far with a smaller index. All local devices share the work.

    Args:
        queries: Points of the space, [n, d].
        query_labels: Class numbers or names of the queries, [n].
        gallery: Points of the space to search, [m, d]. If None, the gallery is the queries, and
            each query is excluded from its own results.
        gallery_labels: Classes of the gallery, [m]; required if there is a gallery.
        space: Space that measures the distances.

    Returns:
        Ranks from 0, [n], int32; `NO_MATCH` for queries without a match.

    Raises:
        UserError: A point is not finite or not in the space, or shapes do not match.
    """
    exclude_self = gallery is None
    if exclude_self:
        gallery, gallery_labels = queries, query_labels
    query_labels, gallery_labels = inputs.check_labelled(
        queries, query_labels, gallery, gallery_labels
    )
    query_points = _sort_by_class(space, queries, query_labels)
    gallery_points = (
        query_points if exclude_self else _sort_by_class(space, gallery, gallery_labels)
    )
    mesh = Mesh(jax.local_devices(), _AXIS)
    matching, others = _tiles(query_points.labels, gallery_points.labels, exclude_self)
    replicated = NamedSharding(mesh, P())
    points = jax.device_put((query_points, gallery_points), replicated)
    matching, others = _distribute(mesh, matching), _distribute(mesh, others)
    nearest = _nearest_matches(mesh, exclude_self)(*points, matching)
    ranks = _ranks(mesh, exclude_self)(*points, nearest, matching, others)
    valid = query_points.ids != NO_MATCH
    unsorted = np.empty(len(queries), np.int32)
    unsorted[query_points.ids[valid]] = np.asarray(ranks)[valid]
    return unsorted


class _Points(NamedTuple):
    """Points sorted by class and padded to whole tiles.

    Attributes:
        query: Vectors of the search terms, as queries.
        gallery: Vectors of the search terms, as gallery items.
        offset: Offsets of the search terms; infinite for padding.
        labels: Class numbers; −1 for padding.
        ids: Indices before the sort; `NO_MATCH` for padding.
    """

    query: Float[Array, "p k"]
    gallery: Float[Array, "p k"]
    offset: Float[Array, " p"]
    labels: Int[np.ndarray | Array, " p"]
    ids: Int[np.ndarray | Array, " p"]


class _Nearest(NamedTuple):
    """The nearest match of each query.

    Attributes:
        scores: Score of the match; −inf if there is none.
        ids: Id of the match, the smallest one among ties; `NO_MATCH` if there is none.
    """

    scores: Float[Array, " p"]
    ids: Int[Array, " p"]


class _Tiles(NamedTuple):
    """Some tiles of the score matrix, distributed over devices.

    Attributes:
        rows: Row indices of each device's tiles.
        columns: Column indices of each device's tiles.
        counts: Number of tiles of each device; the rest of `rows` and `columns` is padding.
    """

    rows: Int[Array, "devices t"]
    columns: Int[Array, "devices t"]
    counts: Int[Array, " devices"]


def _sort_by_class(
    space: Space, points: Float[ArrayLike, "n d"], labels: Int[np.ndarray, " n"]
) -> _Points:
    points = inputs.float32(points)
    space.check(points)
    terms = inputs.search_terms(space, points)
    order = np.argsort(labels, kind="stable")
    rows = _rows_of_classes(np.bincount(labels), _tile_side(len(labels)))
    source = np.full(inputs.round_up(rows[-1] + 1, _tile_side(len(labels))), -1)
    source[rows] = order
    valid = source >= 0
    return _Points(
        terms.query[source],
        terms.gallery[source],
        jnp.where(valid, terms.offset[source], jnp.inf),
        np.where(valid, labels[source], -1).astype(np.int32),
        np.where(valid, source, NO_MATCH).astype(np.int32),
    )


def _rows_of_classes(sizes: Int[np.ndarray, " classes"], tile: int) -> Int[np.ndarray, " n"]:
    """Rows for points sorted by class, with gaps so that small classes never cross a tile boundary.

    Fewer tiles next to the diagonal then contain matches and are computed twice.
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


def _tile_side(points: int) -> int:
    """Side of the tiles for a number of points."""
    return min(_TILE, inputs.round_up(points, inputs.MULTIPLE))


def _tiles(
    query_labels: Int[np.ndarray, " p"], labels: Int[np.ndarray, " q"], exclude_self: bool
) -> tuple[Int[np.ndarray, "t 2"], Int[np.ndarray, "u 2"]]:
    """Tiles (row, column) that may contain matches, and all others.

    If the gallery is the queries, each of the others also stands for its transpose.
    """
    rows, columns = (x.reshape(-1, _tile_side(len(x))) for x in (query_labels, labels))
    row_first, first = rows[:, 0], columns[:, 0]
    row_last, last = rows.max(axis=1), columns.max(axis=1)
    matching = (row_first[:, None] <= last) & (first <= row_last[:, None])
    others = np.triu(~matching) if exclude_self else ~matching
    return np.argwhere(matching), np.argwhere(others)


def _distribute(mesh: Mesh, tiles: Int[np.ndarray, "t 2"]) -> _Tiles:
    """Distributes tiles over devices, padded to a power of two so that programs are reused."""
    devices = mesh.size
    capacity = 1 << max(len(tiles) - 1, 1).bit_length()
    capacity = max(inputs.round_up(capacity, devices) // devices, 1)
    indices = np.zeros((devices, capacity, 2), np.int32)
    for device in range(devices):
        share = tiles[device::devices]
        indices[device, : len(share)] = share
    counts = np.array([len(tiles[device::devices]) for device in range(devices)], np.int32)
    return jax.device_put(
        _Tiles(indices[..., 0], indices[..., 1], counts), NamedSharding(mesh, P(_AXIS))
    )


def _rows(points: Any, number: Int[Array, ""], tile: int) -> Any:
    """The rows of a tile, from each array of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, number * tile, tile), points)


def _visit(tiles: _Tiles, visit: Callable[[Array, Array, Any], Any], state: Any) -> Any:
    """Updates a state by each tile in turn.

    Tile indices are loaded one step ahead: otherwise XLA on a CPU loads them again for every
    element that it compares.
    """

    def step(i: Int[Array, ""], carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        state, row, column = carry
        return visit(row, column, state), tiles.rows[0, i + 1], tiles.columns[0, i + 1]

    first = (state, tiles.rows[0, 0], tiles.columns[0, 0])
    return lax.fori_loop(0, tiles.counts[0], step, first)[0]


@functools.cache
def _nearest_matches(
    mesh: Mesh, exclude_self: bool
) -> Callable[[_Points, _Points, _Tiles], _Nearest]:
    """Jitted function that finds each query's nearest match in the tiles that may contain one."""

    def nearest(query_points: _Points, gallery_points: _Points, tiles: _Tiles) -> _Nearest:
        height, width = _tile_side(len(query_points.ids)), _tile_side(len(gallery_points.ids))

        def update(row: Int[Array, ""], column: Int[Array, ""], best: _Nearest) -> _Nearest:
            queries = _rows(query_points, row, height)
            items = _rows(gallery_points, column, width)
            matches = queries.labels[:, None] == items.labels
            if exclude_self:
                matches &= queries.ids[:, None] != items.ids
            scores = inner_products(queries.query, items.gallery) - items.offset
            scores = jnp.where(matches, scores, -jnp.inf)
            found = jnp.max(scores, axis=1)
            nearest = matches & (scores == found[:, None])
            ids = jnp.min(jnp.where(nearest, items.ids, NO_MATCH), axis=1)
            nearer = _merge_nearest(_rows(best, row, height), _Nearest(found, ids))
            return jax.tree.map(
                lambda x, part: lax.dynamic_update_slice_in_dim(x, part, row * height, axis=0),
                best,
                nearer,
            )

        size = len(query_points.ids)
        none_found = _Nearest(jnp.full(size, -jnp.inf), jnp.full(size, NO_MATCH))
        best = _visit(tiles, update, none_found)
        scores = lax.pmax(best.scores, _AXIS)
        ids = jnp.where(best.scores == scores, best.ids, NO_MATCH)
        return _Nearest(scores, lax.pmin(ids, _AXIS))

    return _over_tiles(mesh, nearest, points=2, tiles=1)


def _merge_nearest(best: _Nearest, found: _Nearest) -> _Nearest:
    ids = jnp.where(found.scores > best.scores, found.ids, best.ids)
    ids = jnp.where(found.scores == best.scores, jnp.minimum(found.ids, best.ids), ids)
    return _Nearest(jnp.maximum(found.scores, best.scores), ids)


@functools.cache
def _ranks(
    mesh: Mesh, exclude_self: bool
) -> Callable[[_Points, _Points, _Nearest, _Tiles, _Tiles], Int[Array, " p"]]:
    """Jitted function that counts the items before each query's nearest match."""

    def count_all(
        query_points: _Points,
        gallery_points: _Points,
        nearest: _Nearest,
        matching: _Tiles,
        others: _Tiles,
    ) -> Int[Array, " p"]:
        height, width = _tile_side(len(query_points.ids)), _tile_side(len(gallery_points.ids))

        def count_matching(row: Int[Array, ""], column: Int[Array, ""], counts: Array) -> Array:
            queries = _rows(query_points, row, height)
            items = _rows(gallery_points, column, width)
            scores = inner_products(queries.query, items.gallery) - items.offset
            before = _before(scores, items.ids, _rows(nearest, row, height))
            mismatches = queries.labels[:, None] != items.labels
            return _add(counts, row, _count(before & mismatches, axis=1))

        def count_other(row: Int[Array, ""], column: Int[Array, ""], counts: Array) -> Array:
            queries = _rows(query_points, row, height)
            items = _rows(gallery_points, column, width)
            products = inner_products(queries.query, items.gallery)
            scores = products - items.offset
            before = _before(scores, items.ids, _rows(nearest, row, height))
            counts = _add(counts, row, _count(before, axis=1))
            if exclude_self:  # The transposed tile: columns are queries and rows are items.
                scores = (products - queries.offset[:, None]).T
                before = _before(scores, queries.ids, _rows(nearest, column, width))
                counts = _add(counts, column, _count(before.T, axis=0))
            return counts

        counts = jnp.zeros(len(query_points.ids), jnp.int32)
        counts = _visit(others, count_other, _visit(matching, count_matching, counts))
        return jnp.where(nearest.ids == NO_MATCH, NO_MATCH, lax.psum(counts, _AXIS))

    return _over_tiles(mesh, count_all, points=3, tiles=2)


def _before(
    scores: Float[Array, "h w"], ids: Int[Array, " w"], nearest: _Nearest
) -> Bool[Array, "h w"]:
    """Marks the items that an exact search lists before the nearest match.

    Items with a smaller id must reach its score. Items with a larger id must exceed it, that is,
    reach the next larger number.
    """
    earlier = ids < nearest.ids[:, None]
    return scores >= jnp.where(earlier, nearest.scores[:, None], _next(nearest.scores)[:, None])


def _next(x: Float[Array, " h"]) -> Float[Array, " h"]:
    """The next larger float, with subnormal numbers taken as 0, as XLA's comparisons do."""
    smallest = jnp.finfo(x.dtype).smallest_normal
    above = jnp.nextafter(x, jnp.inf)
    return jnp.where(jnp.abs(above) < smallest, jnp.where(x < 0, 0, smallest), above)


def _count(mask: Bool[Array, "h w"], axis: int) -> Int[Array, " h"]:
    """Number of true elements along an axis, by the sum that is fastest on a CPU."""
    if axis == 1:
        return jnp.sum(mask, axis=1, dtype=jnp.float32).astype(jnp.int32)  # Exact up to 2²⁴.
    groups = mask.astype(jnp.int8).reshape(-1, inputs.MULTIPLE, mask.shape[1])
    return jnp.sum(jnp.sum(groups, axis=1, dtype=jnp.int8), axis=0, dtype=jnp.int32)


def _add(counts: Int[Array, " p"], tile: Int[Array, ""], more: Int[Array, " h"]) -> Array:
    start = tile * len(more)
    more += lax.dynamic_slice_in_dim(counts, start, len(more))
    return lax.dynamic_update_slice_in_dim(counts, more, start, axis=0)


def _over_tiles(mesh: Mesh, function: Callable, *, points: int, tiles: int) -> Callable:
    """Jits a function whose tiles are distributed over devices and whose points are replicated."""
    specs = (P(),) * points + (P(_AXIS),) * tiles
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )
