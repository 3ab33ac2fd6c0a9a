"""The registry of objectives, and the choice that a configuration makes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import Field
from hypjax.geometry import SPACES, Space
from hypjax.geometry.learned import SpaceParameters, space_at
from hypjax.objectives import matryoshka, pair_losses, pairwise, proxy_losses
from hypjax.objectives.base import Objective
from hypjax.objectives.hier import HIER_FIELDS, create_hier


class Entry(NamedTuple):
    """An objective that configurations can name."""

    create: Callable[[ConfigDict, Space], Objective]  # From a run's configuration and its space.
    fields: Mapping[str, Field]  # Which it adds to `config.objective`.
    by_class: bool  # Whether it needs several images of each class in a batch.
    by_tuple: bool = False  # Whether it needs batches of tuples.
    code: Any = None  # The user's function or `Objective`; None for hypjax's own.


SAVED_SPACE = "saved_space"  # Field of the configuration of a saved run, see `default_config`.


_LOSSES = {
    "pairwise_cross_entropy": Entry(pairwise.create, pairwise.FIELDS, by_class=True),
    "hypmix": Entry(pairwise.create_hypmix, pairwise.HYPMIX_FIELDS, by_class=True),
    **{
        name: Entry(
            functools.partial(pair_losses.create, name), loss.fields, loss.by_class, loss.by_tuple
        )
        for name, loss in pair_losses.PAIR_LOSSES.items()
    },
    **{
        name: Entry(functools.partial(proxy_losses.create, name), loss.fields, by_class=False)
        for name, loss in proxy_losses.PROXY_LOSSES.items()
    },
}

OBJECTIVES = {
    **_LOSSES,
    # HIER on top of each loss.
    **{
        f"hier+{name}": Entry(
            functools.partial(create_hier, base.create),
            {**base.fields, **HIER_FIELDS},
            base.by_class,
        )
        for name, base in _LOSSES.items()
        if not (base.by_tuple or name == "hypmix")
    },
    # Each loss of prefixes of the embedding.
    **{
        f"{matryoshka.PREFIX}{name}": base._replace(
            create=functools.partial(matryoshka.create_matryoshka, base.create),
            fields={**base.fields, **matryoshka.FIELDS},
        )
        for name, base in _LOSSES.items()
    },
}


def create_space(fields: ConfigDict) -> Space:
    """Builds the space that `config.objective` names, with those of its fields that it has."""
    space = SPACES[fields.space]
    names = [field.name for field in dataclasses.fields(space) if field.name in fields]
    return space(**{name: fields[name] for name in names})


def unused_fields(fields: ConfigDict) -> set[str]:
    """Names of fields of `config.objective` that have no effect.

    They are those that only other spaces have, on the sphere `c`, and, unless c is learned, those
    that say how.
    """
    named = {n: {field.name for field in dataclasses.fields(s)} for n, s in SPACES.items()}
    unused = set().union(*named.values()) - named[fields.space]
    return unused if fields.learn_c else unused | {"c_bounds", "c_rate"}


def create_objective(config: ConfigDict) -> Objective:
    """Builds the objective that a run's whole configuration, already validated, describes.

    Its spaces are those before training; with a trained model, use `objective_at`.
    """
    return _create(config, None)


def objective_at(config: ConfigDict, params: PyTree) -> Objective:
    """Builds a run's objective in the space that a model's parameters, perhaps traced, make."""
    return _create(config, space_parameters(config, params))


def _create(config: ConfigDict, params: SpaceParameters | None) -> Objective:
    space = space_at(create_space(config.objective), params)
    return OBJECTIVES[config.objective.name].create(config, space)


def space_parameters(config: ConfigDict, params: PyTree) -> SpaceParameters | None:
    """What a model has learned of its space; None if the configuration says all of it."""
    return params["space"] if config.objective.learn_c else None


def scored_space(config: ConfigDict, params: PyTree) -> Space:
    """The space in which the head of a model with these parameters is scored.

    It is the one that was saved with the run, or else that of its objective.
    """
    saved = config.get(SAVED_SPACE)
    if saved is None:
        return objective_at(config, params).score_space
    return space_at(saved, space_parameters(config, params))


# By what a loss divides distances in its softmax; HypMix's space holds its temperatures.
_DIVISORS = {
    "pairwise_cross_entropy": lambda fields: fields.temperature,
    "hypmix": lambda fields: 1.0,
    "supcon": lambda fields: 2 * fields.temperature,
    "scalable_nca": lambda fields: 2 * fields.temperature,
}


def softmax_temperature(config: ConfigDict) -> float:
    """The number that divides distances in the softmax of a run's objective.

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
