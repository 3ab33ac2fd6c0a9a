"""The optimiser: parameter groups, learning rates, and what is frozen."""

import fnmatch
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.choices import GROUPS, parameter_path
from hypjax.objectives import Group

_STATISTICS = "statistics"  # A BatchNorm's running statistics, which are never trained.


def matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a path leads to a parameter below a path whose parts may be patterns, as in 'b*'."""
    return len(pattern) <= len(path) and all(map(fnmatch.fnmatchcase, path, pattern))


def split_frozen(params: PyTree, frozen: Collection[str]) -> tuple[PyTree, PyTree]:
    """Splits parameters into (trained, frozen) trees, which `merge` joins again.

    Gradients are taken with respect to the trained tree alone, so frozen parameters cost nothing
    and have no share in the gradient's norm.
    """
    flat = flatten_dict(params, keep_empty_nodes=True)
    patterns = list(map(parameter_path, frozen))
    held = {path for path in flat if _STATISTICS in path or any(matches(p, path) for p in patterns)}
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
    """
    groups = [
        *map(Group, GROUPS.values()),
        *(group._replace(path=GROUPS["objective"] + group.path) for group in added),
        *(Group(parameter_path(name), *settings) for name, *settings in optim.groups),
    ]
    adam = optax.scale_by_adam(b1=optim.b1, b2=optim.b2, eps=optim.eps)
    decay = _add_decay(groups, optim.weight_decay)
    steps = [
        *([optax.clip(optim.clip_value)] if optim.clip_value is not None else []),
        *([optax.clip_by_global_norm(optim.clip_norm)] if optim.clip_norm is not None else []),
        # One element, as `optax.adamw` is: checkpoints hold the states of this structure.
        optax.chain(
            *((adam, decay) if optim.name == "adamw" else (decay, adam)),
            optax.scale_by_learning_rate(schedule),
        ),
    ]
    # Without such groups there is no such step, so that older checkpoints fit.
    if any(group.rate != 1 for group in groups):
        steps.append(_scale(groups))
    if any(group.start for group in groups):
        steps.append(_hold(groups))
    return optax.chain(*steps)


def _of_each(groups: Sequence[Group], setting: Callable[[Group], float], tree: PyTree) -> PyTree:
    """For each leaf, a setting of the group with the longest path to it, of equal ones the last."""

    def value(path: tuple[str, ...]) -> float:
        own = [group for group in groups if matches(group.path, path)]
        return setting(max(reversed(own), key=lambda group: len(group.path)))

    flat = flatten_dict(tree, keep_empty_nodes=True)
    return unflatten_dict({p: x if x is empty_node else value(p) for p, x in flat.items()})


def _add_decay(groups: Sequence[Group], general: float) -> optax.GradientTransformation:
    """Adds parameters, each times the weight decay of its group or the general one, to updates."""

    def decay(group: Group) -> float:
        return general if group.weight_decay is None else group.weight_decay

    def update(updates: PyTree, params: PyTree) -> PyTree:
        decays = _of_each(groups, decay, updates)
        return jax.tree.map(lambda g, p, d: g + d * p, updates, params, decays)

    return optax.stateless(update)


def _scale(groups: Sequence[Group]) -> optax.GradientTransformation:
    def update(updates: PyTree, params: PyTree) -> PyTree:
        del params
        rates = _of_each(groups, lambda group: group.rate, updates)
        return jax.tree.map(lambda u, f: f * u, updates, rates)

    return optax.stateless(update)


def _hold(groups: Sequence[Group]) -> optax.GradientTransformation:
    """Sets the updates of each group to 0 before the step from which it changes."""

    def update(updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree) -> Any:
        del params
        starts = _of_each(groups, lambda group: group.start, updates)
        held = jax.tree.map(lambda u, s: jnp.where(state.count < s, 0, u), updates, starts)
        return held, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32)), update
    )
