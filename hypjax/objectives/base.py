"""The interface between objectives and the train step."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import Field, Rule
from hypjax.geometry import Space
from hypjax.types import Batch, Outputs

Metrics = dict[str, Float[Array, ""]]
# Samplings, among the values of `train.sampling`, whose batches are made of classes.
GROUPED = ("epoch_classes", "drawn_classes")


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
    # Of each class, from 0 without gaps; empty if there are none.
    coarse_labels: tuple[int, ...] = ()


class Group(NamedTuple):
    """How a group of parameters is trained, apart from the general settings.

    A parameter belongs to the group with the longest path that leads to it.
    """

    path: tuple[str, ...]  # Of its subtree within the parameters.
    rate: float = 1.0  # Factor of the learning rate.
    weight_decay: float | None = None  # None for the general one.
    start: int = 0  # Step from which it changes; until then its moments accumulate.
    # If they are points of the ball of this c: `riemannian_adam` moves them then, without weight
    # decay, and their gradients are not clipped.
    ball_c: float | None = None


@runtime_checkable
class Objective(Protocol):
    """A loss with its parameters and state, as a pair of pure functions.

    Attributes:
        space: Space in which the loss measures distances.
        score_space: Space in which evaluation compares the head's outputs. In an objective that
            inherits from this class, it is by default the one where the head is trained.
        groups: Groups of the objective's parameters that are trained in a way of their own, with
            paths within these parameters. They are no part of the group `objective` that the fields
            of `config.optim` set.
        lasting_state: Names of the entries of its state that a step changes even if its update is
            dropped, since to choose between old and new would copy them.
        teacher_decay: Decay of the teacher, an exponential moving average of the model's
            parameters: teacher ← decay · teacher + (1 − decay) · parameters after each update. None
            if the loss needs no teacher, which then is not kept.
    """

    space: Space
    groups: Sequence[Group] = ()
    lasting_state: Sequence[str] = ()
    teacher_decay: float | None = None

    @property
    def score_space(self) -> Space:  # noqa: D102
        return self.space

    def with_scalars(self, scalars: Mapping[str, Any]) -> Self:
        """The objective with new values, perhaps traced, of its scalars and of its spaces'.

        By default, scalars are fields of the dataclass, arguments of partial functions in its
        fields, and fields of its spaces (`Space.with_scalars`). Other names are ignored.
        """
        if not scalars or not dataclasses.is_dataclass(self):
            return self
        names = [field.name for field in dataclasses.fields(self) if field.init]
        changed = {name: _with_scalars(name, getattr(self, name), scalars) for name in names}
        return dataclasses.replace(self, **changed)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[PyTree, PyTree]:
        """Returns parameters and state, trees of arrays; by default there are none.

        The optimiser trains the parameters; the state is only passed from step to step.
        """
        del key, spec
        return {}, {}

    def loss(self, **values: Any) -> tuple[Float[Array, ""], Any]:
        """Loss of a whole batch.

        A method names the arguments that it needs, and gets no others:

        - `params` and `state`: the parameters of the objective, and its state,
        - `outputs`: the model's `Outputs` for the images of the batch, float32,
        - `teacher`: the same of the teacher as it was before the step, without a gradient; None if
          `teacher_decay` is None,
        - `batch`: the `Batch`, of which a loss may read labels and ids,
        - `key`: the random key of the step, a function of the run's seed and the step.

        It returns (loss, metrics): a float32 scalar, and float32 scalars by name. One that names
        `state` returns (loss, (state, metrics)), with the next state.
        """


def _with_scalars(name: str, value: Any, scalars: Mapping[str, Any]) -> Any:
    """A field with new values of its scalars."""
    if isinstance(value, Space):
        return value.with_scalars(scalars)
    if isinstance(value, functools.partial):
        changed = {key: scalars[key] for key in value.keywords.keys() & scalars.keys()}
        return functools.partial(value, **changed) if changed else value
    return scalars.get(name, value)


@dataclasses.dataclass(frozen=True)
class Extension(Objective):
    """An objective that adds to another one, whose parameters are params["base"].

    Spaces, groups, state and teacher are by default the base's.
    """

    base: Objective

    space = property(lambda self: self.base.space)
    score_space = property(lambda self: self.base.score_space)
    lasting_state = property(lambda self: self.base.lasting_state)
    teacher_decay = property(lambda self: self.base.teacher_decay)

    @property
    def groups(self) -> Sequence[Group]:
        """Groups of the other objective."""
        return tuple(each._replace(path=("base", *each.path)) for each in self.base.groups)

    def with_scalars(self, scalars: Mapping[str, Any]) -> Self:
        """Replaces the scalars of the base."""
        return dataclasses.replace(self, base=self.base.with_scalars(scalars))

    def base_loss(self, **values: Any) -> tuple[Float[Array, ""], tuple[PyTree, Metrics]]:
        """The other objective's (loss, (state, metrics)), from all `ARGUMENTS`."""
        return loss_function(self.base)(*(values[name] for name in ARGUMENTS))


ARGUMENTS = ("params", "state", "outputs", "teacher", "batch", "key")  # Of `Objective.loss`.
Loss = Callable[
    [PyTree, PyTree, Outputs, Outputs | None, Batch, PRNGKeyArray],
    tuple[Float[Array, ""], tuple[PyTree, Metrics]],
]


def loss_function(objective: Objective) -> Loss:
    """The loss of an objective as a function of all `ARGUMENTS`, in their order.

    It passes on those that `objective.loss` names, and returns (loss, (state, metrics)). A method
    that requires something else is a `UserError`.
    """
    names = requested(f"{type(objective).__name__}.loss", objective.loss, ARGUMENTS)

    def loss(*values: Any) -> tuple[Float[Array, ""], tuple[PyTree, Metrics]]:
        arguments = dict(zip(ARGUMENTS, values, strict=True))
        value, rest = objective.loss(**{name: arguments[name] for name in names})
        return value, rest if "state" in names else (arguments["state"], rest)

    return loss


def requested(title: str, function: Callable[..., Any], offered: Sequence[str]) -> tuple[str, ...]:
    """Names of the offered arguments that a function takes; all of them for **kwargs.

    Other arguments keep their defaults. An argument without a default is a `UserError`, which names
    the function by the title.
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

    # From a run's whole configuration and its space.
    create: Callable[[ConfigDict, Space], Objective]
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
    """Declares a loss that is a function, whose arguments with rules are fields.

    `build` makes the objective from the function with its settings, a run's configuration and its
    space; `shared` are fields of all losses of this kind; for `facts` see `Declaration`.
    """
    defaults = inspect.signature(function).parameters
    own = {n: Field(defaults[n].default, rule, n in learnable) for n, rule in rules.items()}

    def create(config: ConfigDict, space: Space) -> Objective:
        loss = functools.partial(function, **{name: config.objective[name] for name in own})
        return build(loss, config, space)

    return Declaration(create, {**own, **shared}, function=function, **facts)


def adjacent_samples(config: ConfigDict) -> int | None:
    """Images of each class in a run's batches; None if batches hold any classes."""
    return config.train.samples_per_class if config.train.sampling in GROUPED else None
