"""From a run's configuration to its objective."""

from ml_collections import ConfigDict

from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.objectives.base import Objective
from hypjax.objectives.pairwise import PairwiseCrossEntropy


def create_objective(config: ConfigDict) -> Objective:
    """Builds the objective that a run's configuration describes.

    Args:
        config: The run's whole configuration, already validated.
    """
    return PairwiseCrossEntropy(
        space=_create_space(config),
        temperature=config.objective.temperature,
        samples_per_class=config.train.samples_per_class,
    )


def _create_space(config: ConfigDict) -> Space:
    objective = config.objective
    if objective.space == "sphere":
        return Sphere()
    return PoincareBall(c=objective.c, clip_radius=objective.clip_radius)
