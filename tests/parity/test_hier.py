"""HIER's loss against a transcription in PyTorch over geoopt, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.geometry import PoincareBall
from hypjax.objectives import hier

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


def ours(features, hierarchy, indices, noise):
    ball = PoincareBall(C, RADIUS, riemannian=True)
    x, p = ball.embed(features), ball.embed(hierarchy)
    return hier(x, p, indices, noise, space=ball, margin=MARGIN, temperature=TEMPERATURE)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_value_and_gradients(float64, dtype):
    leaves = [torch.tensor(each, requires_grad=True) for each in (FEATURES, HIERARCHY)]
    expected = transcribed(*leaves, INDICES, torch.tensor(NOISE))
    expected.backward()
    given = (jnp.asarray(each, dtype) for each in (FEATURES, HIERARCHY))
    program = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))
    value, slopes = program(*given, INDICES, jnp.asarray(NOISE, dtype))
    assert expected > 0.1
    np.testing.assert_allclose(value, expected.item(), rtol=1e-12 if dtype == "float64" else 1e-5)
    for slope, leaf in zip(slopes, leaves, strict=True):
        tolerance = 1e-9 if dtype == "float64" else 1e-4
        largest = leaf.grad.abs().max().item()
        np.testing.assert_allclose(slope, leaf.grad, rtol=tolerance, atol=tolerance * largest)
