"""Pairwise cross-entropy against a transcription of Eq. 5, HypMix, and weights of negatives."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import validate
from hypjax.errors import UserError
from hypjax.geometry import Fused, PoincareBall
from hypjax.objectives import (
    PairwiseCrossEntropy,
    mixed_space,
    negative_weights,
    pairwise_cross_entropy,
    softmax_temperature,
)
from hypjax.types import Outputs
from tests.helpers.losses import BALL, SPHERE, configured, embedded, loss_of, objective_of


def transcription(z, distance, temperature):
    """Eq. 5 as in the paper: for each ordered pair of subsets, one anchor at a time."""
    classes, samples, _ = z.shape
    total = 0.0
    for i in range(samples):
        for j in range(samples):
            if i == j:
                continue
            losses = []
            for a in range(classes):
                positive = np.exp(-distance(z[a, i], z[a, j]) / temperature)
                negatives = sum(
                    np.exp(-distance(z[a, i], z[b, k]) / temperature)
                    for b in range(classes)
                    for k in (i, j)
                    if b != a
                )
                losses.append(-np.log(positive / (positive + negatives)))
            total += np.mean(losses)
    return total


def ball_distance(x, y, c=0.1):
    """Eq. 2, by Möbius addition."""
    xy, xx, yy = -x @ y, x @ x, y @ y
    w = (-(1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y) / (1 + 2 * c * xy + c**2 * xx * yy)
    return 2 / np.sqrt(c) * np.arctanh(np.sqrt(c) * np.linalg.norm(w))


def sphere_distance(x, y):
    """Eq. 4."""
    return np.sum((x / np.linalg.norm(x) - y / np.linalg.norm(y)) ** 2)


def embeddings(space, seed=0, shape=(4, 3, 5), dtype=np.float64):
    features = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    return np.asarray(embedded(space, features)[0])


@pytest.mark.parametrize(
    ("space", "distance"),
    [(BALL, ball_distance), (SPHERE, sphere_distance)],
    ids=["ball", "sphere"],
)
def test_value_and_gradient_equal_the_formula_of_the_paper(float64, space, distance):
    z = embeddings(space)
    loss = lambda z: pairwise_cross_entropy(z, space=space, temperature=0.2)  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(loss))(z)
    np.testing.assert_allclose(value, transcription(z, distance, 0.2), rtol=1e-10)
    tangent = np.random.default_rng(1).normal(size=z.shape)
    if space is SPHERE:  # Only tangent directions: off the sphere the two formulas differ.
        tangent -= np.sum(tangent * z, axis=-1, keepdims=True) * z
    step = 1e-6
    numeric = (
        transcription(z + step * tangent, distance, 0.2)
        - transcription(z - step * tangent, distance, 0.2)
    ) / (2 * step)
    np.testing.assert_allclose(np.sum(gradient * tangent), numeric, rtol=1e-6)


@jax.jit
@jax.value_and_grad
def loss_and_gradient(features, space, temperature=0.2):
    return pairwise_cross_entropy(space.embed(features), space=space, temperature=temperature)


@pytest.mark.parametrize("spread", [0.1, 1e-4])
@pytest.mark.parametrize("centres", [1, 30], ids=["collapsed batch", "collapsed classes"])
@pytest.mark.parametrize("space", [BALL, PoincareBall(1.0, 2.3), SPHERE], ids=str)
def test_gradients_of_small_distances_are_those_of_float64(space, centres, spread):
    """Of 30 classes with 4 samples each, around one centre or those of the classes."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(centres, 1, 128))
    centres *= 2.2 / np.linalg.norm(centres, axis=-1, keepdims=True)
    features = centres + spread * rng.normal(size=(30, 4, 128)) / 128**0.5
    features = features.astype(np.float32)
    loss, gradient = loss_and_gradient(features, space)
    with jax.enable_x64(True):
        expected, exact = loss_and_gradient(features.astype(np.float64), space)
        exact = np.asarray(exact)
    assert loss == pytest.approx(float(expected), rel=2e-5)
    error = np.linalg.norm(gradient - exact) / np.linalg.norm(exact)
    # Rounding to float32 changes differences of features by 2⁻²⁴·2.2/spread.
    assert error < 2e-5 + 2e-7 / spread + (1e-6 / spread if space is SPHERE else 0)


def test_collapsed_and_extreme_embeddings_have_finite_losses_and_gradients():
    """If all points coincide, the loss is that of random guesses."""
    far = jnp.asarray(embeddings(PoincareBall(0.1, None), dtype=np.float32))
    loss = jax.jit(jax.value_and_grad(functools.partial(pairwise_cross_entropy, space=BALL)))
    value, gradient = loss(np.full((6, 3, 4), 0.3, "f"), temperature=0.2)
    np.testing.assert_allclose(value, 3 * 2 * np.log(2 * 6 - 1), rtol=1e-2)
    assert np.isfinite(gradient).all()
    value, gradient = loss(far, temperature=1e-3)
    assert np.isfinite(value) and np.isfinite(gradient).all() and np.any(gradient)


def test_a_flat_batch_with_labels_has_the_loss_of_the_grouped_one():
    """Its images are in another order."""
    grouped = embeddings(BALL, dtype=np.float32)
    labels = np.random.default_rng(0).permutation(np.repeat([7, 3, 9, 1], 3))
    flat = np.empty((12, 5), np.float32)
    for row, label in enumerate((1, 3, 7, 9)):
        flat[labels == label] = grouped[row]
    settings = {"space": BALL, "temperature": 0.2}

    @jax.jit
    def all_forms(grouped, flat):
        ordered = pairwise_cross_entropy(flat, labels=labels, **settings)
        return pairwise_cross_entropy(grouped, **settings), ordered

    expected, ordered = all_forms(grouped, flat)
    np.testing.assert_allclose(ordered, expected, rtol=1e-6)

    @jax.jit
    def traced(flat, labels):
        return pairwise_cross_entropy(flat, labels=labels, samples_per_class=3, **settings)

    np.testing.assert_allclose(traced(flat, labels), expected, rtol=1e-6)
    for unbalanced in (np.arange(12) // 6, np.array([0] * 2 + [1] * 4 + [2] * 6)):
        assert np.isnan(traced(flat, unbalanced))


def test_batches_that_are_not_balanced_are_refused():
    loss = functools.partial(pairwise_cross_entropy, space=BALL, temperature=0.2)
    with pytest.raises(ValueError, match="needs 4 images in each class, got 1 t"):
        loss(jnp.ones((12, 5)), labels=[0] * 4 + [1] * 4 + [2] * 3 + [3])
    with pytest.raises(ValueError, match="at least 2 classes and 2 samples, got 4 and 1"):
        loss(jnp.ones((4, 1, 3)))


MIX = {"sphere_temperature": 0.05, "ball_temperature": 0.2}
FEATURES = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)


def test_hypmix_is_the_loss_of_either_space_without_the_other():
    """In the ball, that of normalised features."""

    @jax.jit
    @jax.value_and_grad
    def hyperbolic(features):
        points = BALL.embed(SPHERE.embed(features))
        return pairwise_cross_entropy(points, space=BALL, temperature=0.2)

    of_sphere = mixed_space(BALL, **MIX, ball_weight=0.0)
    of_ball = mixed_space(BALL, **MIX | {"sphere_temperature": jnp.inf}, ball_weight=1.0)
    actual = (
        *loss_and_gradient(FEATURES, of_sphere, 1.0),
        *loss_and_gradient(FEATURES, of_ball, 1.0),
    )
    expected = *loss_and_gradient(FEATURES, SPHERE, 2 * 0.05), *hyperbolic(FEATURES)
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_weights", "curvatures"), [((), (0.1,)), ((), (0.1, 1.0)), ((0.3, 0.7), (0.1,))], ids=str
)
def test_fused_spaces_of_a_configuration(loss_weights, curvatures):
    """HypMix; a sphere and two balls; and the losses of a sphere and a ball."""
    balls = [PoincareBall(c, 2.3) for c in curvatures]
    config, samples = configured("pairwise_cross_entropy", loss_weights=loss_weights), 3
    parts = "sphere", *["poincare"] * len(balls)
    config.objective.update(space="fused", parts=parts, curvatures=curvatures, temperature=1.0)
    config.objective.weights = (10.0, *[15.0] * len(balls))
    config.train.samples_per_class = samples
    validate(config)
    objective = objective_of(config)
    if len(balls) == 1 and not loss_weights:
        assert objective.space == mixed_space(BALL, **MIX, ball_weight=3.0)

    @jax.jit
    def values(features):
        loss, _ = objective.loss(Outputs(None, features.reshape(-1, features.shape[-1])))
        if not loss_weights:
            terms = (SPHERE, 10.0), *((ball, 15.0) for ball in balls)
            space = Fused(terms)
            return loss, pairwise_cross_entropy(space.embed(features), space=space, temperature=1)
        x = SPHERE.embed(features)
        of_sphere = pairwise_cross_entropy(x, space=SPHERE, temperature=0.1)
        of_ball = pairwise_cross_entropy(BALL.embed(x), space=BALL, temperature=1 / 15)
        return loss, 0.3 * of_sphere + 0.7 * of_ball

    np.testing.assert_allclose(*values(FEATURES), rtol=1e-5)
    config.objective.update(loss_weights=(1.0,))
    with pytest.raises(UserError, match="one number for each part"):
        objective_of(config)
    config.objective.update(weights=(1.0,), loss_weights=())
    with pytest.raises(UserError, match="objective.weights"):
        validate(config)


class Shifted:
    """A space whose distances of all pairs have an array added."""

    def __init__(self, space, shift):
        self.space, self.shift = space, shift

    def __getattr__(self, name):
        return getattr(self.space, name)

    def distance_matrix(self, x, y):
        return self.space.distance_matrix(x, y) + self.shift


@pytest.mark.parametrize(
    ("name", "space", "samples"),
    [
        ("pairwise_cross_entropy", "poincare", 3),
        ("pairwise_cross_entropy", "sphere", 2),
        ("hypmix", "poincare", 3),
        ("supcon", "sphere", 2),
        ("scalable_nca", "poincare", 2),
    ],
)
def test_weights_are_the_gradient_of_the_loss(float64, name, space, samples):
    """By −distance / temperature, summed over an anchor's positives."""
    features = np.random.default_rng(0).normal(size=(5 * samples, 4))
    config = configured(name, space=space)
    config.train.samples_per_class = samples
    objective, temperature = objective_of(config), softmax_temperature(config.objective)
    labels, base = np.repeat(np.arange(5), samples), objective
    if name == "hypmix":  # Its space follows from its numbers.
        base = PairwiseCrossEntropy(objective.space, temperature, samples)

    @jax.jit
    @jax.grad
    def by_logit(shift):
        shifted = dataclasses.replace(base, space=Shifted(objective.space, -temperature * shift))
        return loss_of(shifted, ({}, {}), features, labels)[0]

    gradient = by_logit(np.zeros((len(features), len(features))))
    order, anchors = np.arange(len(features)), len(features)
    if name in ("pairwise_cross_entropy", "hypmix"):  # These compare images in another order.
        order, anchors = order.reshape(5, samples).T.reshape(-1), 5
    distances = embedded(objective.space, features)[1]
    expected, subset = np.zeros(distances.shape), np.arange(len(labels)) % samples
    for anchor, positive in itertools.permutations(range(len(labels)), 2):
        if labels[anchor] == labels[positive]:  # Negatives are those of the pair's two subsets.
            in_pair = np.isin(subset, subset[[anchor, positive]]) & (labels != labels[anchor])
            masks = (np.arange(len(labels)) == positive)[None], in_pair[None]
            weights = negative_weights(distances[anchor][None], *masks, temperature=temperature)
            assert weights.dtype == np.float64
            expected[anchor] += weights[0] / anchors
    expected = expected[order[:, None], order]
    negatives = labels[order][:, None] != labels[order]
    assert (expected[negatives] > 0).all() and not expected[~negatives].any()
    np.testing.assert_allclose(gradient[negatives], expected[negatives], rtol=1e-10)
