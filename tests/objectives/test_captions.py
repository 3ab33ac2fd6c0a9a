"""The loss of images and captions against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Lorentz, PoincareBall, Product, Sphere
from hypjax.objectives import create_objective
from hypjax.objectives.base import LossSettings
from hypjax.objectives.captions import caption_loss
from tests.objectives.test_image_text import outside

C, TAU, WEIGHT = 0.4, 0.3, 0.7
BALL, HYPERBOLOID = PoincareBall(C, clip_radius=None), Lorentz(C, None)
SPACES = {
    "ball": BALL,
    "hyperboloid": HYPERBOLOID,
    "sphere": Sphere(),
    "product": Product(((BALL, 1.0), (Sphere(), 2.0), (HYPERBOLOID, 0.5))),
}
# Images 0 and 2 are one image, whose captions are 0, 2 and 4; texts 1 and 3 are equal.
POSITIVES = np.eye(5, dtype=bool)
POSITIVES[[0, 0, 2, 2], [2, 4, 0, 4]] = POSITIVES[[1, 3], [3, 1]] = True


def points(space, seed):
    return space.embed(np.random.default_rng(seed).normal(size=(5, 6)) * 0.8)


def on_hyperboloid(part, x):
    if isinstance(part, PoincareBall):
        return 2 * x / (1 - C * jnp.sum(x**2, axis=1, keepdims=True))
    return x


def one_direction(logits, positives):
    """Each target against the row's other items that are no targets."""
    losses = []
    for row, targets in zip(np.exp(logits), positives, strict=True):
        others = row[~targets].sum()
        losses.append(np.mean([-np.log(x / (x + others)) for x in row[targets]]))
    return np.mean(losses)


@pytest.mark.parametrize("name", SPACES)
def test_the_loss_is_that_of_the_formula(name):
    space = SPACES[name]
    with jax.enable_x64(True):
        images, texts = points(space, 0), points(space, 1)
        weight = 0.0 if name == "sphere" else WEIGHT
        found = caption_loss(images, texts, POSITIVES, space, temperature=TAU, entailment=weight)
        logits = -np.asarray(space.distance(images[:, None], texts[None])) / TAU
        parts = space.parts or ((space, 1),)
        pairs = zip(parts, parted(space, images), parted(space, texts), strict=True)
        angles = [
            outside(on_hyperboloid(part, y), on_hyperboloid(part, x), C)
            for (part, _), x, y in pairs
            if not isinstance(part, Sphere)
        ]
        expected = one_direction(logits, POSITIVES) + one_direction(logits.T, POSITIVES.T)
        np.testing.assert_allclose(found, expected / 2 + weight * np.mean(angles or [0]), rtol=1e-9)


def parted(space, x):
    return space.split(x) if space.parts else [x]


def test_positives_do_not_repel():
    """An image moves away from no other caption of its own, and from no equal text."""
    images, texts = points(BALL, 0), points(BALL, 1)

    def toward(i, j):  # How much the loss of image i falls as its distance to text j falls.
        def loss(shift):
            matrix = BALL.distance_matrix(images, texts).at[i, j].add(shift)
            moved = type("Moved", (PoincareBall,), {"distance_matrix": lambda *_: matrix})(C)
            return caption_loss(images, texts, POSITIVES, moved, temperature=TAU)

        return jax.grad(loss)(0.0)

    signs = np.sign([[toward(i, j) for j in range(5)] for i in range(5)])
    np.testing.assert_array_equal(signs, np.where(POSITIVES, 1, -1))


def test_equal_points_have_finite_gradients():
    x = jnp.zeros((3, 4)).at[1].set(0.1)
    pairs = np.eye(3, dtype=bool)

    def loss(y):
        return caption_loss(x, y, pairs, BALL, temperature=1.0, entailment=1.0)

    assert np.isfinite(jax.grad(loss)(x)).all()


def test_a_space_without_cones_has_no_entailment():
    fields = {"name": "captions", "space": "sphere", "temperature": 0.1, "curvatures": ()}
    with pytest.raises(UserError, match="objective.space=sphere has no cones; leave out"):
        create_objective(LossSettings(fields | {"entailment": 0.2}, None, False, 0))
    create_objective(LossSettings(fields | {"entailment": 0.0}, None, False, 0))


def test_gradients_by_temperature_and_curvature_are_finite_differences(float64):
    images, texts = np.random.default_rng(5).normal(size=(2, 6, 4))
    positives = np.eye(6, dtype=bool)

    def loss(logs):
        temperature, c = jnp.exp(logs)
        space = PoincareBall(c, None)
        points = space.embed(images), space.embed(texts)
        return caption_loss(*points, positives, space, temperature=temperature, entailment=0.2)

    logs = jnp.log(jnp.array([0.3, 0.5]))
    steps = 1e-5 * np.eye(2)
    differences = [(loss(logs + step) - loss(logs - step)) / 2e-5 for step in steps]
    np.testing.assert_allclose(jax.grad(loss)(logs), differences, rtol=1e-5)
