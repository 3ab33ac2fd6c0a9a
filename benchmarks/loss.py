"""Losses and their gradients, compared with PyTorch.

The hyperbolic loss is compared with the published formula and hypjax's formula in PyTorch; pair and
proxy losses on the sphere with pytorch-metric-learning.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from benchmarks import measure, peers
from benchmarks.measure import COLUMNS as COLUMNS
from hypjax import objectives
from hypjax.config import default_config
from hypjax.geometry import PoincareBall, Sphere

_OBJECTIVE = default_config().objective
BALL = PoincareBall(_OBJECTIVE.c, _OBJECTIVE.clip_radius)
_DIM = 128
_SHAPES = ((450, 2), (100, 9))  # Classes and samples: Hyp-ViT's batches.
_PAIRS = 100, 9, 128  # Classes, samples and coordinates: Hyp-ViT's batch.
_PROXIES = 90, 2, 512  # 180 images, as in Proxy-Anchor and HIER.
# A function that computes a loss and its gradients, and the temporary bytes that it needs.
Gradient = tuple[Callable[[], tuple[jax.Array, Any]], int]


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times the hyperbolic loss on 900 points, or on 90 if quick; then other losses."""
    return measure.measure(_tasks(10 if options.quick else 1), options)


def _tasks(divisor: int) -> Iterator[measure.Task]:
    """The tasks, with the number of classes divided by `divisor`."""
    rng = np.random.default_rng(0)
    module, name = peers.torch_or_missing("torch (pip install torch)")
    for classes, samples in _SHAPES:
        classes //= divisor
        features = rng.normal(size=(classes * samples, _DIM)).astype(np.float32)
        ours, memory = gradient(features, samples)
        task = f"loss and gradient, {classes} classes × {samples}, {_DIM} coordinates"
        theirs = module.hyperbolic_losses(features, samples) if module else {"": None}
        for formula, peer in theirs.items():
            yield measure.Task(task, ours, peer, f"{name} {formula}", memory=memory)
    if module is None or not peers.installed("pytorch_metric_learning"):
        return
    for task, compared in module.metric_losses(_PROXIES[2]).items():
        classes, samples, dim = _PROXIES if compared.proxies else _PAIRS
        features = rng.normal(size=(classes // divisor * samples, dim)).astype(np.float32)
        labels = np.repeat(np.arange(classes // divisor), samples)
        ours, memory = sphere_gradient(compared.ours, features, labels, *compared.proxies)
        task += f", {len(features)} images, {dim} coordinates"
        peer = compared.gradient(features, labels)
        yield measure.Task(task, ours, peer, f"{name}, pytorch-metric-learning", memory=memory)


def gradient(features: Float[np.ndarray, "n d"], samples: int) -> Gradient:
    """The hyperbolic loss with its gradient."""

    def loss(features: jax.Array) -> jax.Array:
        points = BALL.embed(features).reshape(-1, samples, features.shape[-1])
        temperature = _OBJECTIVE.temperature
        return objectives.pairwise_cross_entropy(points, space=BALL, temperature=temperature)

    return _compiled_gradient(loss, features)


def sphere_gradient(
    function: Callable[..., jax.Array],
    features: Float[np.ndarray, "n d"],
    labels: Int[np.ndarray, " n"],
    *proxies: Float[np.ndarray, "*b d"],
) -> Gradient:
    """A pair or proxy loss on the sphere, with its gradients by the features and the proxies."""
    space, samples = Sphere(), int(np.sum(labels == labels[0]))
    options = {} if proxies else {"samples_per_class": samples}

    def loss(features: jax.Array, *proxies: jax.Array) -> jax.Array:
        return function(
            space.embed(features), labels, *map(space.embed, proxies), space=space, **options
        )

    return _compiled_gradient(loss, features, *proxies)


def _compiled_gradient(loss: Callable[..., jax.Array], *arguments: np.ndarray) -> Gradient:
    """Compiles a loss with its gradients by all arguments."""
    arguments = jax.device_put(arguments)
    argnums = tuple(range(len(arguments)))
    program = jax.jit(jax.value_and_grad(loss, argnums=argnums)).lower(*arguments).compile()
    memory = program.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(program(*arguments)), memory
