"""Entailment cones: every image inside the cone of its coarse class (MERU, ICML 2023)."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least
from hypjax.geometry import Space, cones, lorentz
from hypjax.geometry.arithmetic import Scalar
from hypjax.objectives.base import Group, Metrics, Objective, Spec, loss_function
from hypjax.types import Batch, Outputs

CONE_FIELDS = {
    "cone_weight": Field(0.2, at_least(0)),  # Weight of the entailment loss, λ in MERU.
    "cone_radius": Field(0.1, ABOVE_0),  # K.
    "cone_rate": Field(1.0, at_least(0)),  # Factor of the apexes' learning rate.
}


def entailment(
    apexes: Float[ArrayLike, "*#b d"],
    points: Float[ArrayLike, "*#b d"],
    c: Scalar,
    radius: float = 0.1,
) -> Float[Array, "*b"]:
    """Angles by which points lie outside cones, in radians (MERU, Section 3, "Entailment loss").

    That is max(0, ext(x, y) − aper(x)) of apexes x and points y, elementwise over the leading axes:
    0 inside.

    Args:
        apexes: Points of the hyperboloid, [..., d], see `hypjax.geometry.cones`.
        points: Likewise.
        c: Negative curvature.
        radius: K > 0.
    """
    outside = cones.exterior_angle(apexes, points, c) - cones.half_aperture(apexes, c, radius)
    return jax.nn.relu(outside)


def create_cones(
    create_base: Callable[[ConfigDict, Space], Objective], config: ConfigDict, space: Space
) -> "Cones":
    """Builds a run's objective; `create_base` builds the other loss.

    Raises `UserError` in a space that is not hyperbolic, or too flat for cones.
    """
    fields, ball = config.objective, space.ball()
    if ball is None:
        raise UserError(
            f"config.objective.space is {fields.space}; it must be poincare or lorentz for "
            f"{fields.name}, whose cones are hyperbolic"
        )
    # √c times the norm of the longest features.
    widest = math.inf if ball.clip_radius is None else math.sqrt(fields.c) * ball.clip_radius
    if fields.c == 0 or widest <= _first_length(fields.cone_radius, 1.0):
        raise UserError(
            f"config.objective.c is {fields.c}, where no cone of cone_radius {fields.cone_radius} "
            f"is narrower than 90 degrees within the clip_radius {fields.clip_radius}; choose a "
            "larger c or clip_radius, or a smaller cone_radius"
        )
    return Cones(
        base=create_base(config, space),
        weight=fields.cone_weight,
        radius=fields.cone_radius,
        rate=fields.cone_rate,
        title=f"{fields.name}, whose cones are of groups of classes, and the data set "
        f"{config.data.name}",
    )


def _first_length(radius: float, c: float) -> float:
    """Norm of features v whose half-aperture is 45°: sinh(2√c‖v‖) = 2K/sin 45°."""
    return math.asinh(2 * math.sqrt(2) * radius) / (2 * math.sqrt(c))


@dataclasses.dataclass(frozen=True)
class Cones:
    """A loss, and the entailment loss of each image in the cone of its coarse class.

    Coarse classes are the groups that the training set has for its classes. The apexes of their
    cones are parameters that the space embeds like the head's outputs. Cones are those of the
    hyperboloid to which the space is isometric.

    Attributes:
        base: The other loss, in a hyperbolic space.
        weight: Weight of the mean entailment loss.
        radius: K of `hypjax.geometry.cones.half_aperture`.
        rate: Factor of the apexes' learning rate.
        title: Names of the objective and the data, for messages.
    """

    base: Objective
    weight: float
    radius: float
    rate: float
    title: str

    @property
    def space(self) -> Space:
        """That of the other loss."""
        return self.base.space

    @property
    def score_space(self) -> Space:
        """That of the other loss."""
        return self.base.score_space

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the other loss, and the apexes."""
        of_base = (group._replace(path=("base", *group.path)) for group in self.base.groups)
        return (*of_base, Group(("apexes",), rate=self.rate))

    @property
    def teacher_decay(self) -> float | None:
        """That of the other loss."""
        return self.base.teacher_decay

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[dict, dict]:
        """Returns parameters and state of the other loss, with apexes and coarse classes.

        Apexes lie in random directions where their cones have a half-aperture of 45 degrees.

        Raises:
            UserError: The training classes have no groups.
        """
        if not spec.coarse_classes:
            raise UserError(f"the objective is {self.title} has none; name a loss without cones+")
        of_base, of_apexes = jax.random.split(key)
        params, state = self.base.init(of_base, spec)
        coarse = np.asarray(spec.coarse_classes, np.int32)
        apexes = jax.random.normal(of_apexes, (coarse.max() + 1, spec.head_dim))
        apexes *= _first_length(self.radius, self.space.ball().c) / jnp.linalg.norm(
            apexes, axis=-1, keepdims=True
        )
        return {"base": params, "apexes": apexes}, {"base": state, "coarse": jnp.asarray(coarse)}

    def loss(
        self,
        params: dict,
        state: dict,
        outputs: Outputs,
        teacher: Outputs | None,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], tuple[dict, Metrics]]:
        """Loss of a batch, see `Objective.loss`."""
        loss, (of_base, metrics) = loss_function(self.base)(
            params["base"], state["base"], outputs, teacher, batch, key
        )
        own = jnp.take(params["apexes"], state["coarse"][batch.labels], axis=0)
        c = self.space.ball().c
        apexes, points = (
            lorentz.from_poincare(self.space.to_ball(self.space.embed(features)), c)
            for features in (own, outputs.projected)
        )
        outside = entailment(apexes, points, c, self.radius)
        metrics |= {
            "cone_loss": jnp.mean(outside),
            "cone_inside": jnp.mean(outside == 0),
            "cone_apex_norm": jnp.mean(jnp.linalg.norm(params["apexes"], axis=-1)),
        }
        state = state | {"base": of_base}
        return loss + self.weight * metrics["cone_loss"], (state, metrics)
