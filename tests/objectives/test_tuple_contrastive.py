"""The loss of tuples: its formula, where its gradient is hard, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.geometry import Sphere
from hypjax.objectives import create_objective, koleo, tuple_contrastive
from tests.helpers.losses import BALL, SPHERE, configured

SPACES = {"sphere": SPHERE, "ball": BALL}
SIZE, MARGINS = 4, {"sphere": 1.3, "ball": 3.0}


def features(seed=0, tuples=6, dim=5):
    return np.random.default_rng(seed).normal(size=(tuples * SIZE, dim))


def distance(space, x, y):
    """In float64, from the definitions."""
    if isinstance(space, Sphere):
        return jnp.sqrt(jnp.sum((x - y) ** 2))
    square = jnp.sum((x - y) ** 2)
    rest = (1 - space.c * jnp.sum(x**2)) * (1 - space.c * jnp.sum(y**2))
    return jnp.arccosh(1 + 2 * space.c * square / rest) / jnp.sqrt(space.c)


def transcription(space, margin, points):
    """Tuple by tuple and image by image, as the released code computes it."""
    total = 0.0
    tuples = points.reshape(-1, SIZE, points.shape[-1])
    for anchor, positive, *negatives in tuples:
        total += distance(space, anchor, positive) ** 2 / 2
        for negative in negatives:
            total += jnp.maximum(margin - distance(space, anchor, negative), 0) ** 2 / 2
    return total / len(tuples)


@pytest.mark.parametrize("name", SPACES)
def test_value_and_gradient_equal_the_formula(name):
    space, margin, given = SPACES[name], MARGINS[name], features()

    def loss(x):
        return tuple_contrastive(space.embed(x), size=SIZE, space=space, margin=margin)

    value, gradient = jax.jit(jax.value_and_grad(loss))(given.astype(np.float32))
    with jax.enable_x64(True):
        expected = jax.value_and_grad(lambda x: transcription(space, margin, space.embed(x)))
        right, slope = map(np.asarray, expected(jnp.asarray(given, jnp.float64)))
    np.testing.assert_allclose(value, right, rtol=1e-5)
    assert np.linalg.norm(gradient - slope) < 1e-5 * np.linalg.norm(slope)


@pytest.mark.parametrize("name", SPACES)
def test_equal_images_have_a_finite_gradient(name):
    space = SPACES[name]
    same = np.repeat(features()[:1], SIZE, axis=0).astype(np.float32)

    def loss(x):
        return tuple_contrastive(space.embed(x), size=SIZE, space=space, margin=0.5)

    value, gradient = jax.value_and_grad(loss)(same)
    np.testing.assert_allclose(value, (SIZE - 2) * 0.5**2 / 2, rtol=1e-5)
    assert np.isfinite(gradient).all()


def test_far_negatives_and_other_tuples_do_not_count():
    eye = np.eye(SIZE * 2, dtype=np.float32)
    eye[1], eye[SIZE + 1] = eye[0], eye[SIZE]  # Positives equal their anchors.
    assert tuple_contrastive(eye, size=SIZE, margin=1.4) == 0  # Others are √2 apart.
    twice = np.concatenate([eye[:SIZE], eye[:SIZE]])  # The same tuple again is no negative.
    assert tuple_contrastive(twice, size=SIZE, margin=1.4) == 0


@pytest.mark.parametrize(("shape", "size"), [((7, 3), 4), ((8, 3), 2), ((0, 3), 4), ((8,), 4)])
def test_other_batches_are_refused(shape, size):
    with pytest.raises(ValueError, match=f"tuples of {size}"):
        tuple_contrastive(np.ones(shape, np.float32), size=size)


@pytest.mark.parametrize("name", SPACES)
def test_entropy_does_not_push_an_image_from_its_copies(name):
    """Tuples share negatives: with copies left out, each point's nearest is another image."""
    space = SPACES[name]
    points = np.asarray(space.embed(features(dim=3).astype(np.float32)))
    ids = np.arange(len(points))
    twice, both = np.concatenate([points, points[:5]]), np.concatenate([ids, ids[:5]])
    whole = koleo(points, space=space, ids=ids)
    np.testing.assert_array_equal(whole, koleo(points, space=space))
    value, gradient = jax.value_and_grad(lambda x: koleo(x, space=space, ids=both))(twice)
    separate = -np.log([nearest_length(space, points, i) for i in both])
    np.testing.assert_allclose(value, separate.mean(), rtol=1e-4)
    assert np.isfinite(gradient).all() and np.abs(gradient[:5]).max() > 0


def nearest_length(space, points, i):
    others = np.delete(points, i, axis=0).astype(float)
    return min(float(distance(space, points[i].astype(float), other)) for other in others)


def test_the_objective_adds_entropy_and_has_no_memory():
    config = configured("tuple_contrastive", koleo_weight=4.0)
    assert "memory" not in config.objective and config.objective.margin == 0.85
    config.train.tuples.negatives = SIZE - 2
    objective = create_objective(config)
    assert objective.samples_per_class is None and objective.teacher_decay is None
