"""Exact nearest neighbours in blocks: in memory, from disk, or over several devices."""

import functools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.products import inner_products
from hypjax.retrieval import inputs
from hypjax.retrieval.galleries import AXIS, Chunk, Gallery, as_gallery
from hypjax.system.cores import usable_cores

_BLOCK_SIZE = 512  # Queries of a block.
_BLOCK_BYTES = 128 * 2**20  # Largest size of the products of a block and a chunk.
_FETCH_BYTES = 64 * 2**20  # Largest size of the neighbours' points that are fetched at once.
_GROUP = 64  # Items of a group; only the groups with the largest maxima are searched further.
_QUERY_BATCH = 64  # Queries selected for at once, so that candidates fit into a CPU's cache.
_MAX_THREADS = 4


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

    Items are ranked by inner products (see `hypjax.geometry.SearchTerms`), ties by their index in
    the gallery. The distances of the k items found are then recomputed by subtraction. Two items
    whose distances differ by less than float32 products resolve may be in the wrong order.

    A NumPy gallery may be memory-mapped and larger than a device's memory: it is streamed in
    chunks, and all local devices share each chunk. A JAX array is searched by the devices that hold
    it. Besides inputs and results, this takes memory for two copies of the queries and a constant
    amount.

    Args:
        queries: Points of the space, [n, d].
        gallery: Points of the space to search, [m, d].
        k: Number of neighbours per query.
        space: Space that measures the distances.
        exclude_self: Whether the gallery is the queries and no query is its own neighbour.
        block_size: Number of queries searched at once, or None for the default. It does not change
            the result.

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
    items = len(gallery) - (own_ids is not None)
    if not 1 <= k <= items:
        raise UserError(f"k is {k}, but there are {items} items for a query to find")
    if own_ids is not None:
        # If a query is not among its k + 1 nearest items, the last of these is dropped instead.
        found = search(queries, None, gallery, k=k + 1, space=space, block_size=block_size)
        return _remove_self(own_ids, *found)
    searched = as_gallery(gallery)
    size = inputs.round_up(min(block_size, len(queries)), inputs.MULTIPLE)
    rows = inputs.round_up(max(min(searched.rows, _BLOCK_BYTES // (4 * size)), k), inputs.MULTIPLE)
    blocks = _blocks(queries, size, space, searched.mesh)
    with ThreadPoolExecutor(_threads(searched.mesh)) as pool:
        searcher = _BlockSearch(searched.mesh, k, (size, rows), pool)
        best = [None] * len(blocks)
        for chunk in searched.chunks(space, rows):
            best = [searcher.update(chunk, *pair) for pair in zip(blocks, best, strict=True)]
        distances = pool.map(functools.partial(_distances, space, searched), blocks, best)
    ids = np.concatenate([np.asarray(block.ids) for block in best])
    return np.concatenate(list(distances))[: len(queries)], ids[: len(queries)]


def _remove_self(
    own_ids: Int[np.ndarray, " n"],
    distances: Float[np.ndarray, "n k"],
    ids: Int[np.ndarray, "n k"],
) -> tuple[Float[np.ndarray, "n k-1"], Int[np.ndarray, "n k-1"]]:
    """Removes one item from each row: the query itself if it is there, otherwise the last."""
    kept = ids != own_ids[:, None]
    kept[kept.all(axis=1), -1] = False
    shape = (len(ids), ids.shape[1] - 1)
    return distances[kept].reshape(shape), ids[kept].reshape(shape)


class _Block(NamedTuple):
    """Some queries, padded to the block size.

    Attributes:
        points: Points of the space, float32.
        vectors: Query vectors of the search terms.
    """

    points: Float[Array, "b d"]
    vectors: Float[Array, "b v"]


class _Best(NamedTuple):
    """The best items found so far for the queries of a block, by descending score."""

    scores: Float[Array, "b k"]
    ids: Int[Array, "b k"]


def _blocks(queries: Float[ArrayLike, "n d"], size: int, space: Space, mesh: Mesh) -> list[_Block]:
    blocks = []
    everywhere = NamedSharding(mesh, P())
    for start in range(0, len(queries), size):
        points = inputs.float32(queries[start : start + size])
        space.check(points, first=start)
        points = jax.device_put(inputs.pad_rows(points, size), everywhere)
        blocks.append(_Block(points, inputs.search_terms(space, points).query))
    return blocks


def _threads(mesh: Mesh) -> int:
    """Number of threads that select neighbours on a CPU: a power of two, which divides a block."""
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return 1
    cores = min(usable_cores(), _MAX_THREADS)
    return 1 << (cores.bit_length() - 1)


class _BlockSearch:
    """Searches chunks of the gallery for blocks of queries.

    On a CPU, a matrix product uses all cores but a selection only one. There, several threads
    select for parts of a block.
    """

    def __init__(self, mesh: Mesh, k: int, shape: tuple[int, int], pool: Executor) -> None:
        """Allocates the buffer of products.

        Args:
            mesh: Devices that share the gallery.
            k: Number of neighbours.
            shape: Queries of a block, and rows of a chunk on each device.
            pool: Executor with `_threads(mesh)` threads.
        """
        self._pool = pool
        self._parts = np.split(np.arange(shape[0], dtype=np.int32), _threads(mesh))
        self._multiply, self._select = _programs(mesh, k)
        # All products reuse this buffer, because memory is expensive when it is first touched.
        size = (mesh.size * shape[0], shape[1])
        self._buffer = jnp.zeros(size, device=NamedSharding(mesh, P(AXIS)))

    def update(self, chunk: Chunk, block: _Block, best: _Best | None) -> _Best:
        """Merges the best items of a chunk into those found so far."""
        self._buffer, maxima = self._multiply(self._buffer, block.vectors, chunk)
        select = functools.partial(self._select, self._buffer, maxima, chunk)
        if len(self._parts) == 1:
            found = select(self._parts[0])
        else:  # A program runs on its thread only while the thread waits for it.
            found = self._pool.map(lambda rows: jax.block_until_ready(select(rows)), self._parts)
            found = jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
        if best is None and chunk.first.size == 1:
            return found
        return _merge(best, found, chunk.first.size)


@functools.cache
def _programs(mesh: Mesh, k: int) -> tuple[Callable, Callable]:
    """The two jitted steps of a search; each device has its own rows of the gallery."""
    shared = Chunk(P(AXIS), P(AXIS), P(AXIS))
    multiply = jax.shard_map(
        _multiply, mesh=mesh, in_specs=(P(AXIS), P(), shared), out_specs=P(AXIS)
    )
    select = jax.shard_map(
        functools.partial(_select, k=k),
        mesh=mesh,
        in_specs=(P(AXIS), P(AXIS), shared, P()),
        out_specs=P(AXIS),
        check_vma=False,
    )
    return jax.jit(multiply, donate_argnums=0, keep_unused=True), jax.jit(select)


def _multiply(
    buffer: Float[Array, "b r"], vectors: Float[Array, "b v"], chunk: Chunk
) -> tuple[Float[Array, "b r"], Float[Array, "b groups"]]:
    """All products of a block and a chunk, and the largest score of each group of items."""
    del buffer  # Donated, so that the products take its memory.
    products = inner_products(vectors, chunk.vectors)
    grouped = products.reshape(len(products), -1, _GROUP)
    return products, jnp.max(grouped - chunk.offset.reshape(-1, _GROUP), axis=2)


def _select(
    products: Float[Array, "b r"],
    maxima: Float[Array, "b groups"],
    chunk: Chunk,
    rows: Int[Array, " p"],
    *,
    k: int,
) -> _Best:
    """The k best items for some queries of the block.

    They are in the k groups with the largest maxima: any other item comes after at least one item
    of each of these groups. Among equal groups or items, the first ones are chosen.
    """
    num_groups = maxima.shape[1]
    count = min(k, num_groups)
    grouped = products.reshape(-1, _GROUP)
    offsets = chunk.offset.reshape(-1, _GROUP)

    def select_row(inputs: tuple[Array, Array]) -> _Best:
        row, maxima = inputs
        largest, groups = lax.top_k(maxima, count)
        groups = jnp.sort(groups)
        chosen = grouped.at[row * num_groups + groups].get(mode="clip")
        scores = chosen - offsets.at[groups].get(mode="clip")
        if count == k:  # At least k items reach the smallest of these maxima; drop all below it.
            scores = jnp.where(scores >= jnp.min(largest), scores, -jnp.inf)
        scores, places = lax.top_k(scores.reshape(-1), k)
        items = groups[places // _GROUP] * _GROUP + places % _GROUP
        return _Best(scores, chunk.first + items)

    return lax.map(select_row, (rows, maxima[rows]), batch_size=_QUERY_BATCH)


@functools.partial(jax.jit, static_argnames="devices")
def _merge(best: _Best | None, found: _Best, devices: int) -> _Best:
    """Merges the best items so far and those that each device has found in a chunk."""
    k = found.scores.shape[1]
    found = jax.tree.map(lambda x: jnp.concatenate(jnp.split(x, devices), axis=1), found)
    if best is not None:
        found = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), best, found)
    # Items of a single device are in order of their ids, but not those of several devices.
    if devices > 1:
        ordered = lax.sort((-found.scores, found.ids), num_keys=2)
        return _Best(-ordered[0][:, :k], ordered[1][:, :k])
    scores, places = lax.top_k(found.scores, k)
    return _Best(scores, jnp.take_along_axis(found.ids, places, axis=1))


def _distances(
    space: Space, gallery: Gallery, block: _Block, best: _Best
) -> Float[np.ndarray, "b k"]:
    size, k = best.ids.shape
    step = max(1, min(size, _FETCH_BYTES // (4 * k * block.points.shape[1])))
    parts = []
    for part in (slice(start, start + step) for start in range(0, size, step)):
        points, rows = gallery.points(best.ids[part])
        parts.append(np.asarray(_distances_to_rows(space, block.points[part], points, rows)))
    return np.concatenate(parts)


@jax.jit
def _distances_to_rows(
    space: Space, queries: Float[Array, "b d"], points: Float[Array, "m d"], rows: Int[Array, "b k"]
) -> Float[Array, "b k"]:
    def distances_to_query(inputs: tuple[Array, Array]) -> Float[Array, " k"]:
        query, rows = inputs
        return space.distance(query, points[rows])

    return lax.map(distances_to_query, (queries, rows), batch_size=_QUERY_BATCH)
