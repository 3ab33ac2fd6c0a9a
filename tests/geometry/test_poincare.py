"""The Poincaré ball against closed forms in float64 and float32, and at singular points."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import mpmath
import numpy as np
import pytest

from hypjax.geometry import lorentz, poincare
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
    y[10:20] *= 1 / np.linalg.norm(y[10:20], axis=-1, keepdims=True) * 0.999 / np.sqrt(c)
    expected = [exact_distance(a, b, c) for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(programs.dist(x, y, c), expected, rtol=1e-9)
    matrix = np.diagonal(programs.dist_matrix(x[10:], y[10:], c))
    np.testing.assert_allclose(matrix, expected[10:], rtol=1e-9)


@pytest.mark.parametrize("radius", [10, 20, 30])
def test_distances_far_out_have_no_bound(float64, radius):
    """From the origin, between opposites, and along a ray."""
    rows = [(0, radius), (-radius, radius), (radius, radius + 2)]
    ends = np.tanh(np.array(rows, float) / 2)[:, :, None] * [1, 0]
    expected = [abs(x - y) for x, y in rows]
    # Coordinates near 1 are spaced by 1e-16.
    np.testing.assert_allclose(programs.dist(ends[:, 0], ends[:, 1], 1.0), expected, atol=2e-3)
    matrix = np.diagonal(programs.dist_matrix(ends[:, 0], ends[:, 1], 1.0))
    np.testing.assert_allclose(matrix, expected, atol=2e-3)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.05, 1.0])
@pytest.mark.parametrize("dim", [2, 128])
def test_float32_distances_are_accurate_at_the_clip_radius(dim, spread):
    """Rounding errors are largest for points at the clip radius, and in the matrix for close ones.

    With a centre in their midst, which the matrix moves to the origin, or without one.
    """
    c, rng = 0.1, np.random.default_rng(dim)
    v = rng.normal(size=dim) + spread * rng.normal(size=(400, dim)) * np.sqrt(dim)
    v *= 2.3 / np.linalg.norm(v, axis=1, keepdims=True)
    x = np.asarray(programs.expmap0(v.astype(np.float32), c))
    with jax.enable_x64(True):
        x64 = x.astype(np.float64)
        expected = np.asarray(programs.dist(x64[:, None], x64[None], c))
    np.testing.assert_allclose(programs.dist(x[:, None], x, c), expected, rtol=1e-5)
    error = np.abs(np.asarray(programs.dist_matrix(x, x, c)) - expected)
    assert error.max() < 5e-3
    assert (error / np.maximum(expected, 1)).max(where=expected > 1, initial=0) < 1e-5


def test_curvature_zero_is_flat():
    x, y = points(0, (9, 4), 1.0, 3.0), points(1, (9, 4), 1.0, 3.0)
    flat = 2 * np.linalg.norm(x - y, axis=-1)
    for actual, expected in (
        (programs.dist(x, y, 0.0), flat),
        (programs.dist(x, y, 1e-9), flat),
        (programs.mobius_add(x, y, 0.0), x + y),
        (programs.expmap0(x, 0.0), x),
        (programs.logmap(x, y, 0.0), y - x),
        (programs.expmap(x, y, 0.0), x + y),
        (programs.transport(x, y, y, 0.0), y),
        (programs.project(100 * x, 0.0), 100 * x),
        (programs.frechet_mean(x, 0.0), x.mean(axis=0)),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("norm", "tolerance"), [(0.5, 3e-6), (0.9, 1e-5), (0.999, 2e-4), (0.9999, 2e-3)]
)
def test_expmap_is_accurate_in_float32(norm, tolerance):
    """Also near the boundary and back towards the centre, where the textbook formula cancels.

    Half of the vectors are straight inward, where x̂ + v̂ is 0, others turn away from there. Errors
    of 1 − ‖x‖² grow with the path. The textbook formula itself has an error of 0.01.
    """
    x = points(0, (48, 8), 1.0, norm, norm).astype(np.float32)
    v = (
        points(1, (48, 8), 1.0, 1.0, 1.0)
        * np.repeat([0, *np.geomspace(1e-3, 1, 24)], [24, *[1] * 24])[:, None]
    )
    v -= x / np.linalg.norm(x, axis=-1, keepdims=True)
    for length in (0.1, 1.0, 6.0, 20.0):  # Of the path.
        tangents = v / np.linalg.norm(v, axis=-1, keepdims=True) * length * (1 - norm**2) / 2
        tangents = tangents.astype(np.float32)
        with jax.enable_x64(True):
            exact = textbook_expmap(x.astype(np.float64), tangents.astype(np.float64), 1.0)
        error = np.linalg.norm(expmap(x, tangents, 1.0) - np.asarray(exact), axis=-1)
        assert error.max() < tolerance, length


@jax.jit
def textbook_expmap(x, v, c):
    """Eq. 3 of Hyp-ViT."""
    return poincare.mobius_add(x, poincare.expmap0(v * poincare.lambda_x(x, c) / 2, c), c)


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
    np.testing.assert_allclose(programs.project(v, 1.0), np.sign(v), atol=1e-4)


def _moved_by_map(name, v, x, c):
    """Vectors, or points x and their nearest neighbours inside the ball, through a map."""
    if name in ("expmap0", "project"):
        return getattr(poincare, name)(v, c)
    if name == "expmap":
        return poincare.expmap(x, v, c)
    if name == "transport":
        return poincare.transport(x, -x, v, c) + poincare.transport(x, 0 * x, v, c)
    if name == "logmap0":
        return lorentz.logmap0(lorentz.from_poincare(x, c), c) + poincare.logmap0(x, c)
    return getattr(poincare, name)(x, jnp.roll(x, 1, axis=0), c)


@pytest.mark.parametrize(
    "name", ["expmap0", "project", "expmap", "transport", "logmap0", "logmap", "mobius_add"]
)
def test_gradients_of_maps_are_finite_for_long_tangents_and_points_far_out(name):
    """By each argument, in both modes: at c = 0, for example, those of `expmap` were NaN."""
    lengths = np.array([-3e38, -1e19, -1e13, 0, 1e10, 1e16, 1e25, 3e38])
    x, v = pairs([0.0, 0.6, poincare.MAX_NORM], lengths[:, None] * [0.6, 0.8])
    function = functools.partial(_moved_by_map, name)

    def gradients(scale, c):
        value, pull_back = jax.vjp(function, v, scale * x, c)
        by_c = jax.jvp(lambda c: function(v, scale * x, c), (c,), (jnp.ones_like(c),))[1]
        return value, pull_back(jnp.ones_like(value)), by_c

    for c in (0.0, 0.1, 1.0, 10.0):
        arguments = jnp.float32(1 / c**0.5 if c else 1), jnp.float32(c)
        finite = jax.tree.map(lambda a: np.isfinite(a).all(), jax.jit(gradients)(*arguments))
        assert all(jax.tree.leaves(finite)), c
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(gradients(*arguments)))


def test_gradients_of_expmap_are_finite_and_right(float64):
    tangents = [[0.0, 0.0], [-1.0, 0.0], [-1.0, 1e-3], [-100.0, 0.0], [1.0, 0.0]]
    x, v = pairs([0.0, 0.6, 0.99, 0.9999], tangents)
    actual, expected = (
        jax.jit(jax.vmap(jax.jacobian(function, (0, 1, 2)), (0, 0, None)))(x, v, 1.0)
        for function in (poincare.expmap, textbook_expmap)
    )
    for ones, others in zip(actual, expected, strict=True):
        assert np.all(np.isfinite(ones))
        for one, other in zip(ones, others, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-7 * np.abs(other).max())


def reflected_ancestor(x, y):
    """Distance of the ancestor from the origin by the reflections of HypHC's code, for c = 1."""
    centre = x / (x @ x)  # Of the inversion that takes x to the origin.

    def invert(z):
        return centre + (centre @ centre - 1) * (z - centre) / np.sum((z - centre) ** 2)

    direction = invert(y)
    mirrored = invert(2 * (x @ direction) / (direction @ direction) * direction - x)
    ancestor = mirrored / (1 + np.sqrt(1 - mirrored @ mirrored))
    return 2 * np.arctanh(np.linalg.norm(ancestor))


@pytest.mark.parametrize("c", CURVATURES)
def test_ancestors_are_those_of_hyphc(float64, c):
    x, y = points(0, (40, 5), c, 0.95, 0.1), points(1, (40, 5), c, 0.95, 0.1)
    lengths = (np.linalg.norm(z[:20], axis=1, keepdims=True) for z in (x, y))
    y[:20] *= np.divide(*lengths)  # Leaves that are equally far out.
    pairs = zip(c**0.5 * x, c**0.5 * y, strict=True)
    expected = [reflected_ancestor(*pair) / c**0.5 for pair in pairs]
    np.testing.assert_allclose(programs.lca_distance(x, y, c), expected, rtol=1e-9)
    depth = jax.jit(lambda x, y: poincare.lca_distance(x, y, c))
    jax.test_util.check_grads(depth, (x, y), order=1, modes=["rev"], rtol=1e-3)
    flat = programs.lca_distance(x, y, 0.0)  # Twice the height of the triangle with the origin.
    area = np.sqrt(np.sum(x * x, 1) * np.sum(y * y, 1) - np.sum(x * y, 1) ** 2)
    np.testing.assert_allclose(flat, 2 * area / np.linalg.norm(x - y, axis=1), rtol=1e-9)


def test_close_leaves_are_near_their_ancestor():
    """In float32, at all distances between the leaves, with gradients as long as in float64."""
    x = points(0, (1, 5), 1.0, 0.9, 0.9)
    across = points(1, (1, 5), 1.0, 1.0, 1.0)
    across -= np.sum(x * across) / np.sum(x * x) * x
    angles = np.concatenate([[0], np.geomspace(1e-25, 1, 51)])[:, None]
    y = np.cos(angles) * x + np.sin(angles) * across * (0.9 / np.linalg.norm(across))
    x = np.broadcast_to(x, y.shape)
    gradient = jax.jit(jax.grad(lambda x, y: jnp.sum(poincare.lca_distance(x, y, 1.0)), (0, 1)))
    depth = np.arctanh(np.tanh(2 * np.arctanh(0.9)) * np.cos(angles[:, 0] / 2))
    np.testing.assert_allclose(
        programs.lca_distance(x.astype("f"), y.astype("f"), 1.0), depth, rtol=1e-4
    )
    found = np.sum(gradient(x.astype("f"), y.astype("f")), axis=0)
    with jax.enable_x64(True):
        expected = np.sum(gradient(x, y), axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-3)


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


@pytest.mark.parametrize("c", [0.0, 0.1, 1.0])
def test_gradients_are_finite_everywhere(c):
    """Of the functions that no space calls: those are tested with the spaces."""
    x, y = (points(seed, (4, 3), 1.0, 0.9).astype(np.float32) for seed in (0, 1))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradients(x, y, c):
        results = [poincare.mobius_add(x, y, c), poincare.transport(x, y, y, c)]
        results.append(poincare.lca_distance(x, y, c))
        results += [poincare.expmap(x, y, c), poincare.logmap(x, y, c), poincare.lambda_x(x, c)]
        return sum(jnp.sum(result) for result in results)

    for pair in ((x, y), (x, x), (0 * x, 0 * x), (x, 0 * x)):
        assert all(np.isfinite(g).all() for g in gradients(*pair, c))


@pytest.mark.parametrize("radius", [3, 6, 9, 12])  # √c times the distance from the origin.
def test_short_transport_keeps_digits_far_from_the_origin(float64, radius):
    x = points(0, (50, 4), 1.0, 1.0)
    x *= np.tanh(radius / 2) / np.linalg.norm(x, axis=1, keepdims=True)
    v = points(1, (50, 4), 1.0, 0.9)
    y = poincare.expmap(x, 0.02 * (1 - np.sum(x**2, axis=1, keepdims=True)) * v, 1.0)
    x, y, v = (np.asarray(a, np.float32) for a in (x, y, v))
    exact = poincare.transport(*(a.astype(np.float64) for a in (x, y, v)), 1.0)
    moved = np.asarray(poincare.transport(x, y, v, 1.0))
    error = np.linalg.norm(moved - np.asarray(exact), axis=1)
    assert np.all(error < 1e-7 * np.exp(radius) * np.linalg.norm(exact, axis=1))


def test_results_have_the_dtypes_of_inputs_but_at_least_float32(float64):
    x = jax.ShapeDtypeStruct((5, 3), jnp.bfloat16)
    assert jax.eval_shape(poincare.dist_matrix, x, x, 0.1).dtype == jnp.float32
    assert jax.eval_shape(poincare.expmap0, x, 0.1).dtype == jnp.float32
    assert jax.eval_shape(poincare.frechet_mean, x, 0.1).dtype == jnp.float32
    assert jax.eval_shape(poincare.frechet_mean, x, 0.1, np.ones(5)).dtype == jnp.float64


def test_distance_from_a_point_outside_is_nan():
    outside, inside = np.array([[1.01, 0.0]]), np.array([[0.0, 0.5]])
    assert np.isnan(programs.dist(outside, inside, 1.0)).all()
    assert np.isnan(programs.dist_matrix(outside, inside, 1.0)).all()
