"""The registry of objectives, to which users add theirs, and a configuration's objective."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.errors import UserError, require_free
from hypjax.fields import ANY
from hypjax.geometry import Space
from hypjax.geometry.registry import create_space
from hypjax.objectives import matryoshka
from hypjax.objectives.base import (
    Declaration,
    Extension,
    Loss,
    Metrics,
    Objective,
    adjacent_samples,
    declare,
    loss_function,
    requested,
)
from hypjax.objectives.comparisons import batch_metrics
from hypjax.objectives.cones import Cones
from hypjax.objectives.happier import HAPPIER
from hypjax.objectives.hier import Hier
from hypjax.objectives.label_tree import HypHC, HypStructure
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.pairwise import PAIRWISE_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES
from hypjax.types import Batch, Outputs


@dataclasses.dataclass(frozen=True)
class SavedObjective(Objective):
    """The saved space of a run with a custom loss, whose code may be unknown."""

    space: Space


def _extended(
    prefix: str, kind: type[Extension], losses: Mapping[str, Declaration], **facts: Any
) -> dict[str, Declaration]:
    return {
        prefix + name: Declaration(
            functools.partial(kind.create, base.create),
            {**base.fields, **kind.declared()},
            base.by_class,
            base.by_tuple,
            facts.get("spaces", base.spaces),
        )
        for name, base in losses.items()
    }


_LOSSES = PAIRWISE_LOSSES | PAIR_LOSSES | PROXY_LOSSES
# Neither HIER nor cones exist with tuples or in HypMix's space, and cones not with angular margins.
_ON_SPHERE = {n: loss for n, loss in _LOSSES.items() if n != "hypmix" and not loss.by_tuple}
_ANYWHERE = {name: loss for name, loss in _ON_SPHERE.items() if not loss.spaces}
OBJECTIVES = {
    **_LOSSES,
    **_extended("hier+", Hier, _ON_SPHERE, spaces=("poincare", "lorentz")),
    **_extended(matryoshka.PREFIX, matryoshka.Matryoshka, _LOSSES),
    **_extended("cones+", Cones, _ANYWHERE),
    "happier": HAPPIER,
    **_extended("hypstructure+", HypStructure, _LOSSES),
    **_extended("hyphc+", HypHC, _LOSSES),
}
BUILT_IN = frozenset(OBJECTIVES)
# What a function may take by name.
OFFERED = ("embeddings", "labels", "space", "features", "ids", "key", "samples_per_class")


def create_objective(config: ConfigDict) -> Objective:
    """Builds the objective of a validated configuration, with learned scalars' first values."""
    fields = config.objective
    loss = declaration(fields.name)
    if loss.spaces and fields.space not in loss.spaces:
        raise UserError(f"objective.space must be {' or '.join(loss.spaces)} for {fields.name}")
    return loss.create(config, create_space(fields))


def declaration(name: str | None) -> Declaration:
    """The declaration of a loss; an unknown loss, of a saved run, has no fields."""
    return OBJECTIVES.get(name, _UNKNOWN)


def _refuse(config: ConfigDict, space: Space) -> Objective:
    raise UserError(
        f"the objective {config.objective.name} is not known in this process; pass it to "
        "hypjax.train_and_evaluate, or register it by hypjax.register_objective"
    )


_UNKNOWN = Declaration(_refuse, {})


def softmax_temperature(config: ConfigDict, scalars: Mapping[str, Any] | None = None) -> float:
    """The divisor of distances in the softmax of a run's objective.

    Learned scalars, by name, replace the configuration's. An objective without a softmax over an
    anchor's negatives is a `UserError`.
    """
    divisors = {name: loss.divisor for name, loss in OBJECTIVES.items() if loss.divisor}
    name = config.objective.name
    if name not in divisors:
        raise UserError(f"{name} has no softmax over negatives; {', '.join(divisors)} have one")
    if config.objective.get("loss_weights"):
        raise UserError("with objective.loss_weights, each part of the space has its own softmax")
    return float(divisors[name]({**config.objective, **(scalars or {})}))


def register_objective(name: str, objective: Objective | Callable[..., Any]) -> None:
    """Makes a user-defined loss a value of `objective.name`, in this process.

    Args:
        name: A name that hypjax does not use. A later registration replaces it.
        objective: An `Objective`, or a function that returns a scalar or (scalar, {name: scalar}).
            It takes by name what it needs of `embeddings`, points [images, d] of the
            configuration's space, `labels`, `space`, `features`, the head's outputs before the
            space, `ids`, numbers of the images in the training set, `key`, a random key, and
            `samples_per_class`, None if batches hold any classes. Further arguments whose defaults
            are numbers, truth values or strings become fields of `config.objective`.

    Raises:
        UserError: The name is taken, or the function requires another argument.
    """
    require_free("an objective", name, BUILT_IN)
    if isinstance(objective, Objective):
        loss_function(objective)  # Raises if it requires something unknown.
        OBJECTIVES[name] = Declaration(lambda config, space: objective, {}, code=objective)
    elif callable(objective):
        OBJECTIVES[name] = _declared(f"the loss {name.removeprefix('own:')}", objective)
    else:
        raise UserError(f"{objective!r:.40} is no objective; give an Objective or a function")


def _declared(title: str, function: Callable[..., Any]) -> Declaration:
    names = requested(title, function, OFFERED)
    arguments = inspect.signature(function).parameters.items()
    simple = [name for name, x in arguments if type(x.default) in (bool, int, float, str)]
    rules = {name: ANY for name in simple if name not in OFFERED}

    def build(loss: Callable[..., Any], config: ConfigDict, space: Space) -> FunctionObjective:
        return FunctionObjective(space, loss, title, names, adjacent_samples(config))

    return declare(function, rules, build=build, shared={}, code=function)


@dataclasses.dataclass(frozen=True)
class FunctionObjective(Objective):
    """A user-defined function of the embeddings of a batch, without parameters or state."""

    space: Space
    function: Callable[..., Any]  # The loss, with its settings.
    title: str  # What messages call it.
    names: tuple[str, ...]  # Of `OFFERED`, what the function takes.
    samples_per_class: int | None  # None if batches hold any classes.

    def loss(self, outputs: Outputs, batch: Batch, key: PRNGKeyArray) -> tuple[Loss, Metrics]:
        """Loss of a batch, with the metrics of all losses and the function's curves."""
        features, labels, samples = outputs.projected, batch.labels, self.samples_per_class
        points = self.space.embed(features)
        offered = points, labels, self.space, features, batch.ids, key, samples
        arguments = dict(zip(OFFERED, offered, strict=True))
        result = self.function(**{name: arguments[name] for name in self.names})
        loss, curves = result if isinstance(result, tuple) else (result, {})
        if not isinstance(curves, Mapping) or any(map(jnp.ndim, (loss, *curves.values()))):
            raise UserError(
                f"{self.title} must return a scalar, or (scalar, {{name: scalar}}), not "
                f"{jax.tree.map(jnp.shape, result)}"
            )
        curves = {name: jnp.asarray(value, jnp.float32) for name, value in curves.items()}
        metrics = batch_metrics(features, points, labels, self.space, samples)
        return jnp.asarray(loss, jnp.float32), metrics | curves
