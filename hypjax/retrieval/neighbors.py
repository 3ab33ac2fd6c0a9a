"""Exact nearest neighbours: blockwise, jitted, from memory, from disk, or over several devices."""

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
from hypjax.retrieval.galleries import AXIS, Chunk, Gallery, place
from hypjax.system.cores import usable_cores

_BLOCK_SIZE = 512  # Queries at a time.
_BLOCK_BYTES = 128 * 2**20  # Products of a block of queries and a chunk stay below this.
_FOUND_BYTES = 64 * 2**20  # Points of neighbours that are fetched at a time.
_GROUP = 64  # Columns whose largest score stands for them all, until the best groups are chosen.
_ROWS_AT_A_TIME = 64  # Of a block; a CPU's cache holds their candidates.
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
    """The k nearest items of a gallery to each query, by exact search.

    Items are ranked by inner products (see `hypjax.geometry.SearchTerms`), equal ones by their
    place in the gallery; the distances of the k found are recomputed by subtraction. Where two
    differ by less than a float32 product resolves, the smaller may come second.

    A NumPy gallery, which may be memory-mapped and larger than a device's memory, is streamed in
    chunks, each shared out over all local devices. A JAX array is searched by the devices that hold
    it. Beyond inputs and result, memory grows only by two copies of the queries.

    Args:
        queries: Points of the space.
        gallery: Points to search.
        k: Number of neighbours.
        space: Measures the distances.
        exclude_self: The gallery is the queries, and none is its own neighbour.
        block_size: Queries at a time; None: chosen. The result does not depend on it.

    Returns:
        Distances, float32, and places in the gallery, int32; the nearest first.

    Raises:
        UserError: A point is not finite or outside the space, sizes do not fit, or k is not between
            1 and the number of items.
    """
    queries, gallery = inputs.check_points(queries, gallery)
    if exclude_self and len(queries) != len(gallery):
        raise UserError(
            f"exclude_self means that the gallery is the queries, but they are {len(gallery)} and "
            f"{len(queries)} points"
        )
    if block_size is not None and block_size < 1:
        raise UserError(f"block_size is {block_size}; it must be at least 1")
    own = np.arange(len(queries)) if exclude_self else None
    return search(queries, own, gallery, k=k, space=space, block_size=block_size or _BLOCK_SIZE)


def search(
    queries: Float[ArrayLike, "n d"],
    own: Int[np.ndarray, " n"] | None,
    gallery: Float[ArrayLike, "m d"],
    *,
    k: int,
    space: Space,
    block_size: int = _BLOCK_SIZE,
) -> tuple[Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
    """`nearest_neighbors`, where queries may say which item is their own, and not found."""
    items = len(gallery) - (own is not None)
    if not 1 <= k <= items:
        raise UserError(f"k is {k}, but there are {items} items for a query to find")
    if own is not None:  # It is among the k + 1 nearest, or the last of these is one too many.
        found = search(queries, None, gallery, k=k + 1, space=space, block_size=block_size)
        return _without(own, *found)
    placed = place(gallery)
    size = inputs.round_up(min(block_size, len(queries)), inputs.MULTIPLE)
    rows = inputs.round_up(max(min(placed.rows, _BLOCK_BYTES // (4 * size)), k), inputs.MULTIPLE)
    blocks = _blocks(queries, size, space, placed.mesh)
    with ThreadPoolExecutor(_threads(placed.mesh)) as pool:
        searcher = _Searcher(placed.mesh, k, (size, rows), pool)
        best = [None] * len(blocks)
        for chunk in placed.chunks(space, rows):
            best = [searcher.update(chunk, *both) for both in zip(blocks, best, strict=True)]
        distances = pool.map(functools.partial(_distances, space, placed), blocks, best)
    ids = np.concatenate([np.asarray(block.ids) for block in best])
    return np.concatenate(list(distances))[: len(queries)], ids[: len(queries)]


def _without(
    own: Int[np.ndarray, " n"], distances: Float[np.ndarray, "n k"], ids: Int[np.ndarray, "n k"]
) -> tuple[Float[np.ndarray, "n k-1"], Int[np.ndarray, "n k-1"]]:
    """Takes one item out of each row: the query's own, or the last."""
    kept = ids != own[:, None]
    kept[kept.all(axis=1), -1] = False
    shape = (len(ids), ids.shape[1] - 1)
    return distances[kept].reshape(shape), ids[kept].reshape(shape)


class _Block(NamedTuple):
    """Some queries, the last ones padded.

    Attributes:
        points: As they were given, in float32.
        vectors: What is multiplied with the gallery's vectors.
    """

    points: Float[Array, "b d"]
    vectors: Float[Array, "b v"]


class _Best(NamedTuple):
    """The best items of a block's queries so far, in the order of their scores."""

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
    """How many threads share what a single core of a CPU would do alone; a divisor of a block."""
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return 1
    cores = min(usable_cores(), _MAX_THREADS)
    return 1 << (cores.bit_length() - 1)


class _Searcher:
    """Searches chunks for blocks of queries.

    On a CPU all cores share a product, but one alone would select the best of it: there, threads
    select for parts of a block.
    """

    def __init__(self, mesh: Mesh, k: int, shape: tuple[int, int], pool: Executor) -> None:
        """Compiles nothing yet.

        Args:
            mesh: Devices that share the gallery.
            k: Number of neighbours.
            shape: Queries of a block, and rows of a chunk on each device.
            pool: As many threads as `_threads` says.
        """
        self._pool = pool
        self._parts = np.split(np.arange(shape[0], dtype=np.int32), _threads(mesh))
        self._multiply, self._select = _programs(mesh, k)
        # Room for products, which is used again and again: memory is dear when it is touched first.
        size = (mesh.size * shape[0], shape[1])
        self._room = jnp.zeros(size, device=NamedSharding(mesh, P(AXIS)))

    def update(self, chunk: Chunk, block: _Block, best: _Best | None) -> _Best:
        """The best items of what was searched before and of a chunk."""
        self._room, maxima = self._multiply(self._room, block.vectors, chunk)
        select = functools.partial(self._select, self._room, maxima, chunk)
        if len(self._parts) == 1:
            found = select(self._parts[0])
        else:  # A program runs in its thread only while that waits for it.
            found = self._pool.map(lambda rows: jax.block_until_ready(select(rows)), self._parts)
            found = jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
        if best is None and chunk.first.size == 1:
            return found
        return _merge(best, found, chunk.first.size)


@functools.cache
def _programs(mesh: Mesh, k: int) -> tuple[Callable, Callable]:
    """The two steps of a search, each device with its own part of the gallery."""
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
    room: Float[Array, "b r"], vectors: Float[Array, "b v"], chunk: Chunk
) -> tuple[Float[Array, "b r"], Float[Array, "b groups"]]:
    """All products, and the largest score in each group of items."""
    del room  # Given up for the products.
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
    """The k best items of each query in some rows of the block.

    They are in the k groups with the largest maxima: an item elsewhere has one before it in each of
    these. Of equal ones the first is taken, among groups as among items.
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
        if count == k:  # As many items are not below the last maximum, so those below are out.
            scores = jnp.where(scores >= jnp.min(largest), scores, -jnp.inf)
        scores, places = lax.top_k(scores.reshape(-1), k)
        items = groups[places // _GROUP] * _GROUP + places % _GROUP
        return _Best(scores, chunk.first + items)

    return lax.map(select_row, (rows, maxima[rows]), batch_size=_ROWS_AT_A_TIME)


@functools.partial(jax.jit, static_argnames="devices")
def _merge(best: _Best | None, found: _Best, devices: int) -> _Best:
    """The best of what was found before and of what each device has found now."""
    k = found.scores.shape[1]
    found = jax.tree.map(lambda x: jnp.concatenate(jnp.split(x, devices), axis=1), found)
    if best is not None:
        found = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), best, found)
    # Items of several devices do not come in order, as those of one do.
    if devices > 1:
        ordered = lax.sort((-found.scores, found.ids), num_keys=2)
        return _Best(-ordered[0][:, :k], ordered[1][:, :k])
    scores, places = lax.top_k(found.scores, k)
    return _Best(scores, jnp.take_along_axis(found.ids, places, axis=1))


def _distances(
    space: Space, gallery: Gallery, block: _Block, best: _Best
) -> Float[np.ndarray, "b k"]:
    size, k = best.ids.shape
    step = max(1, min(size, _FOUND_BYTES // (4 * k * block.points.shape[1])))
    parts = []
    for part in (slice(start, start + step) for start in range(0, size, step)):
        points, rows = gallery.points(best.ids[part])
        parts.append(np.asarray(_distances_of_rows(space, block.points[part], points, rows)))
    return np.concatenate(parts)


@jax.jit
def _distances_of_rows(
    space: Space, queries: Float[Array, "b d"], points: Float[Array, "m d"], rows: Int[Array, "b k"]
) -> Float[Array, "b k"]:
    def distances_of_query(inputs: tuple[Array, Array]) -> Float[Array, " k"]:
        query, rows = inputs
        return space.distance(query, points[rows])

    return lax.map(distances_of_query, (queries, rows), batch_size=_ROWS_AT_A_TIME)
