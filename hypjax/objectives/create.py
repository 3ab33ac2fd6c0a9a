"""The registry of objectives, and the choice that a configuration makes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import Field
from hypjax.geometry import SPACES, Fused, Space
from hypjax.geometry.learned import has_curvature, learned_numbers, space_at, values
from hypjax.objectives import matryoshka, pair_losses, pairwise, proxy_losses
from hypjax.objectives.base import Objective
from hypjax.objectives.cones import CONE_FIELDS, create_cones
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

_ANGULAR = {name for name, loss in proxy_losses.PROXY_LOSSES.items() if loss.angular}

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
    # Entailment cones beside each loss that any hyperbolic space has.
    **{
        f"cones+{name}": Entry(
            functools.partial(create_cones, base.create),
            {**base.fields, **CONE_FIELDS},
            base.by_class,
        )
        for name, base in _LOSSES.items()
        if not base.by_tuple and name not in ("hypmix", *_ANGULAR)
    },
}


def create_space(fields: ConfigDict) -> Space:
    """Builds the space that `config.objective` names, with those of its fields that it has.

    Of several curvatures it is the mean of the distances in one such space for each.
    """
    space = SPACES[fields.space]
    names = [field.name for field in dataclasses.fields(space) if field.name in fields]
    own = {name: fields[name] for name in names}
    if not has_curvature(space) or not len(fields.curvatures):
        return space(**own)
    weight = 1 / len(fields.curvatures)
    parts = tuple((space(**{**own, "c": c}), weight) for c in fields.curvatures)
    return Fused(parts, normalized=False)


def unused_fields(fields: ConfigDict) -> set[str]:
    """Names of fields of `config.objective` that have no effect.

    They are those that only other spaces have, on the sphere `c` and `curvatures`, `c` beside
    several curvatures, and, unless c is learned, those that say how.
    """
    named = {n: {field.name for field in dataclasses.fields(s)} for n, s in SPACES.items()}
    unused = set().union(*named.values()) - named[fields.space]
    unused |= {"curvatures"} if "c" in unused else {"c"} if fields.curvatures else set()
    return unused if fields.learn_c else unused | {"c_bounds", "c_rate"}


def create_objective(config: ConfigDict) -> Objective:
    """Builds the objective that a run's whole configuration, already validated, describes.

    Its learned numbers are those before training; with a trained model, use `objective_at`.
    """
    space = create_space(config.objective)
    return OBJECTIVES[config.objective.name].create(config, space)


def objective_at(config: ConfigDict, params: PyTree) -> Objective:
    """Builds a run's objective with the numbers that a model, perhaps traced, has learned."""
    return create_objective(config_at(config, params))


def config_at(config: ConfigDict, params: PyTree) -> ConfigDict:
    """A configuration with the numbers that a model has learned in place of their first ones.

    `params` are the parameters of the model, perhaps traced.
    """
    if not learned_numbers(config.objective):
        return config
    found = config.copy_and_resolve_references()
    with found.unlocked(), found.ignore_type():
        found.objective.update(values(params["space"]))
    return found


def scored_space(config: ConfigDict, params: PyTree) -> Space:
    """The space in which the head of a model with these parameters is scored.

    It is the one that was saved with the run, or else that of its objective.
    """
    saved = config.get(SAVED_SPACE)
    if saved is None:
        return objective_at(config, params).score_space
    return space_at(saved, params["space"] if config.objective.learn_c else None)


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
