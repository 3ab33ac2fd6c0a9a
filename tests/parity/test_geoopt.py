"""Comparison of the Poincaré ball with geoopt in float64."""

import jax
import numpy as np
import pytest

from hypjax.geometry import poincare

geoopt = pytest.importorskip("geoopt", reason="needs the parity extra: geoopt")
torch = pytest.importorskip("torch", reason="needs the parity extra: torch")

CURVATURES = [0.01, 0.1, 1.0, 10.0]


@pytest.fixture(params=CURVATURES)
def c(request):
    with jax.enable_x64(True):
        yield request.param


def points(seed, c, largest=0.999):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(100, 7))
    norms = rng.uniform(0, largest, size=(100, 1)) / np.sqrt(c)
    return x / np.linalg.norm(x, axis=-1, keepdims=True) * norms


def ball(c):
    return geoopt.PoincareBallExact(c=torch.tensor(c, dtype=torch.float64))


def tensors(*arrays):
    return [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays]


def check(got, expected, rtol=1e-9):
    expected = expected.detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def test_distance(c):
    x, y = points(0, c), points(1, c)
    check(poincare.dist(x, y, c), ball(c).dist(*tensors(x, y)))
    s, t = tensors(x[:30], y[:40])
    check(poincare.dist_matrix(x[:30], y[:40], c), ball(c).dist(s[:, None], t[None]))


def test_gradient_of_the_distance(c):
    x, y = points(0, c, 0.99), points(1, c, 0.99)
    s, t = tensors(x, y)
    ball(c).dist(s, t).sum().backward()
    got = jax.grad(lambda x, y: poincare.dist(x, y, c).sum(), argnums=(0, 1))(x, y)
    check(got[0], s.grad, 1e-8)
    check(got[1], t.grad, 1e-8)


def test_mobius_addition(c):
    x, y = points(0, c), points(1, c)
    check(poincare.mobius_add(x, y, c), ball(c).mobius_add(*tensors(x, y), project=False))


def test_maps_at_the_origin(c):
    x = points(0, c)
    check(poincare.expmap0(3 * x, c), ball(c).expmap0(*tensors(3 * x), project=False))
    check(poincare.logmap0(x, c), ball(c).logmap0(*tensors(x)))


def test_maps_at_a_point(c):
    x, y = points(0, c, 0.99), points(1, c, 0.99)
    check(poincare.logmap(x, y, c), ball(c).logmap(*tensors(x, y)), 1e-8)
    v = 0.1 * y * (1 - c * np.sum(x * x, axis=-1, keepdims=True))
    check(poincare.expmap(x, v, c), ball(c).expmap(*tensors(x, v), project=False))


def test_conformal_factor(c):
    x = points(0, c)
    check(poincare.lambda_x(x, c), ball(c).lambda_x(*tensors(x), keepdim=True))
