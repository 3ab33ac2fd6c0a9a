"""The loss on the hyperboloid beside the one in the ball, to which it is isometric."""

import jax
import numpy as np

from hypjax.geometry import Lorentz, PoincareBall
from hypjax.objectives import pairwise_cross_entropy


def test_losses_and_gradients_equal_those_of_the_ball(float64):
    features = np.random.default_rng(0).normal(size=(12, 5))
    given = {"labels": np.arange(12) // 2, "samples_per_class": 2}

    def loss(features, space):
        points = space.embed(features)
        return pairwise_cross_entropy(points, **given, space=space, temperature=0.2)

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for c in (0.0, 0.1, 1.0):
        ours, theirs = (gradients(features, space(c, 2.3)) for space in (Lorentz, PoincareBall))
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-12)
        np.testing.assert_allclose(ours[1][0], theirs[1][0], rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(ours[1][1].c, theirs[1][1].c, rtol=1e-8)
