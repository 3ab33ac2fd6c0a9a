"""HIER's losses against transcriptions in PyTorch over geoopt, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import load_config
from hypjax.geometry import PoincareBall
from hypjax.objectives import hier
from hypjax.types import Outputs
from tests.helpers.losses import objective_of

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
geoopt = pytest.importorskip("geoopt", reason="needs the parity extra: geoopt")

C, RADIUS, MARGIN, TEMPERATURE = 0.1, 2.3, 0.1, 0.1
POINTS, PROXIES, TRIPLETS, DIM = 9, 11, 30, 6
RANDOM = np.random.default_rng(0)
FEATURES = 0.1 * RANDOM.normal(size=(POINTS, DIM))  # So close that noise decides.
HIERARCHY = 0.1 * RANDOM.normal(size=(PROXIES, DIM))
INDICES = np.stack([RANDOM.permutation(POINTS)[:3] for _ in range(TRIPLETS)])
BALL = geoopt.PoincareBallExact(c=torch.tensor(C, dtype=torch.float64))
NOISE = RANDOM.gumbel(size=(2, TRIPLETS, PROXIES))


class RiemannianGradient(torch.autograd.Function):
    """The identity, whose gradient is scaled by the inverse metric at the embedded point."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        square = torch.sum(embedded(x) ** 2, dim=-1, keepdim=True)
        return gradient * (1 - C * square) ** 2 / 4


def embedded(x):
    norm = torch.linalg.norm(x, dim=-1, keepdim=True)
    return BALL.expmap0(x * torch.clamp(RADIUS / norm, max=1.0), project=False)


def straight_through(logits):
    """The one-hot vector of the largest logit, with the gradient of the softmax."""
    soft = torch.softmax(logits, dim=-1)
    hard = torch.nn.functional.one_hot(torch.argmax(soft, dim=-1), logits.shape[-1])
    return hard - soft.detach() + soft


def transcribed(features, hierarchy, indices, noise):
    x, p = (embedded(RiemannianGradient.apply(each)) for each in (features, hierarchy))
    d = BALL.dist(x[:, None], p)
    total = 0.0
    for (i, j, k), of_two, of_three in zip(indices, *noise, strict=True):
        two = torch.maximum(d[i], d[j])
        rho_ij = straight_through(-two / TEMPERATURE + of_two)
        rho_ijk = straight_through(-torch.maximum(two, d[k]) / TEMPERATURE + of_three)
        if torch.argmax(rho_ij) != torch.argmax(rho_ijk):
            for member, near, far in (
                (i, rho_ij, rho_ijk),
                (j, rho_ij, rho_ijk),
                (k, rho_ijk, rho_ij),
            ):
                total = total + torch.relu(d[member] @ near - d[member] @ far + MARGIN)
    return total / len(indices)


def ours(features, hierarchy, indices, noise, valid=None):
    ball = PoincareBall(C, RADIUS, riemannian=True)
    x, p = ball.embed(features), ball.embed(hierarchy)
    settings = {"margin": MARGIN, "temperature": TEMPERATURE, "valid": valid}
    return hier(x, p, indices, noise, space=ball, **settings)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_value_and_gradients(float64, dtype):
    leaves = [torch.tensor(each, requires_grad=True) for each in (FEATURES, HIERARCHY)]
    valid = np.arange(TRIPLETS) % 3 > 0
    expected = transcribed(*leaves, INDICES[valid], torch.tensor(NOISE[:, valid]))
    expected.backward()
    given = [jnp.asarray(x, dtype) for x in (FEATURES, HIERARCHY)]
    program = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))
    noise = jnp.asarray(NOISE, dtype)
    assert program(*given, INDICES, noise, ~valid & valid)[0] == 0
    value, slopes = program(*given, INDICES, noise, valid)
    assert expected > 0.1
    np.testing.assert_allclose(value, expected.item(), rtol=1e-12 if dtype == "float64" else 1e-5)
    for slope, leaf in zip(slopes, leaves, strict=True):
        tolerance = 1e-9 if dtype == "float64" else 1e-4
        largest = leaf.grad.abs().max().item()
        np.testing.assert_allclose(slope, leaf.grad, rtol=tolerance, atol=tolerance * largest)


def test_the_pairwise_loss_of_its_code():
    """SupCon of `hyp-resnet50`: cross-entropies of all ordered pairs of samples, divided by 8²."""
    objective = objective_of(load_config("configs/cub.py:hyp-resnet50"))
    features = np.random.default_rng(0).normal(size=(22, 8, DIM)).astype(np.float32)
    outputs = Outputs(None, jnp.asarray(features.reshape(-1, DIM)))
    value, slope = jax.jit(jax.value_and_grad(lambda x: objective.loss(x)[0]))(outputs)
    leaf = torch.tensor(features, dtype=torch.float64, requires_grad=True)
    x, total = embedded(leaf), 0.0
    for i, j in ((i, j) for i in range(8) for j in range(8) if i != j):
        matches, others = (-BALL.dist(x[:, None, i], x[None, :, k]) / 0.2 for k in (j, i))
        logits = torch.cat([matches, others - 1e9 * torch.eye(22)], dim=1)
        total = total + torch.nn.functional.cross_entropy(logits, torch.arange(22))
    expected = total / 8**2
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    expected = leaf.grad.reshape(-1, DIM)
    np.testing.assert_allclose(slope.projected, expected, rtol=1e-3, atol=1e-4 * expected.max())
