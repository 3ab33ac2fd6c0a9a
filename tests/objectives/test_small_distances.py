"""The loss and its gradient where points are close, in float32 against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.geometry import PoincareBall, Sphere
from hypjax.objectives import pairwise_cross_entropy


@jax.jit
@jax.value_and_grad
def _loss_and_gradient(features, space):
    return pairwise_cross_entropy(space.embed(features), space=space, temperature=0.2)


def loss_and_gradient(features, space, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        loss, gradient = _loss_and_gradient(jnp.asarray(features, dtype), space)
        return float(loss), np.asarray(gradient, np.float64)


def batch(centres, spread):
    """Features of 30 classes with 4 samples each, at given centres of their classes."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(centres, 1, 128))
    centres *= 2.2 / np.linalg.norm(centres, axis=-1, keepdims=True)
    return (centres + spread * rng.normal(size=(30, 4, 128)) / 128**0.5).astype(np.float32)


@pytest.mark.parametrize("spread", [0.1, 1e-3, 1e-4])
@pytest.mark.parametrize("centres", [1, 30], ids=["collapsed batch", "collapsed classes"])
@pytest.mark.parametrize("space", [PoincareBall(0.1, 2.3), PoincareBall(1.0, 2.3), Sphere()])
def test_gradients_of_small_distances_are_those_of_float64(space, centres, spread):
    features = batch(centres, spread)
    loss, gradient = loss_and_gradient(features, space, jnp.float32)
    expected, expected_gradient = loss_and_gradient(features, space, jnp.float64)
    assert loss == pytest.approx(expected, rel=2e-5)
    error = np.linalg.norm(gradient - expected_gradient) / np.linalg.norm(expected_gradient)
    # Rounding to float32 changes differences of features by 2⁻²⁴·2.2/spread.
    assert error < 2e-5 + 2e-7 / spread + (1e-6 / spread if isinstance(space, Sphere) else 0)
