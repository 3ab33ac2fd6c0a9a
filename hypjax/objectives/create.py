"""The registry of objectives, to which users add theirs, and the choice of a configuration."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.errors import UserError, require_free
from hypjax.fields import Field, Rule
from hypjax.geometry import SPACES, Fused, Space
from hypjax.geometry.learned import has_curvature
from hypjax.objectives import matryoshka, pair_losses, pairwise, proxy_losses
from hypjax.objectives.base import GROUPED, Metrics, Objective, loss_function, requested
from hypjax.objectives.comparisons import batch_metrics
from hypjax.objectives.cones import CONE_FIELDS, create_cones
from hypjax.objectives.hier import HIER_FIELDS, create_hier
from hypjax.types import Batch, Outputs


class Entry(NamedTuple):
    """An objective that configurations can name."""

    # From a run's configuration and its space; None for a user's, whose code this process lacks.
    create: Callable[[ConfigDict, Space], Objective] | None
    fields: Mapping[str, Field]  # Which it adds to `config.objective`.
    by_class: bool  # Whether it needs several images of each class in a batch.
    by_tuple: bool = False  # Whether it needs batches of tuples.
    code: Any = None  # The user's function or `Objective`; None for hypjax's own.


@dataclasses.dataclass(frozen=True)
class SavedObjective(Objective):
    """The space in which a run with a loss of the user's is scored; the code may be unknown."""

    space: Space


_LOSSES = {
    "pairwise_cross_entropy": Entry(pairwise.create, pairwise.FIELDS, by_class=True),
    "hypmix": Entry(pairwise.create_hypmix, pairwise.HYPMIX_FIELDS, by_class=True),
    **pair_losses.PAIR_LOSSES,
    **proxy_losses.PROXY_LOSSES,
}
_ANGULAR = {name for name, loss in proxy_losses.PROXY_LOSSES.items() if loss.angular}


def _extended(
    prefix: str, create: Callable[..., Objective], fields: Mapping[str, Field], *without: str
) -> dict[str, Entry]:
    """Objectives that extend each loss, by their names; some losses cannot be extended."""
    return {
        prefix + name: Entry(
            functools.partial(create, base.create),
            {**base.fields, **fields},
            base.by_class,
            base.by_tuple,
        )
        for name, base in _LOSSES.items()
        if name not in without
    }


# Neither HIER nor cones exist with tuples or in HypMix's space, and cones not with angular margins.
_OTHERS = ("hypmix", *(name for name, loss in _LOSSES.items() if loss.by_tuple))
OBJECTIVES = {
    **_LOSSES,
    **_extended("hier+", create_hier, HIER_FIELDS, *_OTHERS),
    **_extended(matryoshka.PREFIX, matryoshka.create_matryoshka, matryoshka.FIELDS),
    **_extended("cones+", create_cones, CONE_FIELDS, *_OTHERS, *_ANGULAR),
}
BUILT_IN = frozenset(OBJECTIVES)
_ANY = Rule(lambda value: True, "a value")  # Of the default's type, as of every field.
# What a function may take by name.
OFFERED = ("embeddings", "labels", "space", "features", "ids", "key", "samples_per_class")


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

    Its learned numbers are those before training, see `Objective.with_scalars`.
    """
    name = config.objective.name
    if OBJECTIVES[name].create is None:
        raise UserError(
            f"the objective {name} is not known in this process, which can embed and search with "
            "the model, but not train it; pass it to hypjax.train, or register it by "
            "hypjax.register_objective"
        )
    return OBJECTIVES[name].create(config, create_space(config.objective))


# By what a loss divides distances in its softmax; HypMix's space holds its temperatures.
_DIVISORS = {
    "pairwise_cross_entropy": lambda fields: fields["temperature"],
    "hypmix": lambda fields: 1.0,
    "supcon": lambda fields: 2 * fields["temperature"],
    "scalable_nca": lambda fields: 2 * fields["temperature"],
}


def softmax_temperature(config: ConfigDict, scalars: Mapping[str, Any] | None = None) -> float:
    """The number that divides distances in the softmax of a run's objective.

    Learned scalars, by name, replace those of the configuration.

    Raises:
        UserError: The objective has no softmax over the negatives of an anchor.
    """
    name = config.objective.name
    if name not in _DIVISORS:
        raise UserError(
            f"the objective {name} has no softmax over the negatives of an anchor; "
            f"{', '.join(_DIVISORS)} have one"
        )
    return float(_DIVISORS[name]({**config.objective, **(scalars or {})}))


def register_objective(name: str, objective: Objective | Callable[..., Any]) -> None:
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
            - an `Objective`.

    Raises:
        UserError: The name is taken, or the function requires something else.
    """
    require_free("an objective", name, BUILT_IN)
    if isinstance(objective, Objective):
        loss_function(objective)  # Raises if it requires something unknown.
        entry = Entry(lambda config, space: objective, {}, by_class=False, code=objective)
    elif callable(objective):
        entry = _entry_of(name, objective)
    else:
        raise UserError(
            f"{type(objective).__name__} is no objective; give an Objective or a function of "
            "embeddings and labels"
        )
    OBJECTIVES[name] = entry


def _entry_of(name: str, function: Callable[..., Any]) -> Entry:
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

    return Entry(create, settings, by_class=False, code=function)


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


def stand_in(name: str, fields: Mapping[str, Any]) -> None:
    """Registers an objective of a saved run whose code is unknown, with fields of any values."""
    OBJECTIVES[name] = Entry(
        None, {own: Field(value, _ANY) for own, value in fields.items()}, by_class=False
    )


def is_known(name: object) -> bool:
    """Whether a name is that of an objective with its code."""
    return name in list(OBJECTIVES) and OBJECTIVES[name].create is not None
