"""Comparison of the Poincaré ball with geoopt in float64."""

import jax
import numpy as np
import pytest

from hypjax.geometry import poincare

geoopt = pytest.importorskip("geoopt", reason="needs the parity extra: geoopt")
torch = pytest.importorskip("torch", reason="needs the parity extra: torch")


@pytest.mark.parametrize("c", [0.01, 0.1, 1.0, 10.0])
def test_functions_and_gradients(float64, c):
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(2, 100, 7))
    norms = rng.uniform(0, 0.99, size=(2, 100, 1)) / np.sqrt(c)
    x, y = directions / np.linalg.norm(directions, axis=-1, keepdims=True) * norms
    v = 0.1 * y * (1 - c * np.sum(x * x, axis=-1, keepdims=True))
    ball = geoopt.PoincareBallExact(c=torch.tensor(c, dtype=torch.float64))
    s, t, u = (torch.tensor(array, requires_grad=True) for array in (x, y, v))
    distances = ball.dist(s, t)
    distances.sum().backward()
    slopes = jax.grad(lambda x, y: poincare.dist(x, y, c).sum(), argnums=(0, 1))(x, y)
    compared = {
        "dist": (poincare.dist(x, y, c), distances),
        "dist_matrix": (poincare.dist_matrix(x, y, c), ball.dist(s[:, None], t)),
        "mobius_add": (poincare.mobius_add(x, y, c), ball.mobius_add(s, t, project=False)),
        "expmap0": (poincare.expmap0(3 * x, c), ball.expmap0(3 * s, project=False)),
        "logmap0": (poincare.logmap0(x, c), ball.logmap0(s)),
        "logmap": (poincare.logmap(x, y, c), ball.logmap(s, t)),
        "expmap": (poincare.expmap(x, v, c), ball.expmap(s, u, project=False)),
        "transport": (poincare.transport(x, y, v, c), ball.transp(s, t, u)),
        "lambda_x": (poincare.lambda_x(x, c), ball.lambda_x(s, keepdim=True)),
        "gradient by x": (slopes[0], s.grad),
        "gradient by y": (slopes[1], t.grad),
    }
    for name, (ours, theirs) in compared.items():
        theirs = theirs.detach().numpy()
        tolerance = 1e-8 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=tolerance, err_msg=name)
