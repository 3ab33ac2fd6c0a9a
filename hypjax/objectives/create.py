"""The registry of objectives, and the choice that a configuration makes."""

import dataclasses
from collections.abc import Callable

from ml_collections import ConfigDict

from hypjax.geometry import SPACES, Space
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


def create_space(fields: ConfigDict) -> Space:
    """Builds the space that `config.objective` names, with those of its fields that it has.

    Args:
        fields: The fields of `config.objective`.
    """
    space = SPACES[fields.space]
    names = [field.name for field in dataclasses.fields(space) if field.name in fields]
    return space(**{name: fields[name] for name in names})


def create_objective(config: ConfigDict) -> Objective:
    """Builds the objective that a run's configuration describes.

    Args:
        config: The run's whole configuration, already validated.

    Returns:
        The objective, in the space that the configuration names.
    """
    space = create_space(config.objective)
    return OBJECTIVES[config.objective.name](config, space)
