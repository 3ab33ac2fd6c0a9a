"""HypMix against the losses that it joins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import default_config
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.objectives import create_objective, mixed_space, pairwise_cross_entropy

BALL = PoincareBall(0.1, 2.3)
NUMBERS = {"sphere_temperature": 0.05, "ball_temperature": 0.2}
features = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)


@jax.jit
@jax.value_and_grad
def loss(features, space, temperature):
    return pairwise_cross_entropy(space.embed(features), space=space, temperature=temperature)


def assert_equal(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


def test_without_the_ball_it_is_the_spherical_loss():
    space = mixed_space(BALL, **NUMBERS, ball_weight=0.0)
    assert_equal(loss(features, space, 1.0), loss(features, Sphere(), 2 * 0.05))


def test_without_the_sphere_it_is_the_hyperbolic_loss_of_normalised_features():
    space = mixed_space(BALL, sphere_temperature=jnp.inf, ball_temperature=0.2, ball_weight=1.0)

    @jax.jit
    @jax.value_and_grad
    def hyperbolic(features):
        points = BALL.embed(Sphere().embed(features))
        return pairwise_cross_entropy(points, space=BALL, temperature=0.2)

    assert_equal(loss(features, space, 1.0), hyperbolic(features))


def test_configurations_describe_it():
    config = default_config("hypmix")
    config.objective.ball_weight = 8.0
    objective = create_objective(config)
    assert objective.space == mixed_space(BALL, **NUMBERS, ball_weight=8.0)
    assert objective.temperature == 1
    config.objective.space = "sphere"
    with pytest.raises(UserError, match="config.objective.space is sphere; it must be poincare"):
        create_objective(config)
