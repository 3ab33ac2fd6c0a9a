"""The loss of IRT with a memory of all training images, compared with pytorch-metric-learning."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hypjax import objectives
from hypjax.benchmarks import losses, peers
from hypjax.benchmarks.measure import Task, product_rate
from hypjax.geometry import Sphere
from hypjax.types import Batch, Outputs

_IMAGES, _DIM, _ROWS, _CLASSES = 64, 384, 60_000, 11_318  # SOP.
_BATCHES = 8  # Which follow each other.


def tasks(quick: bool) -> Iterator[Task]:
    """Yields the task: value, gradient and the next memory of a batch of 64 images."""
    rows = _ROWS // 10 if quick else _ROWS
    rng = np.random.default_rng(0)
    features = rng.normal(size=(_BATCHES, _IMAGES, _DIM)).astype(np.float32)
    labels = rng.integers(0, _CLASSES, (_BATCHES, _IMAGES)).astype(np.int32)
    ours, memory = step(features, labels, rows)
    yield Task(
        f"contrastive, {_IMAGES} images, a memory of {rows} × {_DIM}",
        ours,
        peer(features, labels, rows),
        losses.peer_name(),
        limit=2 * 2 * _IMAGES * rows * _DIM / product_rate(_DIM),  # Forward, and backward.
        memory=memory,
    )


def step(
    features: np.ndarray, labels: np.ndarray, rows: int
) -> tuple[Callable[[], tuple[jax.Array, Any]], int]:
    """Returns a function that takes one batch after the other, and its temporary memory in bytes.

    The memory is full from the start. As in training, the state is overwritten by the next one.
    """
    objective = objectives.PairObjective(
        Sphere(), objectives.contrastive, samples_per_class=None, memory=float(rows)
    )
    spec = objectives.Spec(_CLASSES, 2, _DIM, _DIM, rows, _IMAGES)
    params, state = objective.init(jax.random.key(0), spec)
    rng = np.random.default_rng(1)
    points = rng.normal(size=(rows, _DIM)).astype(np.float32)
    held = state["memory"]._replace(
        points=jnp.asarray(points / np.linalg.norm(points, axis=1, keepdims=True)),
        labels=jnp.asarray(rng.integers(0, _CLASSES, rows).astype(np.int32)),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def program(state: Any, features: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        def loss(features: jax.Array) -> tuple[jax.Array, Any]:
            outputs, batch = Outputs(features, features), Batch(None, labels, None, None)
            return objective.loss(params, state, outputs, None, batch, jax.random.key(0))

        (value, (after, _)), slope = jax.value_and_grad(loss, has_aux=True)(features)
        return after, (value, slope)

    batches = jax.device_put(list(zip(features, labels, strict=True)))
    kept = {"state": {"memory": held}, "next": 0}
    compiled = program.lower(kept["state"], *batches[0]).compile()

    def run() -> tuple[jax.Array, Any]:
        batch = batches[kept["next"] % len(batches)]
        kept["state"], found = compiled(kept["state"], *batch)
        kept["next"] += 1
        return jax.block_until_ready(found)

    return run, compiled.memory_analysis().temp_size_in_bytes


def peer(features: np.ndarray, labels: np.ndarray, rows: int) -> Callable[[], Any] | None:
    """Returns a function that does the same with their memory, or None without the package."""
    if not peers.installed("torch", losses.PACKAGE):
        return None
    import torch
    from pytorch_metric_learning import distances
    from pytorch_metric_learning import losses as theirs

    from hypjax.benchmarks import torch_peers

    device = torch_peers.device()
    if device is None:
        return None
    alone, remembered = (
        theirs.ContrastiveLoss(1, 0.5, distance=distances.CosineSimilarity()) for _ in range(2)
    )
    memory = theirs.CrossBatchMemory(remembered, _DIM, rows).to(device)
    random = torch.nn.functional.normalize(torch.randn(rows, _DIM), dim=-1)
    memory.embedding_memory.copy_(random)
    memory.label_memory.copy_(torch.randint(0, _CLASSES, (rows,)))
    memory.has_been_filled = True
    x = torch.tensor(features, device=device, requires_grad=True)
    y, taken = torch.tensor(labels, device=device).long(), {"next": 0}

    def run() -> Any:
        i = taken["next"] % len(x)
        taken["next"], x.grad = taken["next"] + 1, None
        points = torch.nn.functional.normalize(x[i], dim=-1)
        value = alone(points, y[i]) + memory(points, y[i])
        value.backward()
        torch_peers.synchronize()
        return value.detach(), x.grad[i]

    return run
