"""Squared distances within classes, and how far those between classes fall short of a margin."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hypjax.objectives.comparisons import Embeddings, Labels, Options, compare_images


def squares(
    embeddings: Embeddings, labels: Labels, *, margin: float = 1.0, **options: Unpack[Options]
) -> Float[Array, ""]:
    """Σ d² within classes and Σ max(margin − d, 0)² between classes, over the images."""
    pairs = compare_images(embeddings, labels, **options)
    pull = jnp.sum(pairs.distances**2, where=pairs.same)
    push = jnp.sum(jax.nn.relu(margin - pairs.distances) ** 2, where=pairs.other)
    return (pull + push) / len(pairs.distances)
