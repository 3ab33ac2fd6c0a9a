"""The optimiser: AdamW on the trained parameters, its learning rate, and what is frozen."""

from collections.abc import Collection

import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.groups import GROUPS

_STATISTICS = "statistics"  # A BatchNorm's running statistics, which are never trained.


def split_frozen(params: PyTree, frozen: Collection[str]) -> tuple[PyTree, PyTree]:
    """Splits parameters into (trained, frozen) trees, which `merge` joins again.

    Gradients are taken with respect to the trained tree alone, so frozen parameters cost nothing
    and have no share in the gradient's norm.

    Args:
        params: {"model": ..., "objective": ...}.
        frozen: Names of the frozen groups, see `hypjax.config.groups`.
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
    """The learning rate at each step: constant, or decaying to 0 along a half cosine.

    Either follows a linear warm-up from 0 over `warmup_steps`.

    Args:
        optim: The fields of `config.optim`.
        total_steps: Steps of the run.
    """
    warmup = optim.warmup_steps
    rise = optax.linear_schedule(0, optim.learning_rate, warmup)
    if optim.schedule == "cosine":
        after = optax.cosine_decay_schedule(optim.learning_rate, max(total_steps - warmup, 1))
    else:
        after = optax.constant_schedule(optim.learning_rate)
    return optax.join_schedules([rise, after], [warmup])


def create_optimizer(optim: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, for the trained parameters.

    Weight decay acts on all trained parameters, biases and LayerNorms included, as in the
    published recipe.

    Args:
        optim: The fields of `config.optim`.
        schedule: Learning rate at each step.
    """
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        optax.adamw(
            schedule, b1=optim.b1, b2=optim.b2, eps=optim.eps, weight_decay=optim.weight_decay
        ),
    )
