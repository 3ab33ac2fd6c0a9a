"""The contrastive loss of tuples: an anchor, its positive, and negatives that were mined for it."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.geometry import Space
from hypjax.objectives.comparisons import SPHERE, lengths


def tuple_contrastive(
    embeddings: Float[ArrayLike, "n dim"],
    *,
    size: int,
    space: Space = SPHERE,
    margin: float = 0.85,
) -> Float[Array, ""]:
    """Contrastive loss of tuples (Radenović et al., TPAMI 2019, Eq. 7), as IRT trains on SfM-120k.

    The mean over the tuples of ½ d(a, p)² + Σ_n ½ max(m − d(a, n), 0)². On the sphere d is the
    Euclidean distance, so that the first term is 1 − cos, the attraction of IRT's contrastive loss.
    In the ball it is the geodesic distance. Tuples are not compared with each other. The released
    code sums over the tuples, so that weight decay and the weights of other losses are relative to
    five times as much there.

    Args:
        embeddings: Points of the space, as from `space.embed`. Those of a tuple are adjacent: the
            anchor, its positive, and its negatives.
        size: Images of a tuple.
        space: Space that measures the distances.
        margin: m, the distance above which a negative does not count. IRT does not give it; this is
            that of the code on which it builds.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: The images are no multiple of `size`, or that is below 3.
    """
    points = jnp.asarray(embeddings)
    if points.ndim != 2 or size < 3 or len(points) % size or not len(points):
        raise ValueError(f"needs tuples of {size} (3 or more) points, got {points.shape}")
    tuples = points.reshape(-1, size, points.shape[1])
    apart = lengths(space, space.distance(tuples[:, :1], tuples[:, 1:]))
    attraction = apart[:, 0] ** 2 / 2
    repulsion = jnp.sum(jax.nn.relu(margin - apart[:, 1:]) ** 2, axis=1) / 2
    return jnp.mean(attraction + repulsion)
