"""Interface between objectives and the train step, and declarations for configurations."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hypjax.errors import UserError
from hypjax.fields import Field, Rule
from hypjax.geometry import Space
from hypjax.types import IMAGES, Outputs

Loss = Float[Array, ""]
Metrics = dict[str, Float[Array, ""]]
LossResult = tuple[Loss, tuple[PyTree, Metrics]]  # (loss, (state, metrics)).
LEARNED = "learned"  # Value of `Group.ball_c` for a learned curvature.
BallC = float | str | None
ObjectiveT = TypeVar("ObjectiveT", bound="Objective")  # Beartype rejects Self, see `SpaceT`.
LOSS_ARGUMENTS = ("params", "state", "outputs", "teacher", "batch", "key")


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What objectives read of a configuration."""

    fields: Mapping[str, Any]  # `config.objective`: the space, the loss and its settings.
    # Images of each class in a batch, if `grouped`; None until fitted to the images.
    samples_per_class: int | None
    grouped: bool  # Whether the images of a class are adjacent in batches.
    tuple_size: int  # Images of a tuple, if batches are made of tuples.
    boxed: bool = False  # Whether the second half of a batch are boxes of the first.

    @property
    def adjacent_samples(self) -> int | None:
        """Number of adjacent images of each class in batches; None if images are not grouped."""
        return self.samples_per_class if self.grouped else None


class ProblemSizes(NamedTuple):
    """Sizes of a run, for the parameters and state of its objective."""

    classes: int  # Number of training classes.
    samples_per_class: int  # Images of each class in a batch.
    encoder_dim: int  # Dimension of the encoder's embedding.
    head_dim: int  # Dimension of the head's output.
    training_images: int
    batch_size: int
    # Tuples in an epoch, and images in a tuple; zeros if batches are not made of tuples.
    tuples: tuple[int, int] = (0, 0)
    # The coarse class of each class, at each level, finest first; numbered from 0 without gaps.
    coarse_labels: tuple[tuple[int, ...], ...] = ()


class Group(NamedTuple):
    """Optimiser settings of a subtree of parameters; the longest matching path counts."""

    path: tuple[str, ...]  # Path of the subtree.
    rate: float = 1.0  # Factor of the learning rate.
    weight_decay: float | None = None  # None for the optimiser's.
    start: int = 0  # First step that changes the group; until then its moments accumulate.
    # If the parameters are points of a ball, its c; if they are tangent vectors at the origin of a
    # ball with learned c, `LEARNED`; otherwise None. `riemannian_adam` moves points and tangent
    # vectors, without gradient clipping and only with the group's own weight decay.
    ball_c: BallC = None


@dataclasses.dataclass(frozen=True)
class Landmarks:
    """Trained points that belong to no class: pictures show them, and released files hold them."""

    name: str  # Their entry in the objective's parameters.
    count: int
    # Converts features [count, head_dim] to parameters, and these to points of the `score_space`.
    parameters: Callable[[Float[Array, "p dim"]], Float[Array, "p dim"]]
    points: Callable[[Float[Array, "p dim"]], Float[Array, "p coordinates"]]


@runtime_checkable
class Objective(Protocol):
    """A loss with its parameters and state, as a pair of pure functions.

    Attributes:
        space: Space in which the loss measures distances.
        score_space: Space in which evaluation compares the head's outputs; by default `space`.
        groups: Optimiser settings of subtrees, instead of the settings of the whole objective.
        lasting_state: Names of state entries that change even if a step's update is dropped:
            keeping their old values would copy them.
        teacher_decay: Decay of the teacher, a moving average of the model's parameters: teacher ←
            decay · teacher + (1 − decay) · parameters, after each update. None without a teacher.
        landmarks: Trained points that belong to no class; None without any.
        towers: Names of the towers whose outputs the loss compares.
    """

    space: Space
    groups: Sequence[Group] = ()
    lasting_state: Sequence[str] = ()
    teacher_decay: float | None = None
    landmarks: Landmarks | None = None
    towers: Sequence[str] = (IMAGES,)

    @property
    def score_space(self) -> Space:  # noqa: D102
        return self.space

    def with_scalars(self: ObjectiveT, scalars: Mapping[str, Any]) -> ObjectiveT:
        """Replaces scalars by values, which may be traced; ignores unknown names.

        Scalars are fields of the dataclass, arguments of partial functions in its fields, and
        fields of its spaces (`Space.with_scalars`).
        """
        if not scalars or not dataclasses.is_dataclass(self):
            return self
        names = [field.name for field in dataclasses.fields(self) if field.init]
        changed = {name: _with_scalars(name, getattr(self, name), scalars) for name in names}
        return dataclasses.replace(self, **changed)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[PyTree, PyTree]:
        """Returns a tree of trained parameters and a tree of state, by default empty."""
        del key, spec
        return {}, {}

    def loss(self, *values: Any, **named: Any) -> tuple[Loss, Any]:
        """Computes the loss of a whole batch.

        An implementation takes, by name, the arguments that it needs:

        - `params` and `state`: the objective's parameters and state,
        - `outputs`: the `Outputs` of the loss's tower for the batch, float32; if the loss compares
          several `towers`, a dict of theirs by name,
        - `teacher`: its outputs before the step, without a gradient; None without a teacher,
        - `batch`: the `Batch`, whose labels and ids a loss may read,
        - `key`: the random key of the step, a function of the run's seed and the step.

        Returns (loss, metrics): a float32 scalar, and a dict of float32 scalars. An implementation
        that takes `state` returns (loss, (state, metrics)), with the next state.
        """


def _with_scalars(name: str, value: Any, scalars: Mapping[str, Any]) -> Any:
    if isinstance(value, Space):
        return value.with_scalars(scalars)
    if isinstance(value, functools.partial):
        changed = {key: scalars[key] for key in value.keywords.keys() & scalars.keys()}
        return functools.partial(value, **changed) if changed else value
    return scalars.get(name, value)


Create = Callable[[LossSettings, Space], Objective]


def setting(*arguments: Any, **options: Any) -> Any:
    """Declares a field of an `Extension` that configurations set, by the arguments of `Field`."""
    return dataclasses.field(metadata={"declared": Field(*arguments, **options)})


@dataclasses.dataclass(frozen=True)
class Extension(Objective):
    """An objective that extends a `base` objective, whose parameters are params["base"].

    By default, it has the base's spaces, state and teacher.
    """

    prefix: ClassVar[str] = ""  # Prefix of the settings' names in configurations.
    one_ball: ClassVar[bool] = False  # See `Declaration`.
    base: Objective

    def __post_init__(self) -> None:
        """Raises a `UserError` if the base compares several towers."""
        if len(self.base.towers) > 1:
            towers = " and ".join(self.base.towers)
            raise UserError(f"{type(self).__name__} extends a loss of one tower, not of {towers}")

    @classmethod
    def declared(cls) -> dict[str, Field]:
        """The fields declared by `setting`, by their names in configurations."""
        fields = {cls.prefix + field.name: field.metadata for field in dataclasses.fields(cls)}
        return {name: data["declared"] for name, data in fields.items() if "declared" in data}

    @classmethod
    def configured(cls, settings: LossSettings) -> dict[str, Any]:
        """A run's values of the fields declared by `setting`."""
        return {name.removeprefix(cls.prefix): settings.fields[name] for name in cls.declared()}

    @classmethod
    def create(cls, create_base: Create, settings: LossSettings, space: Space) -> "Extension":
        """Builds a run's objective and its base."""
        return cls(create_base(settings, space), **cls.configured(settings))

    space = property(lambda self: self.base.space)
    score_space = property(lambda self: self.base.score_space)
    lasting_state = property(lambda self: self.base.lasting_state)
    teacher_decay = property(lambda self: self.base.teacher_decay)
    towers = property(lambda self: self.base.towers)  # One.

    @property
    def groups(self) -> Sequence[Group]:  # type: ignore[override]
        """The base's groups."""
        return tuple(group._replace(path=("base", *group.path)) for group in self.base.groups)

    def with_scalars(self, scalars: Mapping[str, Any]) -> "Extension":
        """Replaces the base's scalars."""
        return dataclasses.replace(self, base=self.base.with_scalars(scalars))

    def base_loss(self, **values: Any) -> LossResult:
        """Computes the base's (loss, (state, metrics)) from all `LOSS_ARGUMENTS`."""
        return loss_function(self.base)(*(values[name] for name in LOSS_ARGUMENTS))


def loss_function(objective: Objective) -> Callable[..., LossResult]:
    """Wraps `objective.loss` as a function from all `LOSS_ARGUMENTS` to (loss, (state, metrics)).

    Raises a `UserError` if `objective.loss` requires any other argument.
    """
    names = accepted_arguments(f"{type(objective).__name__}.loss", objective.loss, LOSS_ARGUMENTS)

    def loss(*values: Any) -> LossResult:
        arguments = dict(zip(LOSS_ARGUMENTS, values, strict=True))
        value, aux = objective.loss(**{name: arguments[name] for name in names})
        return value, aux if "state" in names else (arguments["state"], aux)

    return loss


def compared(
    objective: Objective, outputs: Mapping[str, Outputs] | None
) -> Outputs | dict[str, Outputs] | None:
    """What an objective takes of the outputs of all towers, see `Objective.loss`."""
    if outputs is None:
        return None
    chosen = {name: outputs[name] for name in objective.towers}
    return chosen if len(chosen) > 1 else chosen[objective.towers[0]]


def accepted_arguments(
    title: str, function: Callable[..., Any], offered: Sequence[str]
) -> tuple[str, ...]:
    """Names of the offered arguments that a function accepts; with **kwargs, all of them.

    Raises a `UserError`, which names the function by its title, if it requires any other argument.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(offered)
    for parameter in parameters:
        if parameter.name not in offered and parameter.default is parameter.empty:
            rule = f"arguments without a default may be {', '.join(offered)}"
            raise UserError(f"{title} requires {parameter.name}; {rule}")
    return tuple(parameter.name for parameter in parameters if parameter.name in offered)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """How configurations build a loss, whose name is its key in `hypjax.objectives.OBJECTIVES`."""

    create: Create  # Builds the objective from a run's settings and its space.
    fields: dict[str, Field]  # Fields that the loss adds to `config.objective`.
    by_class: bool = False  # Whether the loss needs several images of each class in a batch.
    by_tuple: bool = False  # Whether the loss needs batches of tuples.
    spaces: tuple[str, ...] = ()  # Values of `objective.space` that the loss allows; () for all.
    one_ball: bool = False  # Whether the loss needs a space with a single curvature.
    # Returns, from the fields, the divisor of distances in the softmax over an anchor's negatives;
    # None for a loss without this softmax.
    divisor: Callable[[Mapping[str, Any]], float] | None = None
    function: Callable[..., Any] | None = None  # The loss of embeddings and labels, if any.
    reference: str = ""  # The paper, for the manual's table; '' if the function cites it.
    variant: str = ""  # Shorter name in the variants of configuration files, if any.
    code: Any = None  # The user's function or `Objective`; None for a loss of hypjax.


def declare(
    function: Callable[..., Any],
    rules: Mapping[str, Rule],
    *,
    build: Callable[[Callable[..., Any], LossSettings, Space], Objective],
    shared: Mapping[str, Field],
    learnable: Sequence[str] = (),
    **attributes: Any,
) -> Declaration:
    """Declares a loss function; its arguments named in `rules` become fields of `config.objective`.

    `build` makes the objective from the function with these arguments, a run's settings and its
    space. `shared` are further fields, and `attributes` other parts of the `Declaration`.
    """
    parameters = inspect.signature(function).parameters
    fields = {n: Field(parameters[n].default, rule, n in learnable) for n, rule in rules.items()}

    def create(settings: LossSettings, space: Space) -> Objective:
        loss = functools.partial(function, **{name: settings.fields[name] for name in fields})
        return build(loss, settings, space)

    return Declaration(create, {**fields, **shared}, function=function, **attributes)
