"""Query expansion: each query becomes the mean of itself and its nearest gallery items."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.neighbors import search

# Largest size, in float64, of the points of a block and of the Hessians that a mean may need.
_BLOCK_BYTES = 64 * 2**20


def expand_queries(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    *,
    k: int,
    alpha: float = 0.0,
    space: Space,
    own_ids: Int[np.ndarray, " n"] | None = None,
) -> Float[np.ndarray, "n d"]:
    """Average (alpha = 0) and alpha-weighted query expansion.

    A query becomes `space.mean` of itself, with weight 1, and its k nearest gallery items, with
    weights max(similarity, 0)^alpha. The average is that of Chum et al., *Total Recall* (ICCV
    2007); the weights are those of Radenović et al., *Fine-tuning CNN Image Retrieval with No Human
    Annotation* (TPAMI 2018). The search is exact.

    Args:
        queries: Points of the space, [n, d].
        gallery: Points of the space to search, [m, d]. If None, the gallery is the queries, and
            each is its own item.
        k: Number of gallery items in each mean.
        alpha: Exponent of the similarities.
        space: Space that measures distances and takes means.
        own_ids: Gallery index of each query, [n], −1 or None for none. A query's own item is not
            one of its neighbours.

    Returns:
        Points of the space, [n, d], float32.

    Raises:
        UserError: A point is not finite or not in the space, shapes do not match, alpha is
            negative, or k is not between 1 and the number of items.
    """
    if gallery is None:
        gallery, own_ids = queries, np.arange(len(queries))
    queries, gallery = inputs.check_points(queries, gallery)
    if not alpha >= 0:
        raise UserError(f"alpha is {alpha}; it must be at least 0")
    k = inputs.check_whole_number("k", k)
    distances, ids = search(queries, own_ids, gallery, k=k, space=space)
    dim = queries.shape[1]
    expanded = np.empty((len(queries), dim), np.float32)
    for rows in inputs.blocks(len(queries), _BLOCK_BYTES // (8 * dim * max(k + 1, dim))):
        own, found = np.asarray(queries[rows]), np.asarray(gallery[ids[rows]])
        points = np.concatenate([own[:, None], found], axis=1)
        with jax.enable_x64(True):
            expanded[rows] = _means(space, points, distances[rows], alpha)
    return expanded


@jax.jit
def _means(
    space: Space, points: Float[Array, "b k+1 d"], distances: Float[Array, "b k"], alpha: float
) -> Float[Array, "b d"]:
    """Means of queries and the neighbours that follow them, in float64."""
    similarities = space.similarity(distances.astype(jnp.float64))
    weights = jnp.maximum(similarities, 0.0) ** alpha
    weights = jnp.pad(weights, [(0, 0), (1, 0)], constant_values=1)
    return space.mean(points.astype(jnp.float64), weights)
