"""The loss of IRT with a memory of all training images, compared with pytorch-metric-learning."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hypjax import objectives
from hypjax.benchmarks import losses, peers
from hypjax.benchmarks.measure import Task, product_rate
from hypjax.geometry import Sphere
from hypjax.types import Batch, Outputs

_IMAGES, _DIM, _ROWS, _CLASSES = 64, 384, 60_000, 11_318  # SOP.
_BATCHES = 8  # Which follow each other.


class Data(NamedTuple):
    """Batches that follow each other, and a full memory.

    Attributes:
        features: Features of the batches.
        labels: Their classes, two images of each.
        points: Points of the memory.
        remembered: Their classes.
    """

    features: Float[np.ndarray, "batches n dim"]
    labels: Int[np.ndarray, "batches n"]
    points: Float[np.ndarray, "rows dim"]
    remembered: Int[np.ndarray, " rows"]


def make_data(rows: int) -> Data:
    """Features of which about one in a hundred pairs of different classes is above the margin."""
    rng = np.random.default_rng(0)
    common = np.sqrt(0.75 / _DIM)

    def features(*shape: int) -> np.ndarray:
        return (common + rng.normal(size=(*shape, _DIM)) / np.sqrt(_DIM)).astype(np.float32)

    pairs = rng.integers(0, _CLASSES, (_BATCHES, _IMAGES // 2))
    points = features(rows)
    return Data(
        features(_BATCHES, _IMAGES),
        np.repeat(pairs, 2, axis=1).astype(np.int32),
        points / np.linalg.norm(points, axis=1, keepdims=True),
        rng.integers(0, _CLASSES, rows).astype(np.int32),
    )


def tasks(quick: bool) -> Iterator[Task]:
    """Yields the task: value, gradient and the next memory of a batch of 64 images."""
    rows = _ROWS // 10 if quick else _ROWS
    data = make_data(rows)
    ours, memory = step(data)
    yield Task(
        f"contrastive, {_IMAGES} images, a memory of {rows} × {_DIM}",
        ours,
        peer(data),
        losses.peer_name(),
        limit=2 * 2 * _IMAGES * rows * _DIM / product_rate(_DIM),  # Forward, and backward.
        memory=memory,
    )


def step(data: Data) -> tuple[Callable[[], tuple[jax.Array, Any]], int]:
    """Returns a function that takes one batch after the other, and its temporary memory in bytes.

    It returns value and gradient. As in training, the state is overwritten by the next one.
    """
    rows = len(data.points)
    objective = objectives.PairObjective(
        Sphere(), objectives.contrastive, samples_per_class=None, memory=float(rows)
    )
    spec = objectives.Spec(_CLASSES, 2, _DIM, _DIM, rows, _IMAGES)
    params, state = objective.init(jax.random.key(0), spec)
    held = state["memory"]._replace(
        points=jnp.asarray(data.points), labels=jnp.asarray(data.remembered)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def program(state: Any, features: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        def loss(features: jax.Array) -> tuple[jax.Array, Any]:
            outputs, batch = Outputs(features, features), Batch(None, labels, None, None)
            return objective.loss(params, state, outputs, None, batch, jax.random.key(0))

        (value, (after, _)), slope = jax.value_and_grad(loss, has_aux=True)(features)
        return after, (value, slope)

    batches = jax.device_put(list(zip(data.features, data.labels, strict=True)))
    kept = {"state": {"memory": held}, "next": 0}
    compiled = program.lower(kept["state"], *batches[0]).compile()

    def run() -> tuple[jax.Array, Any]:
        batch = batches[kept["next"] % len(batches)]
        kept["state"], found = compiled(kept["state"], *batch)
        kept["next"] += 1
        return jax.block_until_ready(found)

    return run, compiled.memory_analysis().temp_size_in_bytes


def peer(data: Data) -> Callable[[], Any] | None:
    """Returns a function that does the same with their memory, or None without the package."""
    if not peers.installed("torch", losses.PACKAGE):
        return None
    import torch
    from pytorch_metric_learning import distances, reducers
    from pytorch_metric_learning import losses as theirs

    from hypjax.benchmarks import torch_peers

    device = torch_peers.device()
    if device is None:
        return None

    class Sum(reducers.MeanReducer):
        """All losses count, not only those above 0."""

        def element_reduction(self, losses: torch.Tensor, *_: Any) -> torch.Tensor:
            return losses.sum() / _IMAGES

    alone, remembered = (
        theirs.ContrastiveLoss(1, 0.5, distance=distances.CosineSimilarity(), reducer=Sum())
        for _ in range(2)
    )
    memory = theirs.CrossBatchMemory(remembered, _DIM, len(data.points)).to(device)
    memory.embedding_memory.copy_(torch.tensor(data.points))
    memory.label_memory.copy_(torch.tensor(data.remembered))
    memory.has_been_filled = True
    x = torch.tensor(data.features, device=device, requires_grad=True)
    y, taken = torch.tensor(data.labels, device=device).long(), {"next": 0}

    def run() -> Any:
        i = taken["next"] % len(x)
        taken["next"], x.grad = taken["next"] + 1, None
        points = torch.nn.functional.normalize(x[i], dim=-1)
        value = alone(points, y[i]) + memory(points, y[i])
        value.backward()
        torch_peers.synchronize()
        return value.detach(), x.grad[i]

    return run
