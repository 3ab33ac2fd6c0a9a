"""Losses and their gradients, compared with PyTorch.

The hyperbolic loss is compared with the published formula and with that of hypjax; others follow in
`hypjax.benchmarks.losses` and `hypjax.benchmarks.cross_batch`.
"""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from hypjax.benchmarks import cross_batch, losses, peers
from hypjax.benchmarks.measure import Task, product_rate
from hypjax.config import default_config
from hypjax.geometry import PoincareBall
from hypjax.objectives import pairwise_cross_entropy

_DIM = 128
_SHAPES = ((450, 2), (100, 9))  # Classes and samples: Hyp-ViT's batches.
_INSTALL = "torch (pip install torch)"


def tasks(quick: bool) -> Iterator[Task]:
    """Yields the tasks: batches of 900 points, or of 90 if quick; then those of other losses."""
    rate = product_rate(_DIM)
    for classes, samples in _SHAPES:
        classes = classes // 10 if quick else classes
        rng = np.random.default_rng(0)
        features = rng.normal(size=(classes * samples, _DIM)).astype(np.float32)
        ours, memory = gradient(features, samples)
        for name, run in _peers(features, samples):
            yield Task(
                f"loss and gradient, {classes} classes × {samples}, {_DIM} coordinates",
                ours,
                run,
                name,
                limit=3
                * 2
                * len(features) ** 2
                * _DIM
                / rate,  # One product forward, two backward.
                memory=memory,
            )
    yield from losses.tasks(quick)
    yield from cross_batch.tasks(quick)


def gradient(
    features: np.ndarray, samples: int
) -> tuple[Callable[[], tuple[jax.Array, jax.Array]], int]:
    """Returns a function that computes loss and gradient, and its temporary memory in bytes."""
    objective = default_config().objective
    ball = PoincareBall(objective.c, objective.clip_radius)

    def loss(features: jax.Array) -> jax.Array:
        points = ball.embed(features).reshape(-1, samples, features.shape[-1])
        return pairwise_cross_entropy(points, space=ball, temperature=objective.temperature)

    program = jax.jit(jax.value_and_grad(loss)).lower(features).compile()
    x = jax.device_put(features)
    memory = program.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(program(x)), memory


def _peers(features: np.ndarray, samples: int) -> Iterator[tuple[str, Callable | None]]:
    """Yields the name of each PyTorch version and its function, or what to install and None."""
    if not peers.installed("torch"):
        yield _INSTALL, None
        return
    import torch

    from hypjax.benchmarks import torch_peers

    if torch_peers.device() is None:
        yield "torch for this device", None
        return

    objective = default_config().objective
    ball = {"c": objective.c, "radius": objective.clip_radius}
    torch.set_float32_matmul_precision("highest")
    for name, loss in (
        ("Möbius sums [n, m, dim]", torch_peers.loss_by_pairs),
        ("our formula", torch_peers.loss_by_product),
        ("our formula, torch.compile", torch_peers.compiled(torch_peers.loss_by_product)),
    ):
        run = torch_peers.loss_and_gradient(loss, features, samples, ball, objective.temperature)
        yield f"{torch_peers.name()}, {name}", run
