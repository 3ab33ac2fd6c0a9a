"""Hard negatives: the nearest images of the nearest other classes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs

_BLOCK = 256  # Anchors that are compared with the pool at once.


def hardest_negatives(
    anchors: Float[np.ndarray, "n d"],
    anchor_labels: Int[np.ndarray, " n"],
    pool: Float[np.ndarray, "m d"],
    pool_labels: Int[np.ndarray, " m"],
    *,
    count: int,
    space: Space,
) -> Int[np.ndarray, "n count"]:
    """Finds each anchor's nearest images of other classes, one per class.

    The rule follows Radenović et al. (TPAMI 2019). Returns rows of the pool, nearest first, ties by
    index; distances come from matrix products in float32. Raises UserError if the pool has too few
    classes.
    """
    classes = np.unique(pool_labels)
    num_others = len(classes) - int(np.isin(anchor_labels, classes).any())
    if num_others < count:
        problem = f"{count} negatives of other classes, but the pool has images of {num_others}"
        raise UserError(f"{problem}; lower train.tuples.negatives or enlarge train.tuples.pool")
    on_device = jnp.asarray(pool), jnp.asarray(pool_labels)  # Once.
    negatives = []
    for rows in inputs.blocks(len(anchors), _BLOCK):
        block = inputs.pad_rows(anchors[rows], min(_BLOCK, len(anchors)))
        labels = np.resize(anchor_labels[rows], len(block))
        negatives.append(_hardest(space, block, labels, *on_device, count))
    return np.concatenate(negatives)[: len(anchors)]


@functools.partial(jax.jit, static_argnames="count")
def _hardest(
    space: Space,
    anchors: Float[Array, "b d"],
    anchor_labels: Int[Array, " b"],
    pool: Float[Array, "m d"],
    pool_labels: Int[Array, " m"],
    count: int,
) -> Int[Array, "b count"]:
    distances = space.distance_matrix(anchors, pool)

    def exclude(distances: Float[Array, "b m"], labels: Int[Array, " b"]) -> Float[Array, "b m"]:
        return jnp.where(labels[:, None] == pool_labels[None], jnp.inf, distances)

    def choose(distances: Float[Array, "b m"], _: None) -> tuple[Array, Array]:
        nearest = jnp.argmin(distances, axis=1)
        return exclude(distances, pool_labels[nearest]), nearest

    return jax.lax.scan(choose, exclude(distances, anchor_labels), length=count)[1].T
