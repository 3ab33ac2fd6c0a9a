"""HypMix: cosine and hyperbolic distance in one pairwise cross-entropy (Yue et al., WACV 2024)."""

from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least
from hypjax.geometry import Fused, PoincareBall, Sphere
from hypjax.objectives.pairwise import PairwiseCrossEntropy

FIELDS = {
    # Eq. 10 has one temperature, the released code two. These are the code's.
    "sphere_temperature": Field(0.05, ABOVE_0),  # τ_e: divides the cosine.
    "ball_temperature": Field(0.2, ABOVE_0),  # τ_h: divides the hyperbolic distance.
    "ball_weight": Field(3.0, at_least(0)),  # λ: 3 for CUB, 8 for Cars and SOP.
}


def mixed_space(
    ball: PoincareBall, *, sphere_temperature: float, ball_temperature: float, ball_weight: float
) -> Fused:
    """The space in which the pairwise cross-entropy at temperature 1 is the loss of HypMix.

    Its logits are cos/τ_e − λ·d/τ_h, up to a constant (Eq. 9 and 10), where both distances are
    those of the normalised features. The ball thus never clips them.

    Args:
        ball: The ball, which measures d.
        sphere_temperature: τ_e.
        ball_temperature: τ_h.
        ball_weight: λ.
    """
    of_sphere = Sphere(), 1 / (2 * sphere_temperature)  # −(2 − 2cos)/(2·τ_e).
    return Fused((of_sphere, (ball, ball_weight / ball_temperature)))


def create(config: ConfigDict, space: PoincareBall | Sphere) -> PairwiseCrossEntropy:
    """Builds the objective that a run's configuration describes.

    Raises:
        UserError: The configuration names another space than the ball.
    """
    if not isinstance(space, PoincareBall):
        raise UserError(
            f"config.objective.space is {config.objective.space}; it must be poincare for hypmix, "
            "which adds the sphere itself"
        )
    return PairwiseCrossEntropy(
        space=mixed_space(space, **{name: config.objective[name] for name in FIELDS}),
        temperature=1.0,
        samples_per_class=config.train.samples_per_class,
    )
