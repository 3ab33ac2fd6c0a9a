"""Selection of the gallery items with the highest scores, chunk by chunk."""

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.box_tree import LARGEST, BoxTree, can_search
from hypjax.retrieval.inputs import Ids, Points
from hypjax.retrieval.scores import PADDING, SINGLE, Score, Vectors, highest
from hypjax.system.machine import usable_cores

AXIS = "gallery"  # Mesh axis over which the rows of a gallery are distributed.
_SAMPLED_BLOCKS, _SAMPLED_ROWS = 16, 256  # Blocks of a sample, and rows of a block.
GROUP = 64  # Items of a group; only the groups with the largest maxima are searched further.
# A CPU takes smaller groups, of at least 8 items, where a chunk has fewer than 8·k groups of 64.
_LEAST_GROUP, _GROUPS_PER_ITEM = 8, 8
_QUERY_BATCH = 64  # Queries selected for at once, which limits candidates to a CPU's cache.
_MAX_THREADS = 4  # Of the selection on a CPU.
_KEPT_BYTES = 2**30  # Largest size of the points whose vectors are kept between searches.
_TREE_PAIRS = 2**22  # With fewer pairs of queries and items, products take less than this choice.
_TREE_POINTS, _TREE_QUERIES = 4096, 64  # Sampled for the choice of a tree.
_TREE_LEAST = 10  # Neighbours at least in the sample, as in usual searches.
_TREE_SHARE = 1 / 4  # Of the sampled points: a tree's separations cost so many products of scores.
_Scores = Float[np.ndarray, "b r"]  # Of a block's queries and a chunk's items.
_Maxima = Float[np.ndarray, "b groups"]  # Of the scores in each group.


class TopK(NamedTuple):
    """The highest-scoring items of each query in a block, unsorted but with the lowest one last."""

    scores: Float[Array | np.ndarray, "b k"]
    ids: Int[Array | np.ndarray, "b k"]


class Chunk(NamedTuple):
    """A chunk of a gallery: consecutive rows on each device."""

    vectors: Vectors  # Padded; [v, rows] in a gallery that keeps its vectors, else [rows, v].
    first: Int[Array, " devices"]  # Gallery index of each device's first row.


class StreamedGallery:
    """A NumPy array, possibly memory-mapped, that is streamed to all local devices.

    With `keep`, a gallery of at most 1 GB keeps the vectors of its points between searches, as
    columns of a matrix, whose product with a few queries needs no copy on a CPU.
    """

    def __init__(
        self, points: Float[ArrayLike, "m d"], *, keep: bool = False, tree: BoxTree | None = None
    ) -> None:
        self.array = np.asarray(points)
        self.mesh = Mesh(jax.local_devices(), AXIS)
        self.rows = -(-len(self.array) // self.mesh.size)  # Largest number on one device.
        self.by_rows = NamedSharding(self.mesh, P(AXIS))
        self.on_host = self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"
        self.num_threads = min(usable_cores(), _MAX_THREADS) if self.on_host else 1
        self._keep = keep and 4 * self.array.size <= _KEPT_BYTES
        self._kept: tuple[object, list[Chunk]] = None, []
        self._on_devices: Array | None = None
        self._num_pairs = 0  # Of queries and items so far.
        self._given_tree, self._tree = tree, tree
        self._is_tree_faster: dict[tuple[str, int], bool] = {}  # By space and number of neighbours.

    def __len__(self) -> int:
        return len(self.array)

    @functools.cached_property
    def centre(self) -> Float[np.ndarray, "1 d"]:
        """Mean of points from evenly spaced blocks of the gallery, float64."""
        # A disk reads blocks of consecutive rows faster than single rows.
        starts = np.linspace(0, max(len(self) - _SAMPLED_ROWS, 0), _SAMPLED_BLOCKS, dtype=int)
        blocks = [np.asarray(self.array[i : i + _SAMPLED_ROWS]) for i in np.unique(starts)]
        sample = np.concatenate(blocks).astype(np.float32)
        return np.asarray(np.mean(sample, axis=0, dtype=np.float64, keepdims=True))

    def tree(self, space: Space, queries: Points, k: int) -> BoxTree | None:
        """A tree that answers searches of queries for k items sooner than products, or None."""
        inputs.check_space(space)
        if self._given_tree is not None:
            return self._given_tree
        self._num_pairs += len(queries) * len(self)
        can_have_tree = self.on_host and space.ball() is not None and self.array.size <= LARGEST
        if not can_have_tree or self._num_pairs < _TREE_PAIRS or not can_search():
            return None
        name, k = str(space), 1 << (int(k) - 1).bit_length()
        if (name, k) not in self._is_tree_faster:
            inputs.check_in_space(space, queries)
            inputs.check_in_space(space, self.array)
            self._is_tree_faster[name, k] = self._compare_tree(space, queries, k)
        if not self._is_tree_faster[name, k]:
            return None
        if self._tree is None or str(self._tree.space) != name:
            self._tree = BoxTree.build(self.array, space)
        return self._tree

    def _compare_tree(self, space: Space, queries: Points, k: int) -> bool:
        """Whether a tree of sampled points takes few separations for sampled queries."""
        sample = inputs.host_rows(self.array, inputs.spaced(len(self), _TREE_POINTS))
        if k > _TREE_SHARE * len(self):
            return False
        # As far away as the last of k items is the last of these in the sample.
        k = min(k, max(k * len(sample) // len(self), _TREE_LEAST))
        chosen = inputs.host_rows(queries, inputs.spaced(len(queries), _TREE_QUERIES))
        return BoxTree.build(sample, space).cost(chosen, k) <= _TREE_SHARE * len(sample)

    def keeps(self, score: Score) -> bool:
        """Whether the gallery keeps vectors of this score between searches."""
        return self._keep and score.dtype == SINGLE

    def chunks(self, score: Score, rows: int) -> Iterator[Chunk]:
        """Yields chunks of `rows` on each device; checks the points as it reads them."""
        if not self.keeps(score):
            return self._stream(score, rows)
        key = rows, str(score.space)
        kept_key, chunks = self._kept  # Read once: threads may share a gallery.
        if kept_key != key:
            columns = NamedSharding(self.mesh, P(None, AXIS))
            transpose = jax.jit(lambda vectors: tuple(x.T for x in vectors), out_shardings=columns)
            streamed = self._stream(score, rows)
            chunks = [chunk._replace(vectors=transpose(chunk.vectors)) for chunk in streamed]
            self._kept = key, chunks
        return iter(chunks)

    def _stream(self, score: Score, rows: int) -> Iterator[Chunk]:
        next_chunk = self._chunk(score, 0, rows)
        for start in range(0, len(self), rows * self.mesh.size)[1:]:
            # The next chunk is checked and sent to the devices before this one is searched.
            chunk, next_chunk = next_chunk, self._chunk(score, start, rows)
            yield chunk
        yield next_chunk

    def _chunk(self, score: Score, start: int, rows: int) -> Chunk:
        step = rows * self.mesh.size
        block = inputs.host_rows(self.array, np.s_[start : start + step])
        score.space.check(block, first=start)
        # Devices need equal shares, but one device needs no copy of the block with padding.
        padded = block if self.mesh.size == 1 else inputs.pad_rows(block, step)
        points = jax.device_put(padded, self.by_rows)
        if len(block) == len(self):  # Candidates are then read from the devices.
            self._on_devices = points
        valid = jax.device_put(np.arange(step) < len(block), self.by_rows)
        first = (start + rows * np.arange(self.mesh.size)).astype(np.int32)
        return Chunk(
            score.factors(points, valid, "gallery").gallery, jax.device_put(first, self.by_rows)
        )

    def points(self, ids: Ids) -> tuple[Float[Array | np.ndarray, "m d"], Ids]:
        """Returns an array of points, and its rows that hold the items `ids`."""
        if self._on_devices is not None:
            return self._on_devices, ids
        rows = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
        return inputs.host_rows(self.array, ids.reshape(-1)), rows


class Selector:
    """Selects the k highest-scoring items for blocks of queries, one chunk after the other.

    A block's scores have the given `shape`, [queries, items]. On a CPU, threads of the pool select
    by NumPy, which partitions a row by comparing many numbers at once; XLA would select on one
    core, with a heap for each row.
    """

    def __init__(
        self, gallery: StreamedGallery, k: int, shape: tuple[int, int], score: Score, pool: Executor
    ) -> None:
        self._score, self._pool, self._k = score, pool, k
        self._on_host = gallery.on_host
        num_queries, num_items = shape
        # Each thread has an equal share, in batches whose candidates fit into a CPU's cache.
        threads = gallery.num_threads
        num_batches = threads * -(-num_queries // (threads * _QUERY_BATCH))
        bounds = itertools.pairwise(np.linspace(0, num_queries, num_batches + 1, dtype=int))
        self._batches = [np.s_[start:end] for start, end in bounds if start < end]
        group = GROUP
        while self._on_host and group > _LEAST_GROUP and num_items < group * _GROUPS_PER_ITEM * k:
            group //= 2
        self._multiply, self._select = jitted_steps(gallery.mesh, k, gallery.keeps(score), group)
        # All products reuse this buffer, because touching new memory is slow.
        size = (gallery.mesh.size * num_queries, num_items)
        with score.enabled():
            self._buffer = jnp.zeros(size, score.dtype, device=gallery.by_rows)

    def update(self, chunk: Chunk, queries: Vectors, best: TopK | None) -> TopK:
        """Merges a chunk's best items for a block of queries into the best ones so far."""
        with self._score.enabled():
            self._buffer, maxima = self._multiply(self._buffer, self._score.space, queries, chunk)
            if not self._on_host:
                selected = self._select(self._buffer, maxima, chunk)
                if best is None and chunk.first.size == 1:
                    return selected
                return _merge(best, selected, chunk.first.size, self._k)
        scores, maxima = np.asarray(self._buffer), np.asarray(maxima)
        first = int(chunk.first[0])

        def update_batch(batch: slice) -> TopK:
            batch_best = None if best is None else TopK(best.scores[batch], best.ids[batch])
            return _select_on_host(scores[batch], maxima[batch], first, self._k, batch_best)

        selected = self._pool.map(update_batch, self._batches)
        return TopK(*(np.concatenate(arrays) for arrays in zip(*selected, strict=True)))


@functools.cache
def jitted_steps(
    mesh: Mesh, k: int, columns: bool = False, group: int = GROUP
) -> tuple[Callable, Callable]:
    """Jits `_multiply` and `_select` for a sharded gallery; with `columns`, vectors are columns."""
    rows = P(AXIS)
    partitions: tuple[Any, Any] = P(None, AXIS) if columns else rows, rows
    chunk = Chunk(*partitions)
    sharded = functools.partial(jax.shard_map, mesh=mesh, out_specs=rows)
    multiply = functools.partial(_multiply, group=group, columns=columns)
    multiply = sharded(multiply, in_specs=(rows, P(), P(), chunk))
    select = functools.partial(_select, k=k)
    select = sharded(select, in_specs=(rows, rows, chunk), check_vma=False)
    return jax.jit(multiply, donate_argnums=0, keep_unused=True), jax.jit(select)


def _multiply(
    buffer: Float[Array, "b r"],
    space: Space,
    queries: Vectors,
    chunk: Chunk,
    *,
    group: int = GROUP,
    columns: bool = False,
) -> tuple[Float[Array, "b r"], Float[Array, "b groups"]]:
    """Scores of a block's queries and a chunk's items, and the highest of each group of items."""
    del buffer  # Donated: the scores take its memory.
    items = tuple(x.T for x in chunk.vectors) if columns else chunk.vectors
    scores = highest(space, queries, items)
    return scores, jnp.max(scores.reshape(len(scores), -1, group), axis=2)


def _select(
    scores: Float[Array, "b r"], maxima: Float[Array, "b groups"], chunk: Chunk, *, k: int
) -> TopK:
    """The k best items of a chunk by descending score, or all if it has fewer."""
    # The k best items lie in the k groups with the largest maxima: each of these groups has an item
    # that scores at least as high as any item of another group.
    num_groups = maxima.shape[1]
    size = scores.shape[1] // num_groups
    num_chosen = min(k, num_groups)
    k = min(k, scores.shape[1])
    grouped = scores.reshape(-1, size)

    def select_row(row_and_maxima: tuple[Array, Array]) -> TopK:
        row, maxima = row_and_maxima
        largest, groups = lax.top_k(maxima, num_chosen)
        chosen = grouped.at[row * num_groups + groups].get(mode="clip")
        if num_chosen == k:  # At least k items reach the smallest of these maxima.
            chosen = jnp.where(chosen >= jnp.min(largest), chosen, -jnp.inf)
        selected, positions = lax.top_k(chosen.reshape(-1), k)
        items = groups[positions // size] * size + positions % size
        return TopK(selected, chunk.first + items)

    rows = jnp.arange(len(maxima), dtype=jnp.int32)
    return lax.map(select_row, (rows, maxima), batch_size=_QUERY_BATCH)


@functools.partial(jax.jit, static_argnames=("devices", "k"))
def _merge(best: TopK | None, selected: TopK, devices: int, k: int) -> TopK:
    """The k best of the best items so far and of those that each device selected."""
    joined = jax.tree.map(lambda x: jnp.concatenate(jnp.split(x, devices), axis=1), selected)
    if best is not None:
        joined = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), best, joined)
    scores, columns = lax.top_k(joined.scores, min(k, joined.scores.shape[1]))
    return TopK(scores, jnp.take_along_axis(joined.ids, columns, axis=1))


def _select_on_host(
    scores: _Scores, maxima: _Maxima, first: int, k: int, best: TopK | None
) -> TopK:
    """The k highest-scoring items of a chunk and of the best ones so far, as `TopK` orders them."""
    if best is None:
        best = TopK(np.empty((len(scores), 0), scores.dtype), np.empty((len(scores), 0), np.int32))
    full = best.scores.shape[1] == k
    lowest = best.scores[:, -1:] if full else np.full((len(scores), 1), -np.inf, scores.dtype)
    rows, items, chosen = _at_least_kth_maximum(scores, maxima, k, np.asarray(lowest))
    counts = np.bincount(rows, minlength=len(scores))
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = len(counts), counts.max()
    # Rows with fewer chosen items than others are padded below all scores, with different numbers,
    # because NumPy partitions rows with many equal numbers slowly.
    chosen_scores = np.empty(shape, scores.dtype)
    chosen_scores[:] = PADDING * np.linspace(2, 3, shape[1])
    chosen_scores[rows, columns] = chosen
    chosen_ids = np.zeros(shape, np.int32)
    chosen_ids[rows, columns] = first + items
    scores = np.concatenate([best.scores, chosen_scores], axis=1)
    ids = np.concatenate([best.ids, chosen_ids], axis=1)
    k = min(k, ids.shape[1])
    order = np.argpartition(scores, ids.shape[1] - k, axis=1)[:, ::-1][:, :k]
    return TopK(*(np.take_along_axis(array, order, axis=1) for array in (scores, ids)))


def _at_least_kth_maximum(
    scores: _Scores, maxima: _Maxima, k: int, floor: Float[np.ndarray, "b 1"]
) -> tuple[Int[np.ndarray, " e"], Int[np.ndarray, " e"], Float[np.ndarray, " e"]]:
    """Row, item and score of all items that reach the row's floor and its k-th maximum."""
    # A separate function, so that its large arrays are freed before `_select_on_host` allocates.
    # Else the C library returns memory to the system at each call, longer than the search takes.
    num_groups = maxima.shape[1]
    size = scores.shape[1] // num_groups
    least = floor
    if k <= num_groups:  # At least k items reach the k-th largest maximum.
        kth = np.partition(maxima, num_groups - k, axis=1)[:, num_groups - k, None]
        least = np.maximum(floor, kth)
    # NaN scores stay: another chunk may hold the invalid point to report.
    groups = np.flatnonzero(~(maxima < least))
    rows, groups_of_rows = np.divmod(groups, num_groups)
    grouped = scores.reshape(-1, size).take(groups, axis=0)
    chosen = np.flatnonzero(~(grouped < least[rows]))
    group, column = np.divmod(chosen, size)
    return rows[group], groups_of_rows[group] * size + column, grouped.reshape(-1)[chosen]
