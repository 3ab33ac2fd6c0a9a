"""The weights that a loss gives to the negatives of an anchor."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from hypjax.errors import UserError

# By what a loss divides distances in its softmax; HypMix's space holds its temperatures.
_DIVISORS = {
    "pairwise_cross_entropy": lambda fields: fields.temperature,
    "hypmix": lambda fields: 1.0,
    "supcon": lambda fields: 2 * fields.temperature,
    "scalable_nca": lambda fields: 2 * fields.temperature,
}


def negative_weights(
    distances: Float[ArrayLike, "anchors items"],
    negatives: Bool[ArrayLike, "anchors items"],
    *,
    temperature: float,
) -> Float[Array, "anchors items"]:
    """Weights of an anchor's negatives in the gradient of a softmax loss (HypMix, Fig. 3).

    p(x⁻) = exp(−d(a, x⁻)/τ) / Σ exp(−d(a, x)/τ), over the negatives x of the anchor a. The
    cross-entropy's derivative by the logit of a negative is its share of the whole denominator,
    which also holds the positive. Among the negatives of one denominator, these derivatives are in
    proportion to p, whatever the positive is.

    With two images of each class in a batch, an anchor of the pairwise cross-entropy has one
    denominator. With s images it has s − 1, one for each positive: negatives of the anchor's own
    subset are in all of them, each other one in one.

    Args:
        distances: Distances from each anchor to each item, in the space of the loss; for HypMix
            that is `mixed_space`.
        negatives: Which items are negatives of each anchor, at least one for each.
        temperature: τ > 0; 1 for HypMix, see `softmax_temperature`.

    Returns:
        Weights that sum to 1 over the negatives of each anchor, and are 0 elsewhere.
    """
    logits = -jnp.asarray(distances) / temperature
    return jax.nn.softmax(logits, axis=-1, where=jnp.asarray(negatives))


def softmax_temperature(config: ConfigDict) -> float:
    """The number that divides distances in the softmax of a run's objective.

    Args:
        config: The run's configuration.

    Raises:
        UserError: The objective has no softmax over the negatives of an anchor.
    """
    name = config.objective.name
    if name not in _DIVISORS:
        raise UserError(
            f"the objective {name} has no softmax over the negatives of an anchor; "
            f"{', '.join(_DIVISORS)} have one"
        )
    return float(_DIVISORS[name](config.objective))
