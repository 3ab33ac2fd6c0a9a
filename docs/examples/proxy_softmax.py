"""Softmax over trained proxies, and agreement with a moving average of the model."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from hypjax.fields import ABOVE_0, Field, within
from hypjax.geometry import Space
from hypjax.objectives.base import Group, LossSettings, Metrics, Objective, ProblemSizes
from hypjax.types import Batch, Outputs

FIELDS = {"temperature": Field(0.2, ABOVE_0), "teacher_decay": Field(0.99, within(0, 1))}


@dataclasses.dataclass(frozen=True)
class ProxySoftmax(Objective):
    """Cross-entropy with the class, and with the teacher's distribution over the classes."""

    space: Space
    temperature: float
    teacher_decay: float

    groups = (Group(("proxies",), rate=100.0, weight_decay=0.0),)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns random proxies, and the teacher's mean logits, 0."""
        proxies = jax.random.normal(key, (spec.classes, spec.head_dim)) / spec.head_dim**0.5
        return {"proxies": proxies}, {"centre": jnp.zeros(spec.classes)}

    def logits(self, params: dict, features: Array) -> Float[Array, "images classes"]:
        """−distance / temperature from each image to each proxy."""
        points, proxies = self.space.embed(features), self.space.embed(params["proxies"])
        return -self.space.distance_matrix(points, proxies) / self.temperature

    def loss(
        self, params: dict, state: dict, outputs: Outputs, teacher: Outputs, batch: Batch
    ) -> tuple[Float[Array, ""], tuple[dict, Metrics]]:
        """Returns the loss of a batch, the next running mean, and two curves to log."""
        logits = self.logits(params, outputs.projected)
        taught = jax.lax.stop_gradient(self.logits(params, teacher.projected))
        target = jax.nn.softmax(taught - state["centre"])
        fit = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()
        agreement = optax.softmax_cross_entropy(logits, target).mean()
        centre = 0.9 * state["centre"] + 0.1 * taught.mean(axis=0)
        return fit + agreement, ({"centre": centre}, {"fit": fit, "agreement": agreement})


def create(settings: LossSettings, space: Space) -> ProxySoftmax:
    """Builds the objective that a run's configuration describes."""
    fields = settings.fields
    return ProxySoftmax(space, fields["temperature"], fields["teacher_decay"])
