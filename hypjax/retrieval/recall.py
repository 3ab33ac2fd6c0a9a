"""Recall@K by counting ranks: exact, blockwise, and without sorting anything."""

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.products import inner_products

# Products of one block of queries with the whole gallery stay below this.
_BLOCK_BYTES = 64 * 2**20
# Galleries are padded to a multiple of this, so that no item falls into the remainder loop of a
# matrix product, whose last bit differs: equal items get equal products, and tie.
_GALLERY_MULTIPLE = 64
_NO_MATCH = np.iinfo(np.int32).max


def recall_at_k(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    ks: Sequence[int],
    space: Space,
) -> dict[int, float]:
    """Share of queries with an item of their class among their k nearest.

    A query's rank is the number of items that an exact search lists before its nearest match:
    those strictly nearer, and those equally far that come earlier in the gallery. Queries without
    any match are left out of the mean, with a warning that counts them.

    Args:
        queries: Points of the space.
        query_labels: Their classes.
        gallery: Points to search; None: every query searches the other queries.
        gallery_labels: Their classes.
        ks: Numbers of neighbours.
        space: Measures the distances.

    Returns:
        {k: recall} with recalls between 0 and 1.

    Raises:
        UserError: A point is not finite or outside the space, sizes do not fit, or no query has a
            match.
    """
    ranks = match_ranks(queries, query_labels, gallery, gallery_labels, space=space)
    found = ranks[ranks != _NO_MATCH]
    if not len(found):
        raise UserError("no query has an item of its own class to find; check the labels")
    if len(found) < len(ranks):
        excluded = f"{len(ranks) - len(found)} of {len(ranks)} queries"
        warnings.warn(f"{excluded} have no match and are left out of the recall", stacklevel=2)
    return {int(k): float(np.mean(found < k)) for k in ks}


def match_ranks(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match, from 0; the largest int32 where there is none.

    Args and errors are those of `recall_at_k`.
    """
    itself = gallery is None
    if itself:
        gallery, gallery_labels = queries, query_labels
    _check_sizes(queries, query_labels, gallery, gallery_labels)
    queries = jnp.asarray(queries, jnp.float32)
    gallery = queries if itself else jnp.asarray(gallery, jnp.float32)
    for points in (queries,) if itself else (queries, gallery):
        space.check(points)
    query_labels, gallery_labels = _dense_labels(query_labels, gallery_labels)
    return np.asarray(
        _ranks(queries, query_labels, gallery, gallery_labels, space=space, itself=itself)
    )


@functools.partial(jax.jit, static_argnames="itself")
def _ranks(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"],
    gallery_labels: Int[ArrayLike, " m"],
    *,
    space: Space,
    itself: bool,
) -> Int[Array, " n"]:
    """Maps `_block_ranks` over blocks of queries, the last one padded."""
    n, m = len(queries), len(gallery)
    gallery = space.search_vectors(gallery, "gallery")
    gallery = _pad_rows(gallery, _GALLERY_MULTIPLE, 0)
    gallery_labels = _pad_rows(gallery_labels, _GALLERY_MULTIPLE, -1)
    block = max(1, min(n, _BLOCK_BYTES // (4 * len(gallery))))
    positions = jnp.arange(n) if itself else jnp.full(n, -1)

    def block_ranks(inputs):
        vectors, labels, position = inputs
        return _block_ranks(vectors, labels, position, gallery, gallery_labels, m)

    blocks = [
        _pad_rows(x, block, fill).reshape(-1, block, *x.shape[1:])
        for x, fill in (
            (space.search_vectors(queries, "query"), 0),
            (query_labels, -2),
            (positions, -1),
        )
    ]
    return lax.map(block_ranks, tuple(blocks)).reshape(-1)[:n]


def _block_ranks(
    queries: Float[ArrayLike, "b k"],
    labels: Int[Array, " b"],
    positions: Int[Array, " b"],
    gallery: Float[ArrayLike, "p k"],
    gallery_labels: Int[ArrayLike, " p"],
    gallery_size: int,
) -> Int[Array, " b"]:
    """Ranks of a block of queries in the whole gallery.

    The nearest match's score is taken from the very products it is compared with: computed apart,
    it would differ in the last bit and be counted against itself.
    """
    scores = inner_products(queries, gallery)
    items = jnp.arange(len(gallery))
    others = (items < gallery_size) & (items != positions[:, None])
    matches = others & (gallery_labels == labels[:, None])
    best = jnp.max(scores, axis=1, keepdims=True, where=matches, initial=-jnp.inf)
    first = jnp.argmax(matches & (scores == best), axis=1)[:, None]
    before = (scores > best) | ((scores == best) & (items < first))
    ranks = jnp.sum(before & others, axis=1, dtype=jnp.int32)
    return jnp.where(jnp.any(matches, axis=1), ranks, _NO_MATCH)


def _pad_rows(x: Array, multiple: int, fill: float) -> Array:
    padding = [(0, -len(x) % multiple)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill)


def _dense_labels(
    query_labels: ArrayLike, gallery_labels: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Renumbers labels of any integers from 0, which leaves negative ones to padding."""
    both = np.concatenate([np.asarray(query_labels), np.asarray(gallery_labels)])
    dense = np.unique(both, return_inverse=True)[1].astype(np.int32)
    return dense[: len(query_labels)], dense[len(query_labels) :]


def _check_sizes(
    queries: ArrayLike,
    query_labels: ArrayLike,
    gallery: ArrayLike,
    gallery_labels: ArrayLike | None,
) -> None:
    if gallery_labels is None:
        raise UserError("a gallery needs gallery_labels")
    for name, points, labels in (
        ("queries", queries, query_labels),
        ("gallery", gallery, gallery_labels),
    ):
        if np.ndim(points) != 2 or len(points) == 0:
            raise UserError(f"{name} must be [number, dimension], got shape {np.shape(points)}")
        if np.shape(labels) != (len(points),):
            raise UserError(f"{name} has {len(points)} rows but labels of shape {np.shape(labels)}")
    if queries.shape[1] != gallery.shape[1]:
        raise UserError(
            f"queries have {queries.shape[1]} coordinates, the gallery {gallery.shape[1]}"
        )
