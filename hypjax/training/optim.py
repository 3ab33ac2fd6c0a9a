"""Optimisation: named groups of parameters, AdamW, and the learning rate's course."""

from collections.abc import Collection

import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.groups import GROUPS

_STATISTICS = "statistics"  # What a BatchNorm measured lies below this name, and is never trained.


def split_frozen(params: PyTree, frozen: Collection[str]) -> tuple[PyTree, PyTree]:
    """Parts parameters into (trained, frozen) trees, which `merge` joins again.

    Gradients are taken with respect to the first alone, so that what is frozen costs nothing and
    has no share in the gradient's norm.

    Args:
        params: {"model": ..., "objective": ...}.
        frozen: Names of groups.
    """
    flat = flatten_dict(params, keep_empty_nodes=True)
    stems = [GROUPS[name] for name in frozen]
    held = {
        path
        for path in flat
        if _STATISTICS in path or any(path[: len(stem)] == stem for stem in stems)
    }
    trained = {path: leaf for path, leaf in flat.items() if path not in held}
    return unflatten_dict(trained), unflatten_dict({path: flat[path] for path in held})


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
    """Joins what `split_frozen` parted."""
    flat = [flatten_dict(tree, keep_empty_nodes=True) for tree in (trained, frozen)]
    return unflatten_dict(flat[0] | flat[1])


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """The learning rate of each step: constant, or falling along a half cosine to 0.

    Either is reached by a linear rise from 0 over `optim.warmup_steps`.

    Args:
        config: The run's whole configuration.
    """
    optim, steps = config.optim, config.train.total_steps
    warmup = optim.warmup_steps
    rise = optax.linear_schedule(0, optim.learning_rate, warmup)
    if optim.schedule == "cosine":
        after = optax.cosine_decay_schedule(optim.learning_rate, max(steps - warmup, 1))
    else:
        after = optax.constant_schedule(optim.learning_rate)
    return optax.join_schedules([rise, after], [warmup])


def create_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, for the trained parameters.

    Weight decay acts on every parameter it is given, biases and LayerNorms included, as in the
    published recipe.

    Args:
        config: The run's whole configuration.
    """
    optim = config.optim
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=optim.b1,
            b2=optim.b2,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        ),
    )
