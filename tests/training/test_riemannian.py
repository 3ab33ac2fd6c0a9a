"""Riemannian AdamW with a curvature that moves, on a hyperboloid in NumPy."""

import jax
import numpy as np
import optax
import pytest

from hypjax.geometry import poincare
from hypjax.training.riemannian import riemannian_adam

RATE, B1, B2, EPS = 0.05, 0.8, 0.95, 1e-8


def inner(x, y):
    """⟨x, y⟩_L, with the time component first."""
    return np.sum(x[..., 1:] * y[..., 1:], axis=-1, keepdims=True) - x[..., :1] * y[..., :1]


def on_hyperboloid(v, k):
    """Points at the distances 2‖v‖ from the origin, where ⟨x, x⟩_L = −k."""
    length = np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-300)
    radius = 2 * length / np.sqrt(k)
    return np.sqrt(k) * np.concatenate([np.cosh(radius), np.sinh(radius) * v / length], axis=-1)


def tangent_vectors(p, k):
    length = np.maximum(np.linalg.norm(p[:, 1:], axis=-1, keepdims=True), 1e-300)
    return np.sqrt(k) * np.arcsinh(length / np.sqrt(k)) / 2 * p[:, 1:] / length


def transport(x, y, v, k):
    return v + inner(y, v) * (x + y) / (k - inner(x, y))


def centroid(p, weight, k):
    """The normalised sum of points and the origin, which has this weight."""
    v = (1 - weight) * p
    v[:, :1] += weight * np.sqrt(k)
    return np.sqrt(k / -inner(v, v)) * v


def adamw(p, m, s, count, targets, decay, k):
    """A step by the gradient of −2⟨p, t⟩_L, a squared Lorentzian distance."""
    g = -2 * (targets + inner(p, targets) * p / k)
    x = centroid(p, RATE * decay, k)
    g, m = transport(p, x, g, k), transport(p, x, m, k)
    m, s = B1 * m + (1 - B1) * g, B2 * s + (1 - B2) * inner(g, g)
    u = -RATE * m / (1 - B1**count) / (np.sqrt(s / (1 - B2**count)) + EPS)
    length = np.sqrt(inner(u, u) / k)
    moved = np.cosh(length) * x + np.sinh(length) * u / length
    return moved, transport(x, moved, m, k), s


@pytest.mark.parametrize("decay", [0.0, 0.4])
def test_points_and_moments_follow_a_curvature_that_moves(float64, decay):
    v, targets = np.random.default_rng(0).normal(size=(2, 5, 3))
    optimizer = riemannian_adam(RATE, c=None, b1=B1, b2=B2, eps=EPS, weight_decay=decay)

    @jax.jit
    def step(v, state, c):
        def loss(v):
            return 4 * poincare.separation(*(poincare.expmap0(x, c) for x in (v, targets)), c).sum()

        updates, state = optimizer.update(jax.grad(loss)(v), state, v, c=c)
        return optax.apply_updates(v, updates), state

    curvatures = 0.5 * np.exp(np.sin(np.arange(51) / 5))
    p, m, s, state = on_hyperboloid(v, 1 / curvatures[0]), np.zeros((5, 4)), 0, optimizer.init(v)
    for count, (old, new) in enumerate(1 / np.stack([curvatures[:-1], curvatures[1:]], axis=1), 1):
        v, state = step(v, state, 1 / old)
        p, m, s = adamw(p, m, s, count, on_hyperboloid(targets, old), decay, old)
        # The point and its moment go to the new curvature through the origin.
        origins = np.sqrt([[[k, 0, 0, 0]] for k in (old, new)])
        at_origin, expected = transport(p, origins[0], m, old), tangent_vectors(p, old)
        p = on_hyperboloid(expected, new)
        m = transport(origins[1], p, at_origin, new)
        np.testing.assert_allclose(v, expected, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(2 * state.mean, at_origin[:, 1:], rtol=1e-6, atol=1e-8)
