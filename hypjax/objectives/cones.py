"""Entailment cones: images lie inside the cone of their coarse class, and outside other cones.

In MERU (Desai et al., ICML 2023), a text is the apex of a cone that holds its images, and the
contrastive loss keeps texts apart. Apexes trained only by the entailment loss would all move so
near to the origin that their cones become half-spaces, which hold all images. Negatives, which must
lie outside a cone (Ganea et al., ICML 2018), prevent this.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, at_least
from hypjax.geometry import Space, arithmetic, cones, lorentz
from hypjax.geometry.arithmetic import AnyArray, Scalar
from hypjax.objectives.base import (
    Create,
    Extension,
    Group,
    LossResult,
    LossSettings,
    ProblemSizes,
    setting,
)
from hypjax.objectives.comparisons import Labels, class_indices, mean_where
from hypjax.types import Batch, Outputs


def entailment(
    points: Float[AnyArray, "n d"],
    labels: Labels,
    apexes: Float[AnyArray, "g d"],
    *,
    c: Scalar,
    radius: float = 0.1,
    negatives: float = 0.0,
    margin: float = 0.01,
) -> Float[Array, ""]:
    """Entailment loss of points and cones (MERU, Section 3), with negatives.

    Let z be the exterior angle of a point minus a cone's half-aperture, in radians. The loss is the
    mean of max(0, z) over points and the cones of their labels, plus λ times the mean of
    max(0, γ − z) over points and all other cones (Ganea et al., Section 4). In the second mean,
    Ganea et al. clip z at 0, so points deep in a wrong cone have no gradient; here they have one.

    Points and apexes lie on the hyperboloid of curvature −c, see `hypjax.geometry.cones`; labels
    number the cones from 0. `radius` is K > 0 of the cones, `negatives` λ, and `margin` γ.
    """
    points, apexes = arithmetic.floating(points, apexes)
    outside = _angles_outside(points, apexes, c, radius)
    in_class = class_indices(labels, len(apexes))[:, None] == jnp.arange(len(apexes))[None]
    loss = mean_where(jax.nn.relu(outside), in_class)
    if not negatives:
        return loss
    return loss + negatives * mean_where(jax.nn.relu(margin - outside), ~in_class)


def _angles_outside(
    points: Float[Array, "n d"], apexes: Float[Array, "g d"], c: Scalar, radius: float
) -> Float[Array, "n g"]:
    angles = cones.exterior_angle(apexes, points[:, None], c)
    return angles - cones.half_aperture(apexes, c, radius)[None]


def _initial_norm(radius: float, c: float) -> float:
    """Norm of features v whose cone has a half-aperture of 45°: sinh(2√c‖v‖) = 2K/sin 45°."""
    return math.asinh(2 * math.sqrt(2) * radius) / (2 * math.sqrt(c))


@dataclasses.dataclass(frozen=True)
class Cones(Extension):
    """Adds the entailment loss of images in the cones of their coarse classes to a base loss.

    The apexes of the cones are parameters, which the space embeds like the head's outputs. Cones
    lie on the hyperboloid isometric to the space.
    """

    prefix = "cone_"
    one_ball = True
    weight: float = setting(0.2, at_least(0))  # Weight of the entailment loss, λ in MERU.
    negatives: float = setting(1.0, at_least(0))  # Weight of other coarse classes' cones; MERU: 0.
    margin: float = setting(0.01, at_least(0))  # γ of Ganea et al., in radians.
    radius: float = setting(0.1, ABOVE_0)  # K.
    rate: float = setting(1.0, at_least(0))  # Factor of the apexes' learning rate.

    @classmethod
    def create(cls, create_base: Create, settings: LossSettings, space: Space) -> Extension:
        """Builds a run's objective, in a hyperbolic space."""
        fields, ball = settings.fields, space.ball()
        if ball is None:
            raise UserError(f"objective.space is {fields['space']}; cones need poincare or lorentz")
        # Without clipping, features reach the initial apexes at any radius.
        c, radius = float(ball.c), fields["cone_radius"]
        if c == 0 or _initial_norm(radius, c) >= ball.max_feature_norm:
            problem = f"at config.objective.c={fields['c']} no cone is narrower than 90 degrees"
            raise UserError(f"{problem}; raise c or clip_radius, or lower cone_radius")
        return super().create(create_base, settings, space)

    @property
    def groups(self) -> Sequence[Group]:  # type: ignore[override]
        """The base's groups, and the apexes."""
        return (*super().groups, Group(("apexes",), rate=self.rate))

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns the base's parameters and state, with apexes and coarse classes.

        Apexes lie in random directions, where their cones have a half-aperture of 45 degrees.
        Raises a `UserError` if the training classes have no coarse classes.
        """
        if not spec.coarse_labels:
            raise UserError("cones+ needs coarse classes: list coarse_labels of the dataset")
        base_key, apex_key = jax.random.split(key)
        params, state = self.base.init(base_key, spec)
        coarse = np.asarray(spec.coarse_labels[0], np.int32)
        apexes = jax.random.normal(apex_key, (coarse.max() + 1, spec.head_dim))
        norm = _initial_norm(self.radius, self.space.ball().c)
        apexes *= norm / jnp.linalg.norm(apexes, axis=-1, keepdims=True)
        return {"base": params, "apexes": apexes}, {"base": state, "coarse": jnp.asarray(coarse)}

    def loss(
        self, params: dict, state: dict, outputs: Outputs, batch: Batch, **others: Any
    ) -> LossResult:
        """The base's loss plus the weighted entailment loss, see `Objective.loss`."""
        loss, (base_state, metrics) = self.base_loss(
            params=params["base"], state=state["base"], outputs=outputs, batch=batch, **others
        )
        c, radius = self.space.ball().c, self.radius
        apexes, points = (
            lorentz.from_poincare(self.space.to_ball(self.space.embed(features)), c)
            for features in (params["apexes"], outputs.projected)
        )
        coarse = jnp.asarray(state["coarse"])[batch.labels]
        cone_loss = entailment(
            points, coarse, apexes, c=c, radius=radius, negatives=self.negatives, margin=self.margin
        )
        inside = lax.stop_gradient(_angles_outside(points, apexes, c, radius)) <= 0
        in_class = coarse[:, None] == jnp.arange(len(apexes))[None]
        metrics |= {
            "cone_loss": cone_loss,
            "cone_inside": mean_where(inside, in_class),
            "cone_inside_others": mean_where(inside, ~in_class),
            "cone_apex_norm": jnp.mean(jnp.linalg.norm(params["apexes"], axis=-1)),
        }
        return loss + self.weight * cone_loss, (state | {"base": base_state}, metrics)
