"""Metrics of a batch that show how training progresses, for any loss."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.objectives.base import Metrics
from hypjax.objectives.comparisons import compare_images


def norms(
    space: Space, features: Float[Array, "*b dim"], points: Float[Array, "*b coordinates"]
) -> Metrics:
    """Mean norms of the head's outputs and of their points, and the share of clipped outputs."""
    return {
        "feature_norm": jnp.mean(jnp.linalg.norm(features, axis=-1)),
        "embedding_norm": jnp.mean(jnp.linalg.norm(points, axis=-1)),
        "clipped_share": jnp.mean(space.clipped(features)),
    }


def batch_metrics(
    features: Float[Array, "n dim"],
    points: Float[Array, "n coordinates"],
    labels: Int[Array, " n"],
    space: Space,
    samples_per_class: int | None,
) -> Metrics:
    """Metrics of a batch besides its loss.

    Args:
        features: The head's outputs.
        points: Their points in the space.
        labels: Class of each image.
        space: The space.
        samples_per_class: Images of each class; None if the batch may hold any classes.

    Returns:
        `norms`, and unless the batch may hold any classes, the share of images that are strictly
        nearer to an image of their class than to all images of other classes.
    """
    features, points = lax.stop_gradient((features, points))
    metrics = norms(space, features, points)
    if samples_per_class is not None:
        # A loss of pairs has computed these distances; XLA merges equal expressions.
        pairs = compare_images(space, points, labels, samples_per_class)
        match = jnp.min(pairs.distances, axis=1, where=pairs.same, initial=jnp.inf)
        nearest = jnp.min(pairs.distances, axis=1, where=pairs.other, initial=jnp.inf)
        metrics["batch_recall@1"] = jnp.mean(match < nearest)
    return metrics
