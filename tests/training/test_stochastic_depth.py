"""Stochastic depth: the draws of its masks."""

import jax
import numpy as np

from hypjax.models.vit import draw_drop_path_masks

RATE, DEPTH = 0.4, 3


def test_factors_are_0_or_the_inverse_of_the_probability_to_keep():
    factors = np.asarray(draw_drop_path_masks(jax.random.key(0), RATE, DEPTH, 10_000))
    probability = 1 - np.array([0, RATE / 2, RATE])
    assert factors.shape == (10_000, DEPTH, 2) and np.all(factors[:, 0] == 1)
    for block in range(1, DEPTH):
        values = np.unique(factors[:, block])
        np.testing.assert_allclose(values, [0, 1 / probability[block]], rtol=1e-6)
        error = 5 * np.sqrt(probability[block] * (1 - probability[block]) / 10_000)
        both = factors[:, block] > 0
        np.testing.assert_allclose(both.mean(axis=0), probability[block], atol=error)
        assert abs(both.all(axis=1).mean() - probability[block] ** 2) < error  # Independent.
