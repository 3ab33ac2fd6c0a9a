"""The optimiser: parameter groups, learning rates and frozen parameters."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from hypjax.config.choices import (
    GROUPS,
    OPTIMIZERS,
    in_some_encoder,
    matches,
    parameter_path,
)
from hypjax.fields import Values
from hypjax.geometry.arithmetic import AnyArray
from hypjax.objectives import Group
from hypjax.training.riemannian import riemannian_adam

_STATISTICS = "statistics"  # A BatchNorm's running statistics, which are never trained.
ADAPTER = "lora"  # Name of a kernel's adapter, see `hypjax.training.lora`.
_Path = tuple[str, ...]


def in_encoder(path: Sequence[str]) -> bool:
    """Whether a path leads to a parameter of the encoder of images."""
    return matches(GROUPS["encoder"], path)


def split_frozen(params: PyTree, frozen: Collection[str]) -> tuple[PyTree, PyTree]:
    """Splits parameters into (trained, frozen) trees, which `merge` joins again.

    Gradients are taken with respect to the trained tree, so frozen parameters cost no time and do
    not count in the gradient's norm. With adapters, encoders' other parameters are frozen.
    """
    flat = flatten_dict(params, keep_empty_nodes=True)
    patterns = list(map(parameter_path, frozen))
    has_adapters = any(ADAPTER in path for path in flat)

    def is_frozen(path: _Path) -> bool:
        if has_adapters and in_some_encoder(path) and ADAPTER not in path:
            return True
        return _STATISTICS in path or any(matches(pattern, path) for pattern in patterns)

    trained = {path: leaf for path, leaf in flat.items() if not is_frozen(path)}
    frozen_leaves = {path: leaf for path, leaf in flat.items() if path not in trained}
    return unflatten_dict(trained), unflatten_dict(frozen_leaves)


def merge(params: PyTree, others: PyTree) -> PyTree:
    """Joins two trees of parameters, such as those of `split_frozen`; `others` win."""
    flat = flatten_dict(params, keep_empty_nodes=True)
    return unflatten_dict(flat | flatten_dict(others, keep_empty_nodes=True))


def learning_rate(optim: Values, total_steps: int) -> optax.Schedule:
    """Builds the schedule of the fields of `config.optim`: a linear warm-up from 0, then theirs.

    The rate stays constant, decays to 0 along a half cosine, or is multiplied by `decay_factor`
    every `decay_every` steps, at once ("step") or gradually ("exponential").
    """
    rate, warmup_steps = optim["learning_rate"], optim["warmup_steps"]
    warmup = optax.linear_schedule(0, rate, warmup_steps)
    name = optim["schedule"]
    if name == "cosine":
        schedule = optax.cosine_decay_schedule(rate, max(total_steps - warmup_steps, 1))
    elif name == "constant":
        schedule = optax.constant_schedule(rate)
    else:
        schedule = optax.exponential_decay(
            rate, optim["decay_every"], optim["decay_factor"], staircase=name == "step"
        )
    return optax.join_schedules([warmup, schedule], [warmup_steps])


def layer_rates(
    layers: Sequence[Collection[str]], decay: float, head: bool
) -> Callable[[_Path], float]:
    """Layer-wise decay: returns a function from paths to factors of the learning rate.

    A parameter's factor is `decay` to the power of the number of layers above it, as in timm's
    `param_groups_layer_decay`. `layers` lists each layer's NAMEs in model/encoder/NAME, from the
    images to the embedding; a head counts as another layer. Other parameters have the factor 1.
    """
    layers_above: dict[str, int] = {}
    for count, names in enumerate(reversed(layers), start=int(head)):
        layers_above |= dict.fromkeys(names, count)
    return lambda path: decay ** layers_above.get(path[2], 0) if in_encoder(path) else 1.0


def create_optimizer(
    learning_rate: float | optax.Schedule = 3e-5,
    *,
    name: str = "adamw",
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    momentum: float = 0.95,
    gradient_factor: float = 1.0,
    clip_norm: float | None = 3.0,
    clip_value: float | None = None,
    groups: Sequence[Group] = (),
    layer_rate: Callable[[_Path], float] | None = None,
    head_warmup_steps: int = 0,
) -> optax.GradientTransformation:
    """Builds an optimiser with gradient clipping; the defaults are Hyp-ViT's published recipe.

    `name` is a key of `hypjax.config.choices.OPTIMIZERS`; `momentum` is for SGD and Muon. First,
    the model's gradient is multiplied by `gradient_factor`. Then all values are clipped to
    `clip_value`, and the global norm to `clip_norm`, unless None. Weight decay acts on all trained
    parameters. A group's factor of the learning rate also multiplies the decay, as in PyTorch, and
    so does `layer_rate`, another factor by path. During the first `head_warmup_steps`,
    model/encoder does not change. If a group's c is learned, `update` takes the step's c.
    """
    groups = [Group(()), *groups]
    moments = {"b1": b1, "b2": b2, "eps": eps}
    scale = _delay_encoder(head_warmup_steps, _scale(name, momentum, moments))

    def decay_of(path: _Path) -> float:
        group_decay = _group_of(groups, path).weight_decay
        return float(weight_decay if group_decay is None else group_decay)

    def rate_of(path: _Path) -> float:
        return _group_of(groups, path).rate * (layer_rate(path) if layer_rate else 1.0)

    add_decay = _change_by_path(decay_of, lambda update, param, decay: update + decay * param)
    scale_and_decay = (scale, add_decay) if OPTIMIZERS[name] else (add_decay, scale)
    steps = []
    if gradient_factor != 1:
        factor_of = lambda path: gradient_factor if path[0] == "model" else 1.0  # noqa: E731
        steps.append(_change_by_path(factor_of, lambda update, _, factor: factor * update))
    if clip_value is not None:
        steps.append(optax.clip(clip_value))
    if clip_norm is not None:
        steps.append(optax.clip_by_global_norm(clip_norm))
    steps.append(optax.chain(*scale_and_decay, optax.scale_by_learning_rate(learning_rate)))
    if layer_rate or any(group.rate != 1 for group in groups):
        steps.append(_change_by_path(rate_of, lambda update, _, factor: factor * update))
    if any(group.ball_c is not None for group in groups):
        steps = [_move_points(groups, learning_rate, moments, optax.chain(*steps))]
    if head_warmup_steps or any(group.start for group in groups):
        steps.append(_delay_updates(groups, head_warmup_steps))
    return optax.chain(*steps)


def _scale(
    name: str, momentum: float, moments: Mapping[str, float]
) -> optax.GradientTransformation:
    """Turns gradients into the updates of an optimiser for a learning rate of 1."""
    if name == "sgd":
        return optax.trace(decay=momentum)
    adam = optax.scale_by_adam(**moments)
    if name != "muon":
        return adam
    # With this root mean square of updates (Liu et al., 2025, arXiv:2502.16982), Adam's rate and
    # decay suit Muon. The rate is -1, because optax and `create_optimizer` both negate the update.
    muon = optax.contrib.muon(-1.0, beta=momentum, consistent_rms=0.2)

    # Muon is for the model's matrices; vectors, convolutions, tokens and proxies have Adam.
    def kind(path: tuple[Any, ...], x: AnyArray) -> str:
        return "matrix" if x.ndim == 2 and path[0].key != "objective" else "other"

    kinds = functools.partial(jax.tree_util.tree_map_with_path, kind)
    return optax.partition({"matrix": muon, "other": adam}, kinds)


def configured_optimizer(
    optim: Values,
    schedule: optax.Schedule,
    objective_groups: Sequence[Group] = (),
    scalar_groups: Sequence[Group] = (),
    encoder_groups: Sequence[Group] = (),
    **options: Any,
) -> optax.GradientTransformation:
    """Builds the optimiser of the fields of `config.optim`; `options` are `create_optimizer`'s."""
    user_groups = [Group(parameter_path(name), *settings) for name, *settings in optim["groups"]]
    if any(group.path == GROUPS["space"] for group in user_groups):
        scalar_groups = ()  # Their paths are longer, so they would win over the user's group.
    of_encoder = [group for group in user_groups if group.path == GROUPS["encoder"]]
    for group in of_encoder[-1:]:  # Likewise; but relative rates hold within the user's group.
        encoder_groups = [
            x._replace(rate=x.rate * group.rate, start=group.start) for x in encoder_groups
        ]
    groups = [
        *map(Group, GROUPS.values()),
        *(group._replace(path=GROUPS["objective"] + group.path) for group in objective_groups),
        *(group._replace(path=GROUPS["space"] + group.path) for group in scalar_groups),
        *(group._replace(path=GROUPS["encoder"] + group.path) for group in encoder_groups),
        *user_groups,
    ]
    names = inspect.signature(create_optimizer).parameters.keys() & {*optim.keys()}
    fields = {name: optim[name] for name in names - {"learning_rate", "groups"}}
    return create_optimizer(schedule, groups=groups, **fields, **options)


def _by_path(value: Callable[[_Path], Any], tree: PyTree) -> PyTree:
    """Replaces each leaf by a value of its path."""
    value_of = lambda path, _: value(tuple(key.key for key in path))  # noqa: E731
    return jax.tree_util.tree_map_with_path(value_of, tree)


def _group_of(groups: Sequence[Group], path: _Path) -> Group:
    """The group with the longest matching path; among equally long paths, the last."""
    matching = [group for group in groups if matches(group.path, path)]
    return max(reversed(matching), key=lambda group: len(group.path))


def _change_by_path(
    value: Callable[[_Path], float], change: Callable[[Array, Array, float], Array]
) -> optax.GradientTransformation:
    """Replaces each update by change(update, parameter, value(path))."""
    return optax.stateless(lambda g, p: jax.tree.map(change, g, p, _by_path(value, g)))


def _move_points(
    groups: Sequence[Group],
    learning_rate: float | optax.Schedule,
    moments: Mapping[str, float],
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Moves points of balls by Riemannian Adam, and other parameters by `others`.

    Gradients of points grow without bound towards the boundary. Riemannian Adam divides them by
    their size, so they are not clipped and do not count in the clipped norm.
    """
    schedule = learning_rate if callable(learning_rate) else lambda step: learning_rate
    point_groups = {"/".join(group.path): group for group in groups if group.ball_c is not None}

    def optimizer_of(group: Group) -> optax.GradientTransformation:
        # A group of `optim.groups` may set rate and decay.
        settings = _group_of(groups, group.path)
        options = {**moments, "weight_decay": settings.weight_decay or 0.0}
        c = None if isinstance(group.ball_c, str) else group.ball_c  # `LEARNED`, if a string.
        return riemannian_adam(lambda step: settings.rate * schedule(step), c=c, **options)

    def name_of_group(path: _Path) -> str:
        names = [name for name, group in point_groups.items() if matches(group.path, path)]
        return names[0] if names else ""

    optimizers = {name: optimizer_of(group) for name, group in point_groups.items()}
    return optax.partition({"": others, **optimizers}, functools.partial(_by_path, name_of_group))


def _delay_encoder(start: int, scale: optax.GradientTransformation) -> optax.GradientTransformation:
    """Hides the encoder's gradients from an optimiser until step `start`.

    If Adam counted all steps, its bias correction would make the encoder's first updates
    (1 − β₁)/√(1 − β₂) times the learning rate: 3.2 times, with the usual β.
    """
    if not start:
        return scale
    later = optax.conditionally_transform(scale, lambda step, **_: step >= start)
    return optax.partition({True: later, False: scale}, functools.partial(_by_path, in_encoder))


def _delay_updates(groups: Sequence[Group], head_warmup_steps: int) -> optax.GradientTransformation:
    """Sets updates to 0 before their group's first step; the encoder's also during the warm-up."""

    def start_of(path: _Path) -> int:
        return max(_group_of(groups, path).start, head_warmup_steps if in_encoder(path) else 0)

    def update(updates: PyTree, state: optax.ScaleByScheduleState, _: PyTree) -> Any:
        starts = _by_path(start_of, updates)
        updates = jax.tree.map(lambda u, s: jnp.where(state.count < s, 0, u), updates, starts)
        return updates, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32)), update
    )
