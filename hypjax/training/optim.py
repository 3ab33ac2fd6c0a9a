"""The optimiser: parameter groups, learning rates, and what is frozen."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.choices import GROUPS
from hypjax.objectives import Group

_STATISTICS = "statistics"  # A BatchNorm's running statistics, which are never trained.


def split_frozen(params: PyTree, frozen: Collection[str]) -> tuple[PyTree, PyTree]:
    """Splits parameters into (trained, frozen) trees, which `merge` joins again.

    Gradients are taken with respect to the trained tree alone, so frozen parameters cost nothing
    and have no share in the gradient's norm.

    Args:
        params: {"model": ..., "objective": ...}.
        frozen: Names of the frozen groups, see `hypjax.config.choices`.
    """
    flat = flatten_dict(params, keep_empty_nodes=True)
    prefixes = [GROUPS[name] for name in frozen]
    held = {
        path
        for path in flat
        if _STATISTICS in path or any(path[: len(prefix)] == prefix for prefix in prefixes)
    }
    trained = {path: leaf for path, leaf in flat.items() if path not in held}
    return unflatten_dict(trained), unflatten_dict({path: flat[path] for path in held})


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
    """Joins the two trees that `split_frozen` returns."""
    flat = [flatten_dict(tree, keep_empty_nodes=True) for tree in (trained, frozen)]
    return unflatten_dict(flat[0] | flat[1])


def learning_rate(optim: ConfigDict, total_steps: int) -> optax.Schedule:
    """The learning rate at each step.

    After a linear warm-up from 0 over `warmup_steps`, it is constant, decays to 0 along a half
    cosine, or is multiplied by `decay_factor` in every `decay_every` steps, at once ('step') or
    gradually ('exponential').

    Args:
        optim: The fields of `config.optim`.
        total_steps: Steps of the run.
    """
    rate, warmup = optim.learning_rate, optim.warmup_steps
    rise = optax.linear_schedule(0, rate, warmup)
    if optim.schedule == "cosine":
        after = optax.cosine_decay_schedule(rate, max(total_steps - warmup, 1))
    elif optim.schedule == "constant":
        after = optax.constant_schedule(rate)
    else:
        after = optax.exponential_decay(
            rate, optim.decay_every, optim.decay_factor, staircase=optim.schedule == "step"
        )
    return optax.join_schedules([rise, after], [warmup])


def create_optimizer(
    optim: ConfigDict, schedule: optax.Schedule, added: Sequence[Group] = ()
) -> optax.GradientTransformation:
    """AdamW or Adam after clipping, for the trained parameters.

    Weight decay acts on all trained parameters of a group, biases and LayerNorms included, as in
    the published recipe. The factor of a group also multiplies its decay, as in PyTorch's parameter
    groups.

    Args:
        optim: The fields of `config.optim`.
        schedule: Learning rate at each step.
        added: Groups that the objective adds, see `Objective.groups`.
    """
    groups = [
        *(Group(p, optim.rates[n], optim.decays[n], optim.starts[n]) for n, p in GROUPS.items()),
        *(group._replace(path=GROUPS["objective"] + group.path) for group in added),
    ]
    decays = {
        group.path: optim.weight_decay if group.weight_decay is None else group.weight_decay
        for group in groups
    }
    adam = optax.scale_by_adam(b1=optim.b1, b2=optim.b2, eps=optim.eps)
    decay = _add_decay(decays)
    steps = [
        *([optax.clip(optim.clip_value)] if optim.clip_value is not None else []),
        *([optax.clip_by_global_norm(optim.clip_norm)] if optim.clip_norm is not None else []),
        # One element, as `optax.adamw` is: checkpoints hold the states of this structure.
        optax.chain(
            *((adam, decay) if optim.name == "adamw" else (decay, adam)),
            optax.scale_by_learning_rate(schedule),
        ),
    ]
    if any(group.rate != 1 for group in groups):
        steps.append(_scale({group.path: group.rate for group in groups}))
    if any(group.start for group in groups):
        steps.append(_hold({group.path: group.start for group in groups}))
    return optax.chain(*steps)


def _of_each(values: Mapping[tuple[str, ...], float], tree: PyTree) -> PyTree:
    """For each leaf of a tree of parameters, the value of the group with the longest path."""

    def value(path: tuple[str, ...]) -> float:
        own = [prefix for prefix in values if path[: len(prefix)] == prefix]
        return values[max(own, key=len)]

    flat = flatten_dict(tree, keep_empty_nodes=True)
    return unflatten_dict({p: x if x is empty_node else value(p) for p, x in flat.items()})


def _add_decay(decays: Mapping[tuple[str, ...], float]) -> optax.GradientTransformation:
    """Adds parameters, each times the weight decay of its group, to their updates."""

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree) -> tuple[PyTree, Any]:
        decay = _of_each(decays, updates)
        return jax.tree.map(lambda g, p, d: g + d * p, updates, params, decay), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale(factors: Mapping[tuple[str, ...], float]) -> optax.GradientTransformation:
    """Multiplies updates by the factors of their groups."""

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree) -> tuple[PyTree, Any]:
        del params
        return jax.tree.map(lambda u, f: f * u, updates, _of_each(factors, updates)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _hold(starts: Mapping[tuple[str, ...], int]) -> optax.GradientTransformation:
    """Sets the updates of each group to 0 before the step from which it changes."""

    def update(updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree) -> Any:
        del params
        start = _of_each(starts, updates)
        held = jax.tree.map(lambda u, s: jnp.where(state.count < s, 0, u), updates, start)
        return held, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32)), update
    )
