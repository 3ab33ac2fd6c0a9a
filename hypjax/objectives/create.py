"""Registries of objectives and spaces, and the choice that a configuration makes."""

from collections.abc import Callable

from ml_collections import ConfigDict

from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.objectives.base import Objective
from hypjax.objectives.pairwise import PairwiseCrossEntropy


def _pairwise_cross_entropy(config: ConfigDict, space: Space) -> Objective:
    return PairwiseCrossEntropy(
        space=space,
        temperature=config.objective.temperature,
        samples_per_class=config.train.samples_per_class,
    )


# Each takes a run's whole configuration and the space that it names.
OBJECTIVES: dict[str, Callable[[ConfigDict, Space], Objective]] = {
    "pairwise_cross_entropy": _pairwise_cross_entropy,
}

# Each takes the fields of `config.objective`.
SPACES: dict[str, Callable[[ConfigDict], Space]] = {
    "poincare": lambda fields: PoincareBall(c=fields.c, clip_radius=fields.clip_radius),
    "sphere": lambda fields: Sphere(),
}


def create_objective(config: ConfigDict) -> Objective:
    """Builds the objective that a run's configuration describes.

    Args:
        config: The run's whole configuration, already validated.

    Returns:
        The objective, in the space that the configuration names.
    """
    space = SPACES[config.objective.space](config.objective)
    return OBJECTIVES[config.objective.name](config, space)
