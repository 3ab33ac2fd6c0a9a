"""Faults of released image-text code that change numbers, beside what is right here."""

import jax
import jax.numpy as jnp
import numpy as np

from hypjax.geometry import cones, lorentz
from hypjax.objectives import image_text

CLAMP = 1 + 1e-8  # In MERU and its successors, to keep arccosh away from 1.


def released_distance(x, y):
    inner = x @ y - jnp.sqrt(1 + x @ x) * jnp.sqrt(1 + y @ y)
    return jnp.arccosh(jnp.maximum(-inner, CLAMP))


def released_angle(x, y):
    x_time, y_time = jnp.sqrt(1 + x @ x), jnp.sqrt(1 + y @ y)
    inner = x @ y - x_time * y_time
    below = jnp.sqrt(x @ x) * jnp.sqrt(jnp.maximum(inner**2 - 1, 1e-8)) + 1e-8
    return jnp.arccos(jnp.clip((y_time + inner * x_time) / below, -1 + 1e-8, 1 - 1e-8))


def test_clamps_of_1e_8_do_nothing_in_float32():
    x = jnp.asarray([0.3, -0.4, 1.0])
    assert np.float32(CLAMP) == 1
    theirs = jax.grad(released_distance)(x, x)
    assert np.isnan(theirs).all()
    ours = jax.grad(lambda x, y: image_text.distances(x[None], y[None], 1.0)[0, 0])(x, x)
    assert (ours == 0).all() and lorentz.dist(x, x, 1.0) == 0


def test_the_exterior_angle_on_one_ray():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 8)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    theirs = jax.vmap(released_angle)(x, 3 * x)
    ours = cones.exterior_angle(x, 3 * x, 1.0)
    assert np.nanmax(theirs) > 1e-4  # Or NaN, where rounding leaves the arccosine's domain.
    assert ours.max() < 1e-6


def test_phyclip_s_sum_of_inner_products_ranks_otherwise_than_its_distance():
    rng = np.random.default_rng(0)
    c = np.exp(0.7 * rng.normal(size=64)).astype(np.float32)
    v = rng.normal(size=(2, 300, 64, 8)).astype(np.float32) / np.sqrt(8)
    x, y = (np.stack([lorentz.expmap0(z[:, i], c[i]) for i in range(64)], axis=1) for z in v)

    def time(z):
        return np.sqrt(1 / c + (z.astype(np.float64) ** 2).sum(axis=-1))

    inner = np.einsum("nfd,mfd->nmf", x, y, dtype=np.float64) - time(x)[:, None] * time(y)[None]
    trained = np.mean(np.arccosh(-c * inner) / np.sqrt(c), axis=-1)
    ours = image_text.distances(x.reshape(300, -1), y.reshape(300, -1), c)
    best = trained.argmin(axis=1)
    assert (np.argmin(ours, axis=1) == best).all()
    assert np.mean(inner.sum(axis=-1).argmax(axis=1) == best) < 0.7
