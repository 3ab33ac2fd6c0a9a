"""Registry of the optimisers that `config.optim.name` may name, built from optax."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

if TYPE_CHECKING:  # Only training needs optax; the configuration only needs the names.
    import optax


class Optimizer(NamedTuple):
    """How an optimiser turns gradients into updates for a learning rate of 1."""

    # Builds the transformation from the fields `b1`, `b2`, `eps` and `momentum` of `config.optim`.
    scale: Callable[..., "optax.GradientTransformation"]
    decoupled: bool  # Whether weight decay is added to the update instead of the gradient.


def _adam(*, b1: float, b2: float, eps: float, **_: Any) -> "optax.GradientTransformation":
    import optax

    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


def _muon(*, momentum: float, **adam: float) -> "optax.GradientTransformation":
    """Muon for the model's matrices; Adam for vectors, convolutions, tokens and proxies."""
    import optax.contrib

    def kind(path: tuple[Any, ...], x: jax.Array) -> str:
        return "matrix" if x.ndim == 2 and path[0].key != "objective" else "other"

    kinds = functools.partial(jax.tree_util.tree_map_with_path, kind)
    # The rate is -1, because optax and `create_optimizer` both negate the update. With this root
    # mean square of updates (Liu et al., 2025, arXiv:2502.16982), Adam's rate and decay suit Muon.
    muon = optax.contrib.muon(-1.0, beta=momentum, consistent_rms=0.2)
    return optax.partition({"matrix": muon, "other": _adam(**adam)}, kinds)


def _momentum(*, momentum: float, **_: Any) -> "optax.GradientTransformation":
    import optax

    return optax.trace(decay=momentum)


OPTIMIZERS = {
    "adamw": Optimizer(_adam, decoupled=True),
    "adam": Optimizer(_adam, decoupled=False),
    "sgd": Optimizer(_momentum, decoupled=False),
    "muon": Optimizer(_muon, decoupled=True),
}
