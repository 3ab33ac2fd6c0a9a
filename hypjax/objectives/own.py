"""Objectives of the user's: functions, and names that configurations then accept."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError, require_free
from hypjax.fields import Field, Rule
from hypjax.geometry import Space
from hypjax.objectives.base import GROUPED, Metrics, Objective, Spec, loss_function, requested
from hypjax.objectives.comparisons import batch_metrics
from hypjax.objectives.create import OBJECTIVES, Entry
from hypjax.types import Batch, Outputs

BUILT_IN = frozenset(OBJECTIVES)
_ANY = Rule(lambda value: True, "a value")  # Of the default's type, as of every field.
# What a function may take by name.
OFFERED = ("embeddings", "labels", "space", "features", "ids", "key", "samples_per_class")


def register_objective(
    name: str,
    objective: Objective | Callable[..., Any],
    *,
    fields: Mapping[str, Field] | None = None,
    by_class: bool = False,
) -> None:
    """Makes a loss of one's own a value of `objective.name`, in this process.

    Args:
        name: The name, which is not one of hypjax's own. A later registration replaces it.
        objective: One of

            - a function, which takes by name what it needs of `embeddings`, points [images, d] of
              the configuration's space, `labels`, `space`, `features`, what the head returned
              before the space, `ids`, numbers of the images in the training set, `key`, a random
              key, and `samples_per_class`, None if batches hold any classes; it returns a scalar,
              or (scalar, {name: scalar}). Further arguments whose defaults are numbers, truth
              values or strings become fields of `config.objective`;
            - an `Objective`;
            - with `fields`, a function of a run's configuration and space that returns one.
        fields: Fields that it adds to `config.objective`.
        by_class: Whether it needs several images of each class in a batch.

    Raises:
        UserError: The name is taken, or the function requires something else.
    """
    require_free("an objective", name, BUILT_IN)
    if fields is not None:
        entry = Entry(objective, fields, by_class, code=objective)
    elif isinstance(objective, Objective):
        loss_function(objective)  # Raises if it requires something unknown.
        entry = Entry(lambda config, space: objective, {}, by_class, code=objective)
    elif callable(objective):
        entry = _entry_of(name, objective, by_class)._replace(code=objective)
    else:
        raise UserError(
            f"{type(objective).__name__} is no objective; give an Objective or a function of "
            "embeddings and labels"
        )
    OBJECTIVES[name] = entry


def _entry_of(name: str, function: Callable[..., Any], by_class: bool) -> Entry:
    """The entry of a function of embeddings."""
    title = f"the loss {name.removeprefix('own:')}"
    names = requested(title, function, OFFERED)
    settings = {
        each.name: Field(each.default, _ANY)
        for each in inspect.signature(function).parameters.values()
        if each.name not in OFFERED and type(each.default) in (bool, int, float, str)
    }

    def create(config: ConfigDict, space: Space) -> FunctionObjective:
        fields = {field: config.objective[field] for field in settings}
        adjacent = config.train.sampling in GROUPED
        return FunctionObjective(
            *(space, functools.partial(function, **fields), title, names),
            samples_per_class=config.train.samples_per_class if adjacent else None,
        )

    return Entry(create, settings, by_class)


@dataclasses.dataclass(frozen=True)
class FunctionObjective(Objective):
    """A function of the embeddings of a batch, without parameters or state.

    Attributes:
        space: Space in which the head's output is embedded, trained and scored.
        function: The loss, with its settings.
        title: What messages call it.
        names: Those of `OFFERED` that it takes.
        samples_per_class: Images of each class in a batch; None if batches hold any classes.
    """

    space: Space
    function: Callable[..., Any]
    title: str
    names: tuple[str, ...]
    samples_per_class: int | None

    def loss(
        self, outputs: Outputs, batch: Batch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """Loss of a batch, and the curves of all losses beside the function's own."""
        features, labels = outputs.projected, batch.labels
        points = self.space.embed(features)
        offered = {"embeddings": points, "labels": labels, "space": self.space, "key": key}
        offered |= {"features": features, "ids": batch.ids}
        offered |= {"samples_per_class": self.samples_per_class}
        found = self.function(**{name: offered[name] for name in self.names})
        loss, own = found if isinstance(found, tuple) else (found, {})
        if not isinstance(own, Mapping) or any(map(jnp.ndim, (loss, *own.values()))):
            raise UserError(
                f"{self.title} returns {jax.tree.map(jnp.shape, found)}; it must return a scalar, "
                "or a scalar and scalars by name"
            )
        own = {name: jnp.asarray(value, jnp.float32) for name, value in own.items()}
        told = batch_metrics(features, points, labels, self.space, self.samples_per_class)
        return jnp.asarray(loss, jnp.float32), told | own


@dataclasses.dataclass(frozen=True)
class Unregistered(Objective):
    """Stands for an objective whose code this process lacks."""

    name: str

    @property
    def space(self) -> Space:
        """That of the scores was saved with the run, see `scored_space`; another is not known."""
        raise self._unknown()

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[PyTree, PyTree]:
        """Refuses to train."""
        raise self._unknown()

    def _unknown(self) -> UserError:
        return UserError(
            f"the objective {self.name} is not known in this process, which can embed and search "
            "with the model, but not train it; pass it to hypjax.train, or register it by "
            "hypjax.register_objective"
        )


@dataclasses.dataclass(frozen=True)
class _StandIn:
    """Creates the `Unregistered` objective of a name."""

    name: str

    def __call__(self, config: ConfigDict, space: Space) -> Unregistered:
        return Unregistered(self.name)


def stand_in(name: str, fields: Mapping[str, Any]) -> None:
    """Registers what stands for an objective that a saved run names, with fields of any values."""
    fields = {own: Field(value, _ANY) for own, value in fields.items()}
    OBJECTIVES[name] = Entry(_StandIn(name), fields, by_class=False)


def is_known(name: object) -> bool:
    """Whether a name is that of an objective with its code."""
    return name in list(OBJECTIVES) and not isinstance(OBJECTIVES[name].create, _StandIn)
