"""Stochastic depth in the encoder, and in the train step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models.vit import draw_drop_path_masks
from hypjax.objectives import PairwiseCrossEntropy, ProblemSizes
from hypjax.training.states import random_state
from hypjax.training.step import make_train_step
from tests.helpers.steps import learner_of, random_batch

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


class Spy(PairwiseCrossEntropy):
    """Also reports the head's outputs."""

    def loss(self, outputs):
        return super().loss(outputs)[0], {"seen": outputs.projected}


def outputs(load_glyphs, *overrides, rows=24, steps=(0,)):
    """The head's outputs of 24 images, padded to some rows, with the first parameters, by step."""
    config = load_glyphs("model.drop_path=0.5", "model.depth=2", *overrides)
    learner = learner_of(config)
    learner = dataclasses.replace(learner, objective=Spy(learner.objective.space, 0.2, 2))
    state, batch = random_state(learner, ProblemSizes(12, 2, 32, 8, 100, 24)), random_batch()
    pad = [(0, rows - 24)]
    images, flips = np.pad(batch.images, pad + [(0, 0)] * 3), np.pad(batch.flips, pad)
    batch = batch._replace(images=images, flips=flips)

    @jax.jit  # Without what follows the outputs, it compiles faster.
    def seen(state):
        return make_train_step(learner)(state, batch)[1]["seen"]

    return [np.asarray(seen(state._replace(step=jnp.int32(step)))) for step in steps]


@pytest.mark.slow
def test_noise_depends_on_seed_step_and_place_alone(load_glyphs):
    """Not on slices, which pad 24 images to 25, nor on what is computed again."""
    one, other = outputs(load_glyphs, steps=(0, 1))
    (again,) = outputs(load_glyphs, "run.microbatch=5", "run.remat=True", rows=25)
    np.testing.assert_allclose(again, one, rtol=1e-4, atol=1e-4)
    assert 12 < np.sum(np.abs(other - one).max(axis=1) > 1e-3) <= 24
