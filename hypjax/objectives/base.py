"""The interface between objectives and the train step."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import Field, Rule
from hypjax.geometry import Space
from hypjax.types import Batch, Outputs

Loss = Float[Array, ""]
Metrics = dict[str, Float[Array, ""]]
# Samplings, among the values of `train.sampling`, whose batches are made of classes.
GROUPED = ("epoch_classes", "drawn_classes", "coarse_pairs")
LEARNED = "learned"  # In place of a number that is learned.


class ProblemSizes(NamedTuple):
    """Sizes that an objective may need for its parameters and state."""

    classes: int  # Number of training classes.
    samples_per_class: int  # Images of each class in a batch.
    encoder_dim: int  # Dimension of the encoder's embedding.
    head_dim: int  # Dimension of the head's output.
    training_images: int
    batch_size: int
    # Tuples of an epoch and images of each; zeros if batches are not made of tuples.
    tuples: tuple[int, int] = (0, 0)
    # Of classes at each level of coarse classes, finest first, from 0 without gaps.
    coarse_labels: tuple[tuple[int, ...], ...] = ()


class Group(NamedTuple):
    """Settings for a group of parameters; the longest path to a parameter decides its group."""

    path: tuple[str, ...]  # Of its subtree within the parameters.
    rate: float = 1.0  # Factor of the learning rate.
    weight_decay: float | None = None  # None for the general one.
    start: int = 0  # Step from which it changes; until then its moments accumulate.
    # For points of the ball of this c, or tangent vectors at its origin if c is `LEARNED`:
    # `riemannian_adam` moves them, without clipping, and only the group's own decay acts.
    ball_c: float | str | None = None


@runtime_checkable
class Objective(Protocol):
    """A loss with its parameters and state, as a pair of pure functions.

    Attributes:
        space: Space in which the loss measures distances.
        score_space: Space in which evaluation compares the head's outputs; by default `space`.
        groups: Groups of the objective's parameters with settings different from those of the group
            `objective`, with paths within these parameters.
        lasting_state: Names of state entries that change even if a step's update is dropped, since
            choosing between old and new would copy them.
        teacher_decay: Decay of the teacher, an exponential moving average of the model's
            parameters: teacher ← decay · teacher + (1 − decay) · parameters after each update. None
            for a loss without a teacher.
    """

    space: Space
    groups: Sequence[Group] = ()
    lasting_state: Sequence[str] = ()
    teacher_decay: float | None = None

    @property
    def score_space(self) -> Space:  # noqa: D102
        return self.space

    def with_scalars(self, scalars: Mapping[str, Any]) -> Self:
        """Replaces scalars, perhaps by traced values; unknown names are ignored.

        By default, scalars are fields of the dataclass, arguments of partial functions in its
        fields, and fields of its spaces (`Space.with_scalars`).
        """
        if not scalars or not dataclasses.is_dataclass(self):
            return self
        names = [field.name for field in dataclasses.fields(self) if field.init]
        changed = {name: _with_scalars(name, getattr(self, name), scalars) for name in names}
        return dataclasses.replace(self, **changed)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[PyTree, PyTree]:
        """Returns trees of parameters, which are trained, and of state; empty by default."""
        del key, spec
        return {}, {}

    def loss(self, **values: Any) -> tuple[Loss, Any]:
        """Loss of a whole batch.

        A method names the arguments that it needs:

        - `params` and `state`: the objective's parameters and state,
        - `outputs`: the model's `Outputs` for the images of the batch, float32,
        - `teacher`: the teacher's outputs before the step, without a gradient; None if
          `teacher_decay` is None,
        - `batch`: the `Batch`, of which a loss may read labels and ids,
        - `key`: the random key of the step, a function of the run's seed and the step.

        It returns (loss, metrics): a float32 scalar, and float32 scalars by name. A method that
        names `state` returns (loss, (state, metrics)), with the next state.
        """


def _with_scalars(name: str, value: Any, scalars: Mapping[str, Any]) -> Any:
    if isinstance(value, Space):
        return value.with_scalars(scalars)
    if isinstance(value, functools.partial):
        changed = {key: scalars[key] for key in value.keywords.keys() & scalars.keys()}
        return functools.partial(value, **changed) if changed else value
    return scalars.get(name, value)


Create = Callable[[ConfigDict, Space], Objective]


def setting(*arguments: Any, **options: Any) -> Any:
    """A field of an extension that configurations have, too, as a `Field` of the arguments."""
    return dataclasses.field(metadata={"declared": Field(*arguments, **options)})


@dataclasses.dataclass(frozen=True)
class Extension(Objective):
    """An objective that extends `base`, with its spaces, state and teacher by default.

    The base's parameters are params["base"].
    """

    prefix: ClassVar[str] = ""  # Of the settings' names in configurations.
    base: Objective

    @classmethod
    def declared(cls) -> dict[str, Field]:
        """The settings, by their names in configurations."""
        fields = {cls.prefix + field.name: field.metadata for field in dataclasses.fields(cls)}
        return {name: data["declared"] for name, data in fields.items() if "declared" in data}

    @classmethod
    def create(cls, create_base: Create, config: ConfigDict, space: Space, **others: Any) -> Self:
        """Builds a run's objective; `create_base` builds the base."""
        values = {name.removeprefix(cls.prefix): config.objective[name] for name in cls.declared()}
        return cls(base=create_base(config, space), **values, **others)

    space = property(lambda self: self.base.space)
    score_space = property(lambda self: self.base.score_space)
    lasting_state = property(lambda self: self.base.lasting_state)
    teacher_decay = property(lambda self: self.base.teacher_decay)

    @property
    def groups(self) -> Sequence[Group]:
        """Groups of the base."""
        return tuple(group._replace(path=("base", *group.path)) for group in self.base.groups)

    def with_scalars(self, scalars: Mapping[str, Any]) -> Self:
        """Replaces the scalars of the base."""
        return dataclasses.replace(self, base=self.base.with_scalars(scalars))

    def base_loss(self, **values: Any) -> tuple[Loss, tuple[PyTree, Metrics]]:
        """The base's (loss, (state, metrics)), from all `ARGUMENTS`."""
        return loss_function(self.base)(*(values[name] for name in ARGUMENTS))


ARGUMENTS = ("params", "state", "outputs", "teacher", "batch", "key")  # Of `Objective.loss`.
LossFunction = Callable[
    [PyTree, PyTree, Outputs, Outputs | None, Batch, PRNGKeyArray],
    tuple[Loss, tuple[PyTree, Metrics]],
]


def loss_function(objective: Objective) -> LossFunction:
    """Wraps `objective.loss` as a function from all `ARGUMENTS` to (loss, (state, metrics)).

    A method that requires other arguments is a `UserError`.
    """
    names = requested(f"{type(objective).__name__}.loss", objective.loss, ARGUMENTS)

    def loss(*values: Any) -> tuple[Loss, tuple[PyTree, Metrics]]:
        arguments = dict(zip(ARGUMENTS, values, strict=True))
        value, rest = objective.loss(**{name: arguments[name] for name in names})
        return value, rest if "state" in names else (arguments["state"], rest)

    return loss


def requested(title: str, function: Callable[..., Any], offered: Sequence[str]) -> tuple[str, ...]:
    """Names of the offered arguments that a function takes; all of them for **kwargs.

    Another argument without a default is a `UserError`, which calls the function by its title.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(offered)
    for parameter in parameters:
        if parameter.name not in offered and parameter.default is parameter.empty:
            raise UserError(
                f"{title} requires {parameter.name}; arguments without a default may be "
                + ", ".join(offered)
            )
    return tuple(parameter.name for parameter in parameters if parameter.name in offered)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A loss as configurations know it, by its name in `hypjax.objectives.OBJECTIVES`."""

    create: Create  # From a run's whole configuration and its space.
    fields: Mapping[str, Field]  # That the loss adds to `config.objective`.
    by_class: bool = False  # Whether it needs several images of each class in a batch.
    by_tuple: bool = False  # Whether it needs batches of tuples.
    spaces: tuple[str, ...] = ()  # Values of `objective.space` that it allows; () for all.
    # From the fields, what divides distances in its softmax over the negatives of an anchor; None
    # for a loss without one.
    divisor: Callable[[Mapping[str, Any]], float] | None = None
    function: Callable[..., Any] | None = None  # Of embeddings and labels, if there is one.
    reference: str = ""  # The paper, for the manual's table; '': see the function.
    variant: str = ""  # Its name in variants of configuration files; '' if that is its own.
    code: Any = None  # The user's function or `Objective`; None for hypjax's own.


def declare(
    function: Callable[..., Any],
    rules: Mapping[str, Rule],
    *,
    build: Callable[[Callable[..., Any], ConfigDict, Space], Objective],
    shared: Mapping[str, Field],
    learnable: Sequence[str] = (),
    **facts: Any,
) -> Declaration:
    """Declares a loss function; its arguments named in `rules` become fields of `config.objective`.

    `build` makes the objective from the function with its settings, a run's configuration and its
    space; `shared` are fields of all losses of this kind; for `facts` see `Declaration`.
    """
    defaults = inspect.signature(function).parameters
    fields = {n: Field(defaults[n].default, rule, n in learnable) for n, rule in rules.items()}

    def create(config: ConfigDict, space: Space) -> Objective:
        loss = functools.partial(function, **{name: config.objective[name] for name in fields})
        return build(loss, config, space)

    return Declaration(create, {**fields, **shared}, function=function, **facts)


def adjacent_samples(config: ConfigDict) -> int | None:
    """Images of each class in a run's batches; None if batches hold any classes."""
    return config.train.samples_per_class if config.train.sampling in GROUPED else None
