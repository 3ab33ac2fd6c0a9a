"""Symmetric contrastive loss between images and their features (Radford et al., ICML 2021)."""

import dataclasses

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from hypjax.fields import ABOVE_0, Field, at_least
from hypjax.geometry import Space
from hypjax.objectives.base import LossSettings, Metrics, Objective
from hypjax.types import Outputs

FIELDS = {"temperature": Field(0.2, ABOVE_0), "features_dim": Field(7, at_least(1))}


@dataclasses.dataclass(frozen=True)
class Paired(Objective):
    """Each image is to be nearest to its own features, and these to their image."""

    space: Space
    temperature: float
    towers = ("images", "features")

    def loss(self, outputs: dict[str, Outputs]) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean cross-entropy over images and features, and no curves."""
        images, features = (self.space.embed(outputs[name].projected) for name in self.towers)
        logits = -self.space.distance_matrix(images, features) / self.temperature
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        pairs = jnp.arange(len(logits))
        return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)).mean() / 2, {}


def create(settings: LossSettings, space: Space) -> Paired:
    """Builds the objective of a run."""
    return Paired(space, settings.fields["temperature"])
