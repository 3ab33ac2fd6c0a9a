"""The Poincaré ball against closed forms in float64 and float32, and at singular points."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import mpmath
import numpy as np
import pytest

from hypjax.geometry import poincare
from tests.helpers.programs import compiled

programs = compiled(poincare)
expmap = programs.expmap
CURVATURES = [0.01, 0.1, 1.0, 10.0]


def points(seed, shape, c, largest, smallest=0.0):
    """Random points with norms up to `largest` / √c, in float64."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    norms = rng.uniform(smallest, largest, size=(*shape[:-1], 1))
    return x / np.linalg.norm(x, axis=-1, keepdims=True) * norms / np.sqrt(c)


def exact_distance(x, y, c):
    """Eq. 2 of Hyp-ViT with 50 digits."""
    with mpmath.workdps(50):
        c = mpmath.mpf(c)
        x, y = [[mpmath.mpf(float(v)) for v in vector] for vector in (x, y)]
        dot = lambda a, b: mpmath.fsum(u * v for u, v in zip(a, b, strict=True))  # noqa: E731
        xy, xx, yy = -dot(x, y), dot(x, x), dot(y, y)
        left, right = 1 + 2 * c * xy + c * yy, 1 - c * xx
        numerator = [-left * u + right * v for u, v in zip(x, y, strict=True)]
        norm = mpmath.sqrt(dot(numerator, numerator)) / (1 + 2 * c * xy + c**2 * xx * yy)
        return float(2 / mpmath.sqrt(c) * mpmath.atanh(mpmath.sqrt(c) * norm))


@pytest.mark.parametrize("c", CURVATURES)
def test_distance_equals_the_formula_of_the_paper(float64, c):
    x, y = points(0, (40, 5), c, 0.999), points(1, (40, 5), c, 0.999)
    y[:10] = x[:10] + 1e-6 * y[:10]  # Close pairs.
    expected = [exact_distance(a, b, c) for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(programs.dist(x, y, c), expected, rtol=1e-9)
    y[10:20] *= 1 / np.linalg.norm(y[10:20], axis=-1, keepdims=True) * 0.999 / np.sqrt(c)
    np.testing.assert_allclose(
        np.diagonal(programs.dist_matrix(x[10:], y[10:], c)),
        [exact_distance(a, b, c) for a, b in zip(x[10:], y[10:], strict=True)],
        rtol=1e-9,
    )


@pytest.mark.parametrize("c", CURVATURES)
def test_float32_distances_of_separated_points_are_accurate(c):
    x, y = points(0, (50, 16), c, 0.9), points(1, (50, 16), c, 0.9)
    x, y = x.astype(np.float32), y.astype(np.float32)
    expected = [exact_distance(a, b, c) for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(poincare.dist(x, y, c), expected, rtol=1e-5)
    np.testing.assert_allclose(np.diagonal(poincare.dist_matrix(x, y, c)), expected, rtol=1e-5)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("dim", [2, 128])
def test_distance_matrix_is_accurate_at_the_clip_radius(dim, spread):
    """Rounding errors are largest for points at the clip radius."""
    c, rng = 0.1, np.random.default_rng(dim)
    v = rng.normal(size=dim) + spread * rng.normal(size=(400, dim)) * np.sqrt(dim)
    v = poincare.clip_features((100 * v).astype(np.float32), 2.3)
    x = np.asarray(poincare.expmap0(v, c))
    with jax.enable_x64(True):
        x64 = x.astype(np.float64)
        expected = np.asarray(poincare.dist(x64[:, None], x64[None], c))
    error = np.abs(np.asarray(jax.jit(poincare.dist_matrix)(x, x, c)) - expected)
    assert error.max() < 5e-3
    assert (error / np.maximum(expected, 1)).max(where=expected > 1, initial=0) < 1e-5


def test_curvature_zero_is_flat():
    x, y = points(0, (9, 4), 1.0, 3.0), points(1, (9, 4), 1.0, 3.0)
    flat = np.linalg.norm(x - y, axis=-1)
    np.testing.assert_allclose(programs.dist(x, y, 0.0), 2 * flat, rtol=1e-6)
    np.testing.assert_allclose(programs.dist(x, y, 1e-9), 2 * flat, rtol=1e-6)
    np.testing.assert_allclose(programs.mobius_add(x, y, 0.0), x + y, rtol=1e-6)
    np.testing.assert_allclose(programs.expmap0(x, 0.0), x, rtol=1e-6)
    np.testing.assert_allclose(programs.logmap(x, y, 0.0), y - x, rtol=1e-5)
    np.testing.assert_allclose(programs.expmap(x, y, 0.0), x + y, rtol=1e-6)
    np.testing.assert_allclose(programs.transport(x, y, y, 0.0), y)
    np.testing.assert_allclose(programs.project(100 * x, 0.0), 100 * x, rtol=1e-6)
    np.testing.assert_allclose(programs.frechet_mean(x, 0.0), x.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("c", CURVATURES)
def test_maps_are_inverses_and_keep_distances(float64, c):
    x, y = points(0, (50, 6), c, 0.99), points(1, (50, 6), c, 0.99)
    np.testing.assert_allclose(programs.expmap0(programs.logmap0(y, c), c), y, rtol=1e-9)
    logs, distances = programs.logmap(x, y, c), programs.dist(x, y, c)
    np.testing.assert_allclose(programs.expmap(x, logs, c), y, rtol=1e-8)
    length = np.linalg.norm(logs, axis=-1) * programs.lambda_x(x, c)[:, 0]
    np.testing.assert_allclose(length, distances, rtol=1e-9)
    back = programs.transport(x, y, logs, c)  # The geodesic arrives as it left.
    np.testing.assert_allclose(back, -programs.logmap(y, x, c), rtol=1e-7)


@pytest.mark.parametrize(("c", "norm"), [(0.1, 0.5), (1.0, 0.99), (0.1, 0.999), (1.0, 0.9999)])
def test_expmap_is_accurate_in_float32(c, norm):
    """Also near the boundary and back towards the centre, where the textbook formula cancels."""
    x = points(0, (24, 8), c, norm, norm).astype(np.float32)
    inward = -x / np.linalg.norm(x, axis=-1, keepdims=True)
    v = points(1, (24, 8), 1.0, 1.0, 1.0) * np.geomspace(1e-3, 1, 24)[:, None] + inward
    for length in (0.1, 1.0, 6.0, 20.0):  # Of the path, in units of 1/√c.
        conformal = np.asarray(poincare.lambda_x(x.astype(np.float64), c), np.float64)
        tangents = v / np.linalg.norm(v, axis=-1, keepdims=True) * length / conformal / np.sqrt(c)
        tangents = tangents.astype(np.float32)
        with mpmath.workdps(50):
            exact = [exact_expmap(*row, c) for row in zip(x, tangents, strict=True)]
        error = np.linalg.norm(expmap(x, tangents, c) - np.array(exact), axis=-1)
        assert error.max() * np.sqrt(c) < 5e-4  # The textbook formula: 0.01.


def exact_expmap(x, v, c):
    """Eq. 3 of Hyp-ViT, in the precision of mpmath."""
    x, v, c = mpmath.matrix(x.tolist()), mpmath.matrix(v.tolist()), mpmath.mpf(c)
    dot = lambda a, b: (a.T * b)[0]  # noqa: E731
    length = mpmath.sqrt(c * dot(v, v))
    y = v * mpmath.tanh(length / (1 - c * dot(x, x))) / length
    xy, xx, yy = dot(x, y), dot(x, x), dot(y, y)
    point = ((1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y) / (1 + 2 * c * xy + c**2 * xx * yy)
    return [float(value) for value in point]


@pytest.mark.parametrize(("norm", "tolerance"), [(0.9, 1e-5), (0.999, 2e-4), (0.9999, 2e-3)])
def test_expmap_towards_the_centre_and_beyond_is_accurate_in_float32(norm, tolerance):
    """Straight inward, where x̂ + v̂ is 0, and far: errors of 1 − ‖x‖² grow with the path."""
    x = points(0, (200, 8), 1.0, norm, norm).astype(np.float32)
    v = -x / np.linalg.norm(x, axis=-1, keepdims=True)
    for length in (1.0, 6.0, 12.0, 20.0):
        tangents = (v * length * (1 - norm**2) / 2).astype(np.float32)
        with jax.enable_x64(True):
            exact = expmap(x.astype(np.float64), tangents.astype(np.float64), 1.0)
        error = np.linalg.norm(expmap(x, tangents, 1.0) - np.asarray(exact), axis=-1)
        assert error.max() < tolerance, length


def pairs(xs, vs):
    """All pairs of points [x, 0] and tangent vectors."""
    x, v = np.meshgrid(xs, np.arange(len(vs)), indexing="ij")
    points = np.stack([x.ravel(), np.zeros(x.size)], axis=-1)
    return jnp.asarray(points), jnp.asarray(np.array(vs)[v.ravel()])


def test_long_tangent_vectors_lead_to_the_boundary():
    lengths = np.array([-1e30, -1e20, -5e15, 1e18, 3e38])
    x, v = pairs([0.0, 0.6, 0.9999], np.stack([lengths, np.zeros(5)], axis=-1))
    end = np.stack([np.sign(v[:, 0]), np.zeros(len(v))], axis=-1)
    np.testing.assert_allclose(expmap(x, v, 1.0), end, atol=1e-4)
    assert np.all(np.isfinite(jax.jacobian(lambda c: expmap(x, v, c))(1.0)))


def test_gradients_of_expmap_are_finite_and_right(float64):
    def reference(x, v, c):
        return poincare.mobius_add(x, poincare.expmap0(v * poincare.lambda_x(x, c) / 2, c), c)

    tangents = [[0.0, 0.0], [-1.0, 0.0], [-1.0, 1e-3], [-100.0, 0.0], [1.0, 0.0]]
    x, v = pairs([0.0, 0.6, 0.99, 0.9999], tangents)
    found, expected = (
        jax.jit(jax.vmap(jax.jacobian(function, (0, 1, 2)), (0, 0, None)))(x, v, 1.0)
        for function in (poincare.expmap, reference)
    )
    for ones, others in zip(found, expected, strict=True):
        assert np.all(np.isfinite(ones))
        for one, other in zip(ones, others, strict=True):
            if np.all(np.isfinite(other)) and np.abs(other).max() < 1e5:
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-7 * np.abs(other).max())


def test_project_changes_only_points_outside():
    c = 0.1
    inside = points(0, (20, 3), c, 0.9999).astype(np.float32)
    np.testing.assert_array_equal(poincare.project(inside, c), inside)
    outside = poincare.project(10 * points(0, (20, 3), c, 2.0, smallest=1.0), c)
    np.testing.assert_allclose(np.linalg.norm(outside, axis=-1) * np.sqrt(c), 1 - 1e-5, atol=2e-7)


@pytest.mark.parametrize("c", [0.0, 0.1, 1.0])
def test_gradient_vanishes_at_the_frechet_mean(float64, c):
    x, weights = points(0, (3, 8, 4), c or 1.0, 0.99), np.arange(24.0).reshape(3, 8)
    mean = programs.frechet_mean(x, c, weights)
    assert mean.shape == (3, 4)
    logs = programs.logmap(mean[:, None], x, c)
    residual = np.sum(weights[..., None] * logs, axis=-2)
    np.testing.assert_allclose(residual, 0, atol=1e-11 * np.abs(weights[..., None] * logs).max())


@pytest.mark.parametrize("c", [0.0, 0.1, 1.0])
def test_frechet_mean_is_differentiable(float64, c):
    x, weights = jnp.asarray(points(0, (5, 3), c or 1.0, 0.9)), jnp.arange(1.0, 6.0)
    direction = jnp.asarray([1.0, -2.0, 0.5])

    def value(x, weights):
        return poincare.frechet_mean(x, c, weights) @ direction

    jax.test_util.check_grads(jax.jit(value), (x, weights), order=1, modes=["rev"], rtol=1e-6)


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
def all_functions(x, y, c):
    """Sum of the results of all functions of the module."""
    clipped = poincare.clip_features(x, 0.5)
    results = [
        poincare.dist(x, y, c),
        poincare.dist_matrix(x, y, c),
        poincare.dist_matrix(x, x, c),
        poincare.mobius_add(x, y, c),
        poincare.expmap0(x, c),
        poincare.logmap0(x, c),
        poincare.expmap(x, y, c),
        poincare.logmap(x, y, c),
        poincare.project(x, c),
        poincare.lambda_x(x, c),
        poincare.dist(clipped, y, c),
        poincare.frechet_mean(jnp.stack([x, y]), c),
    ]
    return sum(jnp.sum(r) for r in results)


@pytest.mark.parametrize("c", [0.0, 0.1, 1.0])
def test_gradients_are_finite_everywhere(c):
    x, y = (points(seed, (4, 3), 1.0, 0.9).astype(np.float32) for seed in (0, 1))
    zero, clipped = np.zeros_like(x), x / np.linalg.norm(x, axis=-1, keepdims=True) / 2
    for pair in ((x, y), (x, x), (zero, zero), (x, zero), (clipped, y)):
        value, gradients = all_functions(*map(jnp.asarray, pair), jnp.float32(c))
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in gradients)


def test_results_have_the_shapes_and_dtypes_of_inputs(float64):
    x, y = points(0, (2, 1, 3), 0.1, 0.9), points(1, (1, 5, 3), 0.1, 0.9)
    assert poincare.dist(x, y, 0.1).shape == (2, 5)
    assert poincare.logmap(x, y, 0.1).shape == (2, 5, 3)
    x = jnp.asarray(points(0, (5, 3), 0.1, 0.9), jnp.bfloat16)
    assert poincare.dist_matrix(x, x, 0.1).dtype == jnp.float32
    assert poincare.expmap0(x, 0.1).dtype == jnp.float32
    assert jax.eval_shape(poincare.frechet_mean, x, 0.1).dtype == jnp.float32
    assert jax.eval_shape(poincare.frechet_mean, x, 0.1, np.ones(5)).dtype == jnp.float64


def test_distance_from_a_point_outside_is_nan():
    outside, inside = np.array([[1.01, 0.0]]), np.array([[0.0, 0.5]])
    assert np.isnan(poincare.dist(outside, inside, 1.0)).all()
    assert np.isnan(poincare.dist_matrix(outside, inside, 1.0)).all()
