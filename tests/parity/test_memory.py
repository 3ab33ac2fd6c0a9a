"""The cross-batch memory against pytorch-metric-learning's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import objectives
from hypjax.benchmarks.loss import make_data, memory_peer, memory_step
from hypjax.geometry import Sphere
from hypjax.objectives import PairObjective, Spec
from hypjax.types import Batch, Outputs

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
pml = pytest.importorskip(
    "pytorch_metric_learning", reason="needs the parity extra: pytorch-metric-learning"
)
from pytorch_metric_learning import losses  # noqa: E402

BATCH, DIM, STEPS = 8, 5, 9


# With a memory of one batch, and with one that ends in the middle of a batch.
PAIRS = {
    "multi_similarity": (
        functools.partial(objectives.multi_similarity, mining=False),
        lambda: losses.MultiSimilarityLoss(2, 50, 0.5),
        BATCH,
    ),
    "supcon": (objectives.supcon, lambda: losses.SupConLoss(0.1), 20),
}


@pytest.fixture(autouse=True)
def double(float64):
    """Computes in float64 in both libraries."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_with_a_memory(name):
    function, loss_of, size = PAIRS[name]
    objective = PairObjective(Sphere(), function, None, memory=float(size))
    spec = Spec(3, 2, 16, DIM, 100, BATCH)
    params, state = objective.init(jax.random.key(0), spec)
    alone, remembering = loss_of(), losses.CrossBatchMemory(loss_of(), DIM, size)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def step(features, state, labels):
        batch = Batch(None, labels, None, None)
        return objective.loss(params, state, Outputs(None, features), None, batch, None)

    for seed in range(STEPS):
        rng = np.random.default_rng(seed)
        features, labels = rng.normal(size=(BATCH, DIM)) + 0.7, rng.integers(0, 4, BATCH)
        (value, (state, _)), slope = step(features, state, jnp.asarray(labels))
        x, y = torch.tensor(features, requires_grad=True), torch.tensor(labels)
        points = torch.nn.functional.normalize(x, dim=-1)
        expected = alone(points, y) + remembering(points, y)
        expected.backward()
        np.testing.assert_allclose(value, expected.item(), rtol=1e-9)
        np.testing.assert_allclose(slope, x.grad, rtol=1e-7, atol=1e-9)
    kept = state["memory"]
    np.testing.assert_allclose(kept.points, remembering.embedding_memory, rtol=1e-12)
    np.testing.assert_array_equal(kept.labels, remembering.label_memory)


def test_the_benchmark_compares_equal_work():
    torch.set_default_dtype(torch.float32)
    with jax.enable_x64(False):
        data = make_data(300)
        ours, _ = memory_step(data)
        theirs = memory_peer(data)
        for _ in range(10):  # Batches of 64: the memory is overwritten twice.
            (value, slope), (expected, gradient) = ours(), theirs()
            np.testing.assert_allclose(value, expected.numpy(), rtol=1e-4)
            np.testing.assert_allclose(slope, gradient.numpy(), rtol=1e-3, atol=1e-5)
