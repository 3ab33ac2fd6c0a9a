"""The loss of images and captions against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Lorentz, PoincareBall, Product, Sphere
from hypjax.models import Embedder
from hypjax.models.encoder import FeatureEncoder
from hypjax.objectives import create_objective
from hypjax.objectives.base import LossSettings
from hypjax.objectives.captions import Boxes, caption_loss
from hypjax.objectives.image_text import hycoclip_loss
from hypjax.types import IMAGES, TEXTS, Batch
from hypjax.types import POSITIVES as MARKS
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


@pytest.mark.parametrize("count", [1, 6])
def test_with_boxes_the_loss_is_that_of_hycoclip_and_phyclip(count):
    """Up to four parts are computed one by one, and more of one kind as one."""
    curvatures = np.linspace(0.3, 1.7, count)
    parts = tuple((Lorentz(c, None), 1 / count) for c in curvatures)
    space = parts[0][0] if count == 1 else Product(parts, summed=True)
    with jax.enable_x64(True):
        features = np.random.default_rng(0).normal(size=(4, 5, 6 * count))

        @jax.jit
        def ours(features, exist):
            images, texts, *of_boxes = map(space.embed, features)
            boxes, weights = Boxes(*of_boxes, exist), {"temperature": TAU, "entailment": WEIGHT}
            return caption_loss(images, texts, POSITIVES, space, boxes=boxes, **weights)

        def theirs(features):
            settings = {"scale": 1 / TAU, "positives": POSITIVES, "weight": WEIGHT}
            return hycoclip_loss(*map(space.embed, features), c=curvatures, **settings)

        gradient = jax.jit(jax.value_and_grad(ours))
        pairs = zip(
            gradient(features, np.ones(5, bool)),
            jax.jit(jax.value_and_grad(theirs))(features),
            strict=True,
        )
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        exist = np.array([True, False, True, True, False])
        found = gradient(features, exist)[1]
        assert not found[2:, ~exist].any() and found[2:, exist].any(axis=-1).all()
        whole, none = ours(features, exist), ours(features, ~exist)
        both = ours(features, np.ones(5, bool)) * 5 - 3 * whole - 2 * none
        np.testing.assert_allclose(both, 0, atol=1e-12)  # Each row of boxes counts alike.


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


@pytest.mark.parametrize("name", ["ball", "hyperboloid", "product"])
def test_captions_are_held_by_the_cones_of_their_phrases(name):
    space = SPACES[name]
    with jax.enable_x64(True):
        images, texts, phrases = (points(space, seed) for seed in range(3))
        phrases = phrases.at[1].set(texts[1])  # A caption without phrases adds nothing.

        def loss(**phrases):
            return caption_loss(images, texts, POSITIVES, space, temperature=TAU, **phrases)

        differs = np.array([0, 2, 3, 4])
        pairs = zip(parted(space, texts[differs]), parted(space, phrases[differs]), strict=True)
        parts = space.parts or ((space, 1),)
        angles = [
            outside(on_hyperboloid(part, y), on_hyperboloid(part, x), C)
            for (part, _), (x, y) in zip(parts, pairs, strict=True)
            if not isinstance(part, Sphere)
        ]
        found = loss(phrases=phrases, phrase_entailment=WEIGHT) - loss()
        np.testing.assert_allclose(found, WEIGHT * np.mean(angles) * 4 / 5, rtol=1e-9)


def test_train_steps_with_texts_of_a_small_norm_hold_their_images():
    """Without the bound, texts move to the radius of the images, where cones are narrow."""
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(12, 8)).astype(np.float32)
    labels = np.repeat(np.arange(12), 4)
    inputs = kinds[labels] + 0.3 * rng.normal(size=(48, 8)).astype(np.float32), kinds[labels]
    positives = labels[:, None] == labels
    fields = {"name": "captions", "space": "poincare", "temperature": 0.2, "curvatures": ()}
    fields |= {"c": 0.1, "clip_radius": 2.3, "entailment": 0.2, "phrases": 0.0}
    objective = create_objective(LossSettings(fields, None, False, 0))

    def shares(max_norm):
        heads = [Embedder(FeatureEncoder(8), 8, max_norm=x) for x in (None, max_norm)]
        keys = jax.random.split(jax.random.key(0))
        params = [x.init(key, y) for x, key, y in zip(heads, keys, inputs, strict=True)]

        def loss(params):
            outputs = [x.apply(p, y) for x, p, y in zip(heads, params, inputs, strict=True)]
            batch = Batch({MARKS: positives}, labels, labels, labels > 99)
            return objective.loss(dict(zip((IMAGES, TEXTS), outputs, strict=True)), batch)

        @jax.jit
        def step(params, state):
            gradient, metrics = jax.grad(loss, has_aux=True)(params)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, metrics["entailed_share"]

        optimizer = optax.adam(0.03)
        state, found = optimizer.init(params), []
        for _ in range(100):
            params, state, share = step(params, state)
            found.append(float(share))
        return found

    bounded = shares(0.4)
    assert bounded[-1] > max(bounded[0], shares(None)[-1]) + 0.5


def test_equal_points_have_finite_gradients():
    x = jnp.zeros((3, 4)).at[1].set(0.1)
    pairs = np.eye(3, dtype=bool)

    def loss(y):
        return caption_loss(x, y, pairs, BALL, temperature=1.0, entailment=1.0)

    assert np.isfinite(jax.grad(loss)(x)).all()


def test_a_space_without_cones_has_no_entailment():
    fields = {"name": "captions", "space": "sphere", "temperature": 0.1, "curvatures": ()}
    with pytest.raises(UserError, match="objective.space=sphere has no cones; leave out"):
        create_objective(LossSettings(fields | {"entailment": 0.2, "phrases": 0.0}, None, False, 0))
    create_objective(LossSettings(fields | {"entailment": 0.0, "phrases": 0.0}, None, False, 0))


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
