"""Registry of objectives, to which users can add losses, and a configuration's objective."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from hypjax.errors import UserError, require_free
from hypjax.fields import ANY, Values
from hypjax.geometry import Space
from hypjax.geometry.registry import create_space
from hypjax.objectives import matryoshka
from hypjax.objectives.base import (
    Declaration,
    Extension,
    Loss,
    LossSettings,
    Metrics,
    Objective,
    accepted_arguments,
    declare,
    loss_function,
)
from hypjax.objectives.captions import CAPTIONS
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
    """Replaces a user-defined loss whose code is unknown: the space that was saved with a run."""

    space: Space

    def loss(self, *values: Any, **named: Any) -> tuple[Loss, Any]:
        """Raises a `UserError`."""
        raise UserError("the code of this run's loss is unknown here; register it")


def _extended(
    prefix: str,
    extension: type[Extension],
    losses: Mapping[str, Declaration],
    spaces: tuple[str, ...] | None = None,
) -> dict[str, Declaration]:
    """Declares an extension of each loss; `spaces` replaces those that the losses allow."""
    return {
        prefix + name: Declaration(
            functools.partial(extension.create, base.create),
            {**base.fields, **extension.declared()},
            by_class=base.by_class,
            by_tuple=base.by_tuple,
            spaces=base.spaces if spaces is None else spaces,
            one_ball=base.one_ball or extension.one_ball,
        )
        for name, base in losses.items()
    }


_LOSSES = PAIRWISE_LOSSES | PAIR_LOSSES | PROXY_LOSSES
# HIER and cones support neither tuples nor HypMix's space, and cones no angular margins.
_ON_SPHERE = {n: loss for n, loss in _LOSSES.items() if not (loss.one_ball or loss.by_tuple)}
_IN_ANY_SPACE = {name: loss for name, loss in _ON_SPHERE.items() if not loss.spaces}
OBJECTIVES = {
    **_LOSSES,
    **_extended("hier+", Hier, _ON_SPHERE, ("poincare", "lorentz")),
    **_extended(matryoshka.PREFIX, matryoshka.Matryoshka, _LOSSES),
    **_extended("cones+", Cones, _IN_ANY_SPACE),
    "happier": HAPPIER,
    "captions": CAPTIONS,
    **_extended("hypstructure+", HypStructure, _LOSSES),
    **_extended("hyphc+", HypHC, _LOSSES),
}
BUILT_IN = frozenset(OBJECTIVES)
# Arguments that a user-defined function may take by name.
OFFERED = ("embeddings", "labels", "space", "features", "ids", "key", "samples_per_class")


def create_objective(settings: LossSettings) -> Objective:
    """Builds the objective of validated settings, with the scalars' initial values."""
    name, space = settings.fields["name"], settings.fields["space"]
    loss = declaration(name)
    if loss.spaces and space not in loss.spaces:
        raise UserError(f"objective.space must be {' or '.join(loss.spaces)} for {name}")
    return loss.create(settings, create_space(settings.fields))


def declaration(name: str | None) -> Declaration:
    """The declaration of a loss; for the unknown loss of a saved run, one without fields."""
    return OBJECTIVES.get(name or "", _UNKNOWN)


def _refuse(settings: LossSettings, space: Space) -> Objective:
    advice = "pass it to hypjax.train_and_evaluate, or register it by hypjax.register_objective"
    raise UserError(f"the objective {settings.fields['name']} is not registered; {advice}")


_UNKNOWN = Declaration(_refuse, {})


def softmax_temperature(fields: Values, scalars: Mapping[str, Any] | None = None) -> float:
    """The divisor of distances in the softmax of the loss that `config.objective` describes.

    `scalars` are learned values, which replace those of the fields. Raises a `UserError` if the
    objective has no softmax over an anchor's negatives.
    """
    divisors = {name: loss.divisor for name, loss in OBJECTIVES.items() if loss.divisor}
    name = fields["name"]
    if name not in divisors:
        raise UserError(f"{name} has no softmax over negatives; {', '.join(divisors)} have one")
    if "loss_weights" in fields and fields["loss_weights"]:
        raise UserError("with objective.loss_weights, each part of the space has its own softmax")
    return float(divisors[name]({**fields, **(scalars or {})}))


def register_objective(name: str, objective: Objective | Callable[..., Any]) -> None:
    """Registers a user-defined loss as a value of `objective.name`, in this process.

    The loss is an `Objective`, or a function that returns a scalar or (scalar, {name: scalar}). A
    function takes, by name, any of these arguments: `embeddings`, points [images, d] of the
    configuration's space; `labels`; `space`; `features`, the head's outputs before the space;
    `ids`, the images' numbers in the training set; `key`, a random key; and `samples_per_class`,
    None if images are not grouped by class. Other arguments with numbers, booleans or strings as
    defaults become fields of `config.objective`.

    A later registration under the same name replaces this one. Raises a `UserError` if the name
    belongs to hypjax, or the loss requires an unknown argument.
    """
    require_free("an objective", name, BUILT_IN)
    if isinstance(objective, Objective):
        loss_function(objective)  # Raises if it requires an unknown argument.
        OBJECTIVES[name] = Declaration(lambda settings, space: objective, {}, code=objective)
    elif callable(objective):
        OBJECTIVES[name] = _declare_function(f"the loss {name.removeprefix('own:')}", objective)
    else:
        raise UserError(f"{objective!r:.40} is not an objective; pass an Objective or a function")


def _declare_function(title: str, function: Callable[..., Any]) -> Declaration:
    """Declares a user-defined function, which messages call by its title."""
    names = accepted_arguments(title, function, OFFERED)
    rules = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if type(parameter.default) in (bool, int, float, str) and name not in OFFERED:
            rules[name] = ANY

    def build(loss: Callable[..., Any], settings: LossSettings, space: Space) -> FunctionObjective:
        return FunctionObjective(space, loss, title, names, settings.adjacent_samples)

    return declare(function, rules, build=build, shared={}, code=function)


@dataclasses.dataclass(frozen=True)
class FunctionObjective(Objective):
    """A user-defined function of a batch's embeddings, without parameters or state."""

    space: Space
    function: Callable[..., Any]  # The loss, with its settings.
    title: str  # Name of the function in messages.
    names: tuple[str, ...]  # The `OFFERED` arguments that the function takes.
    samples_per_class: int | None  # None if images are not grouped by class.

    def loss(self, outputs: Outputs, batch: Batch, key: PRNGKeyArray) -> tuple[Loss, Metrics]:
        """Computes the loss of a batch, and its metrics together with the function's."""
        features = outputs.projected
        points = self.space.embed(features)
        offered = points, batch.labels, self.space, features, batch.ids, key, self.samples_per_class
        arguments = dict(zip(OFFERED, offered, strict=True))
        result = self.function(**{name: arguments[name] for name in self.names})
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(metrics, Mapping) or any(map(jnp.ndim, (loss, *metrics.values()))):
            rule = "must return a scalar, or (scalar, {name: scalar})"
            raise UserError(f"{self.title} {rule}, not {jax.tree.map(jnp.shape, result)}")
        metrics = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
        common = batch_metrics(features, points, batch.labels, self.space, self.samples_per_class)
        return jnp.asarray(loss, jnp.float32), common | metrics
