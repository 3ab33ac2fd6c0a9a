"""Losses of images and texts against the published formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.geometry import Lorentz, Product
from hypjax.geometry.learned import within_bounds
from hypjax.objectives import image_text

N, SCALE = 12, 14.3


def time(x, c):
    return jnp.sqrt(1 / c + jnp.sum(x**2, axis=-1))


def product(x, y, c):
    return jnp.sum(x * y, axis=-1) - time(x, c) * time(y, c)


def geodesic(x, y, c):
    return jnp.arccosh(jnp.maximum(-c * product(x, y, c), 1)) / jnp.sqrt(c)


def exterior(x, y, c):
    inner = c * product(x, y, c)
    norm = jnp.sqrt(jnp.sum(x**2, axis=-1))
    return jnp.arccos((time(y, c) + inner * time(x, c)) / (norm * jnp.sqrt(inner**2 - 1)))


def aperture(x, c):
    sine = 0.2 / jnp.sqrt(c * jnp.sum(x**2, axis=-1))
    wide = sine >= 1
    return jnp.where(wide, jnp.pi / 2, jnp.arcsin(jnp.where(wide, 0, sine)))


def outside(x, y, c, eta=1.0):
    return jnp.mean(jnp.maximum(exterior(x, y, c) - eta * aperture(x, c), 0))


def diagonal_cross_entropy(logits):
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits, axis=1)))


def meru(x, y, c):
    logits = -SCALE * geodesic(x[:, None], y[None], c)
    both = diagonal_cross_entropy(logits) + diagonal_cross_entropy(logits.T)
    return both / 2 + 0.2 * outside(y, x, c)


def hycoclip(x, y, p, q, c):
    def loss(a, b):
        return diagonal_cross_entropy(-SCALE * geodesic(a[:, None], b[None], c))

    entailed = outside(y, x, c, 0.7) + outside(q, p, c, 0.7)
    entailed += outside(p, x, c, 1.2) + outside(q, y, c, 1.2)
    return (loss(x, y) + loss(y, x) + loss(p, y) + loss(q, x)) / 4 + 0.2 * entailed / 2


def phyclip(x, y, p, q, c):
    split = [z.reshape(N, len(c), -1).swapaxes(0, 1) for z in (x, y, p, q)]

    def loss(a, b):
        factors = [geodesic(s[:, None], t[None], k) for s, t, k in zip(a, b, c, strict=True)]
        return diagonal_cross_entropy(-SCALE * sum(factors) / len(c))

    def entailed(a, b, eta):
        return sum(outside(s, t, k, eta) for s, t, k in zip(a, b, c, strict=True)) / len(c)

    x, y, p, q = split
    cones = entailed(y, x, 0.7) + entailed(q, p, 0.7) + entailed(p, x, 1.2) + entailed(q, y, 1.2)
    return (loss(x, y) + loss(y, x) + loss(p, y) + loss(q, x)) / 4 + 0.2 * cones / 2


def points(count, dim, radius, c):
    """Points at distances up to radius/√c from the origin, float32."""
    rng = np.random.default_rng(0)
    v = rng.normal(size=(count, N, dim))
    v *= rng.uniform(0.1, 1, (count, N, 1)) * radius / np.linalg.norm(v, axis=-1, keepdims=True)
    norm = np.linalg.norm(v, axis=-1, keepdims=True)
    return (np.sinh(norm) * v / norm / np.sqrt(c)).astype(np.float32)


def our_meru(x, y, c):
    return image_text.meru_loss(x, y, c=c, scale=SCALE)


def our_hycoclip(x, y, p, q, c):
    return image_text.hycoclip_loss(x, y, p, q, c=c, scale=SCALE)


@functools.cache
def compiled(loss, arguments):
    return jax.jit(jax.value_and_grad(loss, tuple(range(arguments))))


def compare(ours, theirs, *arguments):
    """Compares values and gradients of a loss in float32 with the formula in float64."""
    loss, slopes = compiled(ours, len(arguments))(*arguments)
    with jax.enable_x64(True):
        exact = [np.float64(z) for z in arguments]
        expected, exact_slopes = compiled(theirs, len(arguments))(*exact)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for slope, exact_slope in zip(slopes, exact_slopes, strict=True):
        assert slope.dtype == jnp.float32
        bound = 1e-4 * np.abs(exact_slope).max()
        np.testing.assert_allclose(slope, exact_slope, rtol=0, atol=bound)


@pytest.mark.parametrize("dim", [4, 512])
def test_distances_and_entailment_of_pairs(dim):
    for radius, c in [(0.1, 1.0), (3.0, 0.1), (5.0, 1.0), (7.0, 1.0), (7.0, 10.0)]:
        x, y = points(2, dim, radius, c)
        distances = image_text.distances(x, y, c)
        entailment = image_text.pair_entailment(x, y, c, eta=0.7, slope=0.1)  # UNCHA's.
        with jax.enable_x64(True):
            x, y = np.float64(x), np.float64(y)
            expected = geodesic(x[:, None], y[None], c)
            angle = exterior(x, y, c)
            pulled = jnp.maximum(angle - 0.7 * aperture(x, c), 0) + 0.1 * angle
        np.testing.assert_allclose(distances, expected, rtol=1e-5)
        np.testing.assert_allclose(entailment, pulled, atol=1e-5)


@pytest.mark.parametrize("dim", [4, 512])
def test_meru_and_hycoclip(dim):
    for radius, c in [(0.5, 1.0), (3.0, 0.1), (7.0, 1.0), (7.0, 10.0)]:
        x, y, p, q = points(4, dim, radius, c)
        compare(our_meru, meru, x, y, np.float32(c))
        compare(our_hycoclip, hycoclip, x, y, p, q, np.float32(c))


OWNERS = np.array([0, 0, 3, 5, 5, 5, 6, 7, 8, 9, 10, 11], np.int32)


def uncha(x, y, p, q, c):
    def logits(a, b, scale):
        return -scale * geodesic(a[:, None], b[None], c)

    def both(table):
        return (diagonal_cross_entropy(table) + diagonal_cross_entropy(table.T)) / 2

    def pairs(apex, inner, eta):
        angle = exterior(apex, inner, c)
        return jnp.maximum(angle - eta * aperture(apex, c), 0) + 0.1 * angle

    loss = both(logits(x, y, 14.3)) + both(logits(p, q, 20.0))
    entailed = jnp.mean(pairs(y, x, 0.7)) / 2 + jnp.mean(pairs(q, p, 0.7)) / 2
    for box, whole, other in ((p, x[OWNERS], y[OWNERS]), (q, y[OWNERS], x[OWNERS])):
        u = jnp.log(1 + jnp.exp(-jnp.sqrt(jnp.sum(box**2, axis=-1))))
        factor = jax.lax.stop_gradient(jnp.clip(jnp.exp(-u / 2), 0.1, 10))
        loss += diagonal_cross_entropy(factor[:, None] * logits(box, other, 16.7)) / 2
        pair = pairs(box, whole, 1.2)
        share = jnp.exp(u) / jnp.sum(jnp.exp(u))
        entropy = -jnp.sum(share * jnp.log(share))
        error = jax.lax.stop_gradient(pair) / (jnp.clip(jnp.exp(u), 1e-6, 1e6) + 1e-6)
        entailed += jnp.mean(pair) / 4 + 10 * jnp.mean(error / 2 + u / 2 + entropy)
    return loss + 0.2 * entailed


def our_uncha(x, y, p, q, c):
    return image_text.uncha_loss(x, y, p, q, OWNERS, c=c, scales=(14.3, 20.0, 16.7))


@pytest.mark.parametrize("dim", [4, 512])
def test_uncha(dim):
    for radius, c in [(0.5, 1.0), (3.0, 0.1), (7.0, 1.0), (7.0, 10.0)]:
        compare(our_uncha, uncha, *points(4, dim, radius, c), np.float32(c))


def test_uncha_s_boxes_may_be_more_than_images():
    x, y, p, q = points(4, 8, 2.0, 1.0)
    scales, few = (14.3, 20.0, 16.7), np.array([0, 2, 2, 1] * 3)
    loss = jax.jit(image_text.uncha_loss)(x[:3], y[:3], p, q, few, c=1.0, scales=scales)
    wholes = x[few], y[few]  # Repeated, they change the first group and the first relation only.
    repeated = image_text.uncha_loss(*wholes, p, q, np.arange(N), c=1.0, scales=scales)

    def own(a, b):
        pair = image_text.pair_entailment(b, a, 1.0, eta=0.7, slope=0.1)
        table = -14.3 * image_text.distances(a, b, 1.0)
        return image_text.contrastive_loss(table) + 0.1 * jnp.mean(pair)

    np.testing.assert_allclose(loss - own(x[:3], y[:3]), repeated - own(*wholes), rtol=1e-5)


def test_phyclip():
    c = np.array([0.5, 1.0, 3.0], np.float32)
    for radius in (0.5, 7.0):
        factors = [points(4, 8, radius, k) for k in c]
        compare(our_hycoclip, phyclip, *np.concatenate(factors, axis=-1), c)


def test_distances_of_factors_are_those_of_the_summed_product():
    c = (0.5, 2.0)
    x, y = np.concatenate([points(2, 6, 3.0, k) for k in c], axis=-1)
    parts = tuple((Lorentz(k, clip_radius=None), 1 / len(c)) for k in c)
    expected = Product(parts, summed=True).distance_matrix(x, y[:5])
    distances = image_text.distances(x, y[:5], np.array(c))
    np.testing.assert_allclose(distances, expected, rtol=1e-5)


def test_targets_do_not_compete_with_each_other():
    logits = np.random.default_rng(0).normal(size=(4, 4)) * 3
    positives = np.eye(4, dtype=bool)
    positives[0, 1] = positives[1, 0] = True  # Two captions of one image.
    losses = []
    for row, targets in zip(logits, positives, strict=True):
        others = row[~targets]
        losses.append(
            np.mean([np.log(1 + np.sum(np.exp(others - row[j]))) for j in np.flatnonzero(targets)])
        )
    ours = image_text.cross_entropy(logits, positives)
    np.testing.assert_allclose(ours, np.mean(losses), rtol=1e-6)
    plain = image_text.cross_entropy(logits)
    np.testing.assert_allclose(plain, diagonal_cross_entropy(logits), rtol=1e-6)
    # A second copy of an image's text costs nothing.
    copied, same = logits[:1, [0, 0, 1, 2, 3]], np.array([[True, True, False, False, False]])
    once = image_text.cross_entropy(logits[:1])
    np.testing.assert_allclose(image_text.cross_entropy(copied, same), once, rtol=1e-6)
    slope = jax.grad(image_text.cross_entropy)(jnp.ones((1, 1)))
    assert slope == 0  # And finite, where no item is a negative.


def test_sigmoid_loss():
    logits = np.random.default_rng(0).normal(size=(3, 3)) * 20 - 10
    signs = 2 * np.eye(3) - 1
    expected = np.sum(np.log1p(np.exp(-signs * logits))) / 3
    np.testing.assert_allclose(image_text.sigmoid_loss(logits), expected, rtol=1e-6)
    every = image_text.sigmoid_loss(logits, np.ones((3, 3), bool))
    np.testing.assert_allclose(every, np.sum(np.log1p(np.exp(-logits))) / 3, rtol=1e-6)


def test_losses_take_half_precision_and_return_float32():
    x, y = (jnp.asarray(z, jnp.bfloat16) for z in points(2, 16, 1.0, 1.0))
    assert image_text.meru_loss(x, y, c=1.0, scale=SCALE).dtype == jnp.float32
    assert image_text.sigmoid_loss(x @ y.T).dtype == jnp.float32


def test_bounds_of_learned_scalars():
    logs = {f"log_{name}": jnp.float32(9.0) for name in image_text.BOUNDS}
    clipped = within_bounds(logs, image_text.BOUNDS)
    assert clipped["log_scale"] == np.float32(np.log(100)) and clipped["log_alpha"] == 0
    assert clipped["log_c"] == np.float32(np.log(10))
