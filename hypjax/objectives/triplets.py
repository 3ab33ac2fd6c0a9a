"""Triplet losses: an image should be closer to its class than to others, by a margin."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.objectives.comparisons import SPHERE, Pairs, References, compare_images, mean_where

MININGS = ("hard", "semihard")


def triplet(
    embeddings: Float[ArrayLike, "n dim"],
    labels: Int[ArrayLike, " n"],
    *,
    space: Space = SPHERE,
    margin: float = 0.2,
    mining: Literal["hard", "semihard"] = "hard",
    samples_per_class: int | None = None,
    references: References | None = None,
) -> Float[Array, ""]:
    """Triplet loss max(d_ap − d_an + margin, 0) of triplets that are chosen in the batch.

    'hard' takes the farthest positive and the nearest negative of each image (Hermans et al., 2017,
    Eq. 5); the loss is the mean over the images that have both. 'semihard' takes all pairs of
    images of one class, and for each the nearest negative that is farther than the positive
    (Schroff et al., CVPR 2015, Section 3.2); the loss is the mean over these pairs, of which those
    without such a negative count as 0.

    Args:
        embeddings: Points of the space, as from `space.embed`.
        labels: Class of each image.
        space: Space that measures the distances. On the sphere they are squared chords, as in
            Schroff et al.; Hermans et al. use Euclidean distances without normalisation.
        margin: Margin of the distances.
        mining: How triplets are chosen.
        samples_per_class: See `hypjax.objectives.contrastive`. For semi-hard triplets with traced
            labels, as by `jit`, no class may have more images.
        references: See `hypjax.objectives.contrastive`; only for the hardest triplets.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: There is no such mining, or none with references; or see
            `hypjax.objectives.contrastive`.
    """
    if mining not in MININGS:
        raise ValueError(f"mining is {mining!r}; it must be one of {', '.join(MININGS)}")
    if mining != "hard" and references is not None:
        raise ValueError(f"mining is {mining!r}; it must be 'hard' with references")
    pairs = compare_images(space, embeddings, labels, samples_per_class, references)
    if mining == "hard":
        return _hard(pairs, margin)
    return _semihard(pairs, margin, _largest_class(labels, samples_per_class))


def _hard(pairs: Pairs, margin: float) -> Float[Array, ""]:
    farthest = jnp.max(pairs.distances, axis=1, where=pairs.same, initial=-jnp.inf)
    nearest = jnp.min(pairs.distances, axis=1, where=pairs.other, initial=jnp.inf)
    both = jnp.any(pairs.same, axis=1) & jnp.any(pairs.other, axis=1)
    return mean_where(jax.nn.relu(farthest - nearest + margin), both)


def _semihard(pairs: Pairs, margin: float, most: int) -> Float[Array, ""]:
    """Loss of the semi-hard triplets; no class has more than `most` images."""
    # A pass over the distances for each of an image's positives is faster than sorting them.
    positives, _ = lax.top_k(jnp.where(pairs.same, pairs.distances, -jnp.inf), most - 1)

    @jax.checkpoint
    def violation(positive: Float[Array, " n"]) -> Float[Array, " n"]:
        # Written so that NaN counts: it must reach the loss.
        farther = pairs.other & ~(pairs.distances <= positive[:, None])
        nearest = jnp.min(pairs.distances, axis=1, where=farther, initial=jnp.inf)
        return jax.nn.relu(positive - nearest + margin)

    total = jnp.sum(lax.map(violation, positives.T))
    return total / jnp.maximum(jnp.sum(pairs.same), 1)


def _largest_class(labels: Int[ArrayLike, " n"], samples_per_class: int | None) -> int:
    """Number of images of the largest class, or a bound on it if the labels are traced."""
    if isinstance(labels, jax.core.Tracer):
        return samples_per_class or len(labels)
    return int(np.unique(labels, return_counts=True)[1].max())
