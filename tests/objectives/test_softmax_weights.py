"""Weights of negatives against the gradients of the losses themselves."""

import dataclasses

import jax
import numpy as np
import pytest

from hypjax.config import default_config
from hypjax.errors import UserError
from hypjax.objectives import (
    OBJECTIVES,
    PairwiseCrossEntropy,
    create_objective,
    negative_weights,
    softmax_temperature,
)
from tests.helpers.losses import configured, loss_of

CLASSES, SAMPLES = 5, 2
features = np.random.default_rng(0).normal(size=(CLASSES * SAMPLES, 4))


class Shifted:
    """A space whose distances of all pairs have an array added."""

    def __init__(self, space, shift):
        self.space, self.shift = space, shift

    def __getattr__(self, name):
        return getattr(self.space, name)

    def distance_matrix(self, x, y):
        return self.space.distance_matrix(x, y) + self.shift


@pytest.mark.parametrize(
    ("name", "space"),
    [
        ("pairwise_cross_entropy", "poincare"),
        ("hypmix", "poincare"),
        ("supcon", "sphere"),
        ("scalable_nca", "poincare"),
    ],
)
def test_weights_are_the_gradient_of_the_loss(float64, name, space):
    """With two samples of each class, an anchor has one denominator, with all its negatives."""
    config = configured(name, space=space)
    config.train.samples_per_class = SAMPLES
    objective, temperature = create_objective(config), softmax_temperature(config)
    labels, base = np.repeat(np.arange(CLASSES), SAMPLES), objective
    if name == "hypmix":  # Its space follows from its numbers.
        base = PairwiseCrossEntropy(objective.space, temperature, SAMPLES)

    @jax.jit
    @jax.grad
    def by_logit(shift):
        shifted = dataclasses.replace(base, space=Shifted(objective.space, -temperature * shift))
        return loss_of(shifted, ({}, {}), features, labels)[0]

    gradient = by_logit(np.zeros((len(features), len(features))))
    order = np.arange(len(features))
    if name in ("pairwise_cross_entropy", "hypmix"):  # These compare images in another order.
        order = order.reshape(CLASSES, SAMPLES).T.reshape(-1)
    points = objective.space.embed(features[order])
    negatives = labels[order][:, None] != labels[order]
    gradient = np.where(negatives, gradient, 0)
    assert (gradient[negatives] > 0).all()

    distances = objective.space.distance_matrix(points, points)
    weights = negative_weights(distances, negatives, temperature=temperature)
    assert weights.dtype == np.float64
    np.testing.assert_allclose(np.sum(weights, axis=1), 1, rtol=1e-14)
    expected = gradient / np.sum(gradient, axis=1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-10, atol=0)


def test_objectives_without_such_a_softmax_are_refused():
    refused = []
    for name in OBJECTIVES:
        try:
            assert softmax_temperature(default_config(name)) > 0
        except UserError:
            refused.append(name)
    assert len(refused) == len(OBJECTIVES) - 4
