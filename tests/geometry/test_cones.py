"""Entailment cones against MERU's formulas with 60 digits, and at singular points."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from hypjax.geometry import cones

angle = jax.jit(cones.exterior_angle)
aperture = jax.jit(cones.half_aperture)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def pairs(radius, c, angles, dtype=np.float64):
    """Points at the distances r and r + 1/√c from the origin, where they are at given angles."""
    rng = np.random.default_rng(0)
    one, across = unit(rng.normal(size=(len(angles), 16))), rng.normal(size=(len(angles), 16))
    across = unit(across - np.sum(across * one, axis=1, keepdims=True) * one)
    other = np.cos(angles)[:, None] * one + np.sin(angles)[:, None] * across
    lengths = np.sinh([radius, radius + 1]) / np.sqrt(c)
    return (one * lengths[0]).astype(dtype), (other * lengths[1]).astype(dtype)


def exact_angles(x, y, c):
    """acos((y_t + x_t·c⟨x, y⟩)/(‖x‖·√((c⟨x, y⟩)² − 1)))."""
    found = []
    with mpmath.workdps(60):
        c = mpmath.mpf(float(c))
        dot = lambda a, b: mpmath.fsum(u * v for u, v in zip(a, b, strict=True))  # noqa: E731
        for pair in zip(x, y, strict=True):
            a, b = ([mpmath.mpf(float(v)) for v in vector] for vector in pair)
            a_time, b_time = (mpmath.sqrt(1 / c + dot(z, z)) for z in (a, b))
            inner = c * (dot(a, b) - a_time * b_time)
            cosine = (b_time + a_time * inner) / mpmath.sqrt(dot(a, a) * (inner**2 - 1))
            found.append(float(mpmath.acos(cosine)))
    return found


@pytest.mark.parametrize("c", [0.01, 1.0])
def test_angles_equal_the_closed_form(float64, c):
    """Near the origin and far out, at all angles, for points at any distance and close ones."""
    for radius in (1e-6, 0.1, 1, 5, 10):
        x, y = pairs(radius, c, np.concatenate([np.geomspace(1e-6, 1, 6), [np.pi / 2, 3.1]]))
        for other in (y, x + 1e-4 * (y - x)):
            expected = exact_angles(x, other, c)
            np.testing.assert_allclose(angle(x, other, c), expected, rtol=1e-6, atol=1e-9)


def test_float32_angles_are_as_accurate_as_the_table_says():
    c, angles = 0.1, np.random.default_rng(1).uniform(0.1, np.pi, size=60)
    for radius, in_one_direction in ((0.1, 4e-7), (3, 5e-6), (5, 3e-5), (7, 3e-4), (10, 5e-3)):
        for towards, error in ((angles, 3e-7), (0 * angles, in_one_direction)):
            x, y = pairs(radius, c, towards, np.float32)
            with jax.enable_x64(True):
                expected = np.asarray(angle(x.astype(float), y.astype(float), float(np.float32(c))))
            np.testing.assert_allclose(angle(x, y, c), expected, rtol=0, atol=error)


def test_half_apertures_equal_the_closed_form_and_in_flat_space_cones_are_half_spaces(float64):
    radii = np.geomspace(0.2001, 1e5, 9)
    x = radii[:, None] * unit(np.random.default_rng(2).normal(size=(9, 5)))
    for c in (0.01, 1.0):
        np.testing.assert_allclose(aperture(x / np.sqrt(c), c), np.arcsin(0.2 / radii), rtol=1e-10)
    y = np.random.default_rng(4).normal(size=x.shape)
    cosine = np.sum(unit(x) * unit(y - x), axis=1)
    np.testing.assert_allclose(angle(x, y, 0.0), np.arccos(cosine), rtol=1e-10)
    assert np.all(aperture(x, 0.0) == np.pi / 2)


def test_gradients_are_finite_differences(float64):
    x, y, u, v = np.random.default_rng(5).normal(size=(4, 4, 3))

    @jax.jit
    def total(step, c):
        at, to, curvature = x + step * u, y + step * v, c * (1 + step)
        return jnp.sum(cones.exterior_angle(at, to, curvature) + cones.half_aperture(at, curvature))

    for c in (0.3, 5.0):
        expected = (total(1e-6, c) - total(-1e-6, c)) / 2e-6
        np.testing.assert_allclose(jax.jit(jax.grad(total))(0.0, c), expected, rtol=1e-6)


@pytest.mark.parametrize("c", [0.0, 1e-12, 0.1, 10.0])
def test_gradients_are_finite_everywhere(c):
    rng = np.random.default_rng(6)
    any_x, any_y = rng.normal(size=(2, 6)).astype(np.float32)
    origin, tiny = 0 * any_x, 1e-30 * any_x
    far = 5e4 / max(c, 1e-3) ** 0.5
    cases = [
        *((any_x, any_x), (origin, any_y), (any_x, origin), (origin, origin)),
        *((any_x, 2 * any_x), (any_x, any_x / 2), (any_x, any_x + tiny)),
        *((tiny, any_y), (tiny, tiny), (far * any_x, -far * any_y)),
    ]
    x, y = np.stack(cases, axis=1)
    slopes = jax.jit(jax.grad(lambda *a: jnp.sum(cones.exterior_angle(*a)), (0, 1, 2)))(x, y, c)
    apertures = jax.jit(jax.grad(lambda *a: jnp.sum(cones.half_aperture(*a)), (0, 1)))
    edge = 0.2 * unit(any_x) / max(np.sqrt(c), 1e-6)
    edges = (edge * np.linspace(1 - 1e-6, 1 + 1e-6, 20)[:, None]).astype(np.float32)
    for found in (*slopes, *apertures(x, c), *apertures(edges, c)):
        assert np.all(np.isfinite(found))


def test_there_is_a_right_angle_where_there_is_none_and_zero_on_the_ray():
    x = np.array([[1.0, 2], [0, 0], [1, 2], [1, 2], [np.nan, 1]])
    y = np.array([[1.0, 2], [3, 1], [2, 4], [0.5, 1], [0, 1]])
    found = np.asarray(angle(x, y, 0.1))
    np.testing.assert_allclose(found[:4], [np.pi / 2, np.pi / 2, 0, np.pi], atol=1e-6)
    assert np.isnan(found[4]) and np.isnan(aperture(x, 0.1)[4])
