"""Selection of the items with the highest scores, block by block."""

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.retrieval import host_selection
from hypjax.retrieval.galleries import AXIS, Chunk
from hypjax.retrieval.scores import Score, highest
from hypjax.system.machine import usable_cores

_GROUP = 64  # Items of a group; only the groups with the largest maxima are searched further.
_QUERY_BATCH = 64  # Queries selected for at once, which limits the memory for candidates.
_MAX_THREADS = 4


class Best(NamedTuple):
    """The items found so far for the queries of a block; the last one has the lowest score."""

    scores: Float[Array | np.ndarray, "b k"]
    ids: Int[Array | np.ndarray, "b k"]


def num_threads(mesh: Mesh) -> int:
    """Number of threads that select on a CPU."""
    return min(usable_cores(), _MAX_THREADS) if _is_host(mesh) else 1


class Selector:
    """Searches chunks of the gallery for blocks of queries.

    On a CPU, a matrix product uses all cores but a selection only one. There, several threads
    select by NumPy for parts of a block.
    """

    def __init__(
        self, mesh: Mesh, k: int, shape: tuple[int, int], score: Score, pool: Executor
    ) -> None:
        """Allocates the buffer of scores.

        Args:
            mesh: Devices that share the gallery.
            k: Number of items to find.
            shape: Queries of a block, and rows of a chunk on each device.
            score: How points are compared.
            pool: Executor with `num_threads(mesh)` threads.
        """
        self._score, self._pool, self._k = score, pool, k
        self._on_host, threads = _is_host(mesh), num_threads(mesh)
        bounds = np.linspace(0, shape[0], threads + 1, dtype=int)
        self._parts = [np.s_[start:end] for start, end in itertools.pairwise(bounds)]
        self._multiply, self._select = _programs(mesh, k)
        # All products reuse this buffer, because memory is expensive when it is first touched.
        size = (mesh.size * shape[0], shape[1])
        with score.precision.enabled():
            self._buffer = jnp.zeros(
                size, score.precision.value, device=NamedSharding(mesh, P(AXIS))
            )

    def update(
        self, chunk: Chunk, queries: tuple[Float[Array, "b v"], ...], best: Best | None
    ) -> Best:
        """Merges the best items of a chunk into those found so far."""
        with self._score.precision.enabled():
            self._buffer, maxima = self._multiply(self._buffer, self._score.space, queries, chunk)
        if self._on_host:
            return self._update_on_host(maxima, chunk, best)
        with self._score.precision.enabled():
            found = self._select(self._buffer, maxima, chunk)
        if best is None and chunk.first.size == 1:
            return found
        with self._score.precision.enabled():
            return _merge(best, found, chunk.first.size, self._k)

    def _update_on_host(
        self, maxima: Float[Array, "b groups"], chunk: Chunk, best: Best | None
    ) -> Best:
        scores, maxima, first = np.asarray(self._buffer), np.asarray(maxima), int(chunk.first[0])

        def update(part: slice) -> host_selection.Items:
            found = host_selection.select(scores[part], maxima[part], first, self._k)
            if best is None:
                return found
            return host_selection.merge((best.scores[part], best.ids[part]), found, self._k)

        parts = self._pool.map(update, self._parts)
        return Best(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _is_host(mesh: Mesh) -> bool:
    return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"


@functools.cache
def _programs(mesh: Mesh, k: int) -> tuple[Callable, Callable]:
    """The two jitted steps of a search; each device has its own rows of the gallery."""
    shared = Chunk(P(AXIS), P(AXIS))
    multiply = jax.shard_map(
        _multiply, mesh=mesh, in_specs=(P(AXIS), P(), P(), shared), out_specs=P(AXIS)
    )
    select = jax.shard_map(
        functools.partial(_select, k=k),
        mesh=mesh,
        in_specs=(P(AXIS), P(AXIS), shared),
        out_specs=P(AXIS),
        check_vma=False,
    )
    return jax.jit(multiply, donate_argnums=0, keep_unused=True), jax.jit(select)


def _multiply(
    buffer: Float[Array, "b r"],
    space: Space,
    queries: tuple[Float[Array, "b v"], ...],
    chunk: Chunk,
) -> tuple[Float[Array, "b r"], Float[Array, "b groups"]]:
    """All scores of a block and a chunk, and the highest one of each group of items."""
    del buffer  # Donated, so that the scores take its memory.
    scores = highest(space, queries, chunk.vectors)
    return scores, jnp.max(scores.reshape(len(scores), -1, _GROUP), axis=2)


def _select(
    scores: Float[Array, "b r"],
    maxima: Float[Array, "b groups"],
    chunk: Chunk,
    *,
    k: int,
) -> Best:
    """The k best items of a chunk by descending score, or all if it has fewer.

    They are in the k groups with the largest maxima: any other item comes after at least one item
    of each of these groups.
    """
    num_groups = maxima.shape[1]
    count, k = min(k, num_groups), min(k, scores.shape[1])
    grouped = scores.reshape(-1, _GROUP)

    def select_row(inputs: tuple[Array, Array]) -> Best:
        row, maxima = inputs
        highest = jnp.max(maxima)
        largest, groups = lax.top_k(_below(highest, maxima), count)
        chosen = _below(highest, grouped.at[row * num_groups + groups].get(mode="clip"))
        if count == k:  # At least k items reach the smallest of these maxima; drop all below it.
            chosen = jnp.where(chosen >= jnp.min(largest), chosen, -jnp.inf)
        found, places = lax.top_k(chosen.reshape(-1), k)
        items = groups[places // _GROUP] * _GROUP + places % _GROUP
        return Best(found if scores.dtype == found.dtype else highest + found, chunk.first + items)

    return lax.map(select_row, (jnp.arange(len(maxima)), maxima), batch_size=_QUERY_BATCH)


def _below(highest: Float[Array, ""], scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scores to select by: in float64, differences from the highest one, rounded up to float32.

    XLA sorts float64 numbers in full to select the largest ones.
    """
    if scores.dtype == jnp.float32:
        return scores
    return jnp.nextafter((scores - highest).astype(jnp.float32), jnp.float32(0))


@functools.partial(jax.jit, static_argnames=("devices", "k"))
def _merge(best: Best | None, found: Best, devices: int, k: int) -> Best:
    """Merges the best items so far and those that each device has found in a chunk."""
    found = jax.tree.map(lambda x: jnp.concatenate(jnp.split(x, devices), axis=1), found)
    if best is not None:
        found = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), best, found)
    scores, places = lax.top_k(found.scores, min(k, found.scores.shape[1]))
    return Best(scores, jnp.take_along_axis(found.ids, places, axis=1))
