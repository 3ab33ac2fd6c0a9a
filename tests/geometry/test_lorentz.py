"""The hyperboloid against the ball, closed forms with 50 digits, and at singular points."""

import jax
import mpmath
import numpy as np
import pytest

from hypjax.geometry import Lorentz, PoincareBall, lorentz
from tests.helpers.programs import compiled

programs = compiled(lorentz)
CURVATURES = [0.01, 0.1, 1.0, 10.0]
FEATURES = np.random.default_rng(0).normal(size=(40, 6))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def points_at(directions, radii, c, dtype=np.float64):
    """Points in some directions, at distances of radii/√c from the origin."""
    return (directions * np.sinh(radii) / np.sqrt(c)).astype(dtype)


def exact_distances(x, y, c):
    """arccosh(−c⟨x, y⟩)/√c with 50 digits."""
    found = []
    with mpmath.workdps(50):
        c = mpmath.mpf(c)
        dot = lambda a, b: mpmath.fsum(u * v for u, v in zip(a, b, strict=True))  # noqa: E731
        for pair in zip(x, y, strict=True):
            a, b = ([mpmath.mpf(float(v)) for v in vector] for vector in pair)
            times = [mpmath.sqrt(1 / c + dot(z, z)) for z in (a, b)]
            inner = dot(a, b) - times[0] * times[1]
            found.append(float(mpmath.acosh(-c * inner) / mpmath.sqrt(c)))
    return found


@pytest.mark.parametrize("c", CURVATURES)
def test_distances_equal_the_closed_form(float64, c):
    """Near the origin and far out, and for close points."""
    directions, others = unit(FEATURES), unit(np.random.default_rng(1).normal(size=(40, 6)))
    radii = np.geomspace(1e-6, 12, 40)[:, None]
    x, y = points_at(directions, radii, c), points_at(others, radii[::-1], c)
    y[::4] = x[::4] * (1 + 1e-6) + 1e-6 * y[::4]
    expected = exact_distances(x, y, c)
    np.testing.assert_allclose(programs.dist(x, y, c), expected, rtol=1e-9)
    far = np.arange(40) % 4 > 0
    one_by_one = [programs.dist_matrix(a[None], b[None], c) for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(np.ravel(one_by_one)[far], np.array(expected)[far], rtol=1e-9)


@pytest.mark.parametrize(
    ("radius", "at_an_angle", "of_matrix", "in_one_direction"),
    [
        (0.1, 4e-7, 7e-6, 4e-7),
        (1.0, 4e-7, 1e-5, 4e-7),
        (3.0, 4e-7, 1e-5, 5e-6),
        (5.0, 4e-7, 1e-5, 4e-5),
        (7.0, 4e-7, 1e-5, 3e-4),
        (10.0, 4e-7, 1e-5, 5e-3),
        (12.0, 4e-7, 1e-5, 5e-2),
    ],
)
@pytest.mark.parametrize("c", [0.1, 1.0])
def test_float32_distances_are_as_accurate_as_the_table_says(
    c, radius, at_an_angle, of_matrix, in_one_direction
):
    rng = np.random.default_rng(3)
    one, across = unit(rng.normal(size=(40, 16))), rng.normal(size=(40, 16))
    across = unit(across - np.sum(across * one, axis=1, keepdims=True) * one)
    angles = rng.uniform(0.1, np.pi, size=(40, 1))
    other = np.cos(angles) * one + np.sin(angles) * across
    x, y = (points_at(z, radius, c, np.float32) for z in (one, other))
    inner = points_at(one, max(radius - 0.1, radius / 2), c, np.float32)
    expected = exact_distances(x, y, c)
    np.testing.assert_allclose(lorentz.dist(x, y, c), expected, rtol=at_an_angle)
    matrix = np.diagonal(lorentz.dist_matrix(x, y, c))
    np.testing.assert_allclose(matrix, expected, rtol=of_matrix)
    expected = exact_distances(x, inner, c)
    np.testing.assert_allclose(lorentz.dist(x, inner, c), expected, rtol=in_one_direction)


@pytest.mark.parametrize("c", [0.0, *CURVATURES])
@pytest.mark.parametrize("scale", [1e-4, 0.3, 3.0, 30.0])
def test_it_is_isometric_to_the_ball(float64, c, scale):
    radius = 20 * scale if c else None
    space, ball = Lorentz(c, radius), PoincareBall(c, radius)
    assert space.ball() == ball
    x, p = space.embed(scale * FEATURES), ball.embed(scale * FEATURES)
    # Where features reach the bound of the ball, 1 − c‖p‖² has but few digits.
    rtol = 1e-10 if scale * np.sqrt(c) < 1 else 1e-5
    np.testing.assert_allclose(space.to_ball(x), p, rtol=1e-12)
    np.testing.assert_allclose(lorentz.from_poincare(p, c), x, rtol=rtol)
    np.testing.assert_allclose(space.features(x), ball.features(p), rtol=rtol)
    compared = [(x[:, None], x), (p[:, None], p)]
    for name in ("distance", "separation"):
        ours, theirs = (
            getattr(each, name)(*z) for each, z in zip((space, ball), compared, strict=True)
        )
        np.testing.assert_allclose(ours, theirs, rtol=rtol, err_msg=name)
    matrices = space.distance_matrix(x, x), ball.distance_matrix(p, p)
    off = ~np.eye(len(x), dtype=bool)
    np.testing.assert_allclose(matrices[0][off], matrices[1][off], rtol=rtol)
    products = (
        z.search_vectors(w, "query") @ z.search_vectors(w, "gallery").T
        for z, w in ((space, x), (ball, p))
    )
    ours, theirs = (np.argsort(-np.asarray(each), axis=1) for each in products)
    if rtol < 1e-5:
        np.testing.assert_array_equal(ours, theirs)
        weights = np.arange(1.0, 41)
        mean = space.mean(x, weights)
        np.testing.assert_allclose(space.to_ball(mean), ball.mean(p, weights), atol=1e-12)


@pytest.mark.parametrize("c", [0.0, 0.1, 2.0])
def test_search_terms_are_those_of_the_ball(float64, c):
    space, ball = Lorentz(c, 1.0), PoincareBall(c, 1.0)
    x, p = space.embed(FEATURES), ball.embed(FEATURES)
    centre = np.mean(x, axis=0)
    ours = space.search_terms(x, centre)
    theirs = ball.search_terms(p, space.to_ball(centre))
    np.testing.assert_allclose(ours.offset, theirs.offset, rtol=1e-10)
    for name in ("query", "gallery"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-9)
    separations = space.separation(x[:, None], x)
    products = ours.query @ ours.gallery.T - ours.offset[:, None] - ours.offset
    np.testing.assert_allclose(products, -separations, atol=1e-10)
    at_centre = space.search_terms(centre[None], centre)
    assert not np.any(at_centre.query) and not np.any(at_centre.offset)


@pytest.mark.parametrize("c", CURVATURES)
def test_maps_are_inverses_and_lead_as_far_as_the_tangent_is_long(float64, c):
    v = FEATURES / np.sqrt(c)
    x, origin = programs.expmap0(v, c), np.zeros_like(v)
    np.testing.assert_allclose(programs.logmap0(x, c), v, rtol=1e-12)
    np.testing.assert_allclose(programs.dist(x, origin, c), np.linalg.norm(v, axis=1), rtol=1e-12)
    whole = programs.with_time(x, c)
    np.testing.assert_array_equal(whole[:, 1:], x)
    np.testing.assert_allclose(whole[:, 0] ** 2 - np.sum(x * x, axis=1), 1 / c, rtol=1e-9)


def test_features_are_scaled_as_by_meru_and_back(float64):
    """MERU has the exponential map of α·v, here of twice the scaled features."""
    v, alpha, c = np.random.default_rng(0).normal(size=(6, 5)), 0.3, 0.7
    space = Lorentz(c, None, feature_scale=alpha / 2)
    length = np.sqrt(c) * alpha * np.linalg.norm(v, axis=1, keepdims=True)
    x = space.embed(v)
    np.testing.assert_allclose(x, np.sinh(length) / length * alpha * v, rtol=1e-12)
    np.testing.assert_allclose(space.features(x), v, rtol=1e-12)
    clipped = Lorentz(c, 0.2, feature_scale=alpha / 2).clipped(v)
    assert clipped.tolist() == (np.linalg.norm(v, axis=1) * alpha / 2 > 0.2).tolist()


def test_curvature_zero_is_flat():
    x, y = FEATURES[:20], FEATURES[20:]
    flat = np.linalg.norm(x - y, axis=-1)
    for c in (0.0, 1e-9):
        np.testing.assert_allclose(programs.dist(x, y, c), flat, rtol=1e-6)
        np.testing.assert_allclose(np.diagonal(programs.dist_matrix(x, y, c)), flat, rtol=1e-5)
        np.testing.assert_allclose(programs.expmap0(x, c), x, rtol=1e-6)
    np.testing.assert_allclose(programs.frechet_mean(x, 0.0), x.mean(axis=0), atol=1e-6)
    slope = jax.jit(jax.grad(lambda c: lorentz.dist(x[0], y[0], c)))(0.0)
    xx, yy = np.sum(x[0] ** 2), np.sum(y[0] ** 2)
    s = flat[0] ** 2  # d² = 4q·(1 − c·q/3), q = s/4 − c(‖x‖² − ‖y‖²)²/16, to first order in c.
    expected = -((xx - yy) ** 2) / (8 * flat[0]) - flat[0] * s / 24
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_a_matrix_has_a_row_for_each_point_of_the_first_and_a_column_for_the_second(float64):
    x, y = FEATURES[:5], FEATURES[5:9]
    expected = programs.dist(x[:, None], y, 0.1)
    np.testing.assert_allclose(programs.dist_matrix(x, y, 0.1), expected, rtol=1e-8)
