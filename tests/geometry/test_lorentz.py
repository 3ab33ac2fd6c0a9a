"""The hyperboloid against the ball, whose closed forms are tested, and its entailment cones."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from hypjax.geometry import Lorentz, PoincareBall, cones, lorentz
from tests.helpers.programs import compiled

programs = compiled(lorentz)
embed = jax.jit(lambda space, v: space.embed(v))
search_terms = jax.jit(lambda space, x, centre: space.search_terms(x, centre))
angle, aperture = jax.jit(cones.exterior_angle), jax.jit(cones.half_aperture)
CURVATURES = [0.01, 0.1, 1.0, 10.0]
FEATURES = np.random.default_rng(0).normal(size=(40, 6))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def pairs(radii, c, angles, dtype=np.float64):
    """Points at the distances radii/√c from the origin, where they are at given angles."""
    rng = np.random.default_rng(0)
    one, across = unit(rng.normal(size=(len(angles), 16))), rng.normal(size=(len(angles), 16))
    across = unit(across - np.sum(across * one, axis=1, keepdims=True) * one)
    other = np.cos(angles)[:, None] * one + np.sin(angles)[:, None] * across
    lengths = np.sinh(radii) / np.sqrt(c)
    return (one * lengths[0]).astype(dtype), (other * lengths[1]).astype(dtype)


@pytest.mark.parametrize("c", [np.float32(0.1), np.float32(1)])
def test_float32_distances_and_angles_are_as_accurate_as_the_tables_say(c):
    angles = np.random.default_rng(1).uniform(0.1, np.pi, size=60)

    def compare(function, x, y, **tolerance):
        with jax.enable_x64(True):
            expected = np.asarray(function(x.astype(float), y.astype(float), float(c)))
        np.testing.assert_allclose(function(x, y, c), expected, **tolerance)
        return expected

    for radius, in_one_direction in ((0.1, 4e-7), (3, 5e-6), (5, 4e-5), (7, 3e-4), (12, 5e-2)):
        x, y = pairs((radius, radius), c, angles, np.float32)
        expected = compare(programs.dist, x, y, rtol=4e-7)
        np.testing.assert_allclose(np.diagonal(programs.dist_matrix(x, y, c)), expected, rtol=1e-5)
        near = max(radius - 0.1, radius / 2)
        x, y = pairs((radius, near), c, 0 * angles, np.float32)
        compare(programs.dist, x, y, rtol=in_one_direction)
        if radius < 12:
            compare(angle, *pairs((radius, radius + 1), c, angles, np.float32), rtol=0, atol=3e-7)
            x, y = pairs((radius, radius + 1), c, 0 * angles, np.float32)
            compare(angle, x, y, rtol=0, atol=in_one_direction)


@jax.jit
def results(space, x):
    matrix = jnp.where(jnp.eye(len(x), dtype=bool), 0, space.distance_matrix(x, x))
    mean = space.to_ball(space.mean(x, jnp.arange(1.0, 41)))
    actual = {"ball": space.to_ball(x), "features": space.features(x), "matrix": matrix}
    actual |= {"distance": space.distance(x[:, None], x), "mean": mean}
    return actual | {"separation": space.separation(x[:, None], x)}


@pytest.mark.parametrize("c", [0.0, *CURVATURES])
@pytest.mark.parametrize("scale", [1e-4, 0.3, 3.0, 30.0])
def test_it_is_isometric_to_the_ball(float64, c, scale):
    space, ball = Lorentz(c, None), PoincareBall(c, None)
    assert space.ball() == ball
    x, p = embed(space, scale * FEATURES), embed(ball, scale * FEATURES)
    # Where features reach the bound of the ball, 1 − c‖p‖² has but few digits.
    rtol = 1e-10 if scale * np.sqrt(c) < 1 else 1e-5
    ours, theirs = results(space, x), results(ball, p)
    np.testing.assert_allclose(ours.pop("ball"), p, rtol=1e-12)
    np.testing.assert_allclose(programs.from_poincare(p, c), x, rtol=rtol)
    means = ours.pop("mean"), theirs.pop("mean")
    for name, actual in ours.items():
        np.testing.assert_allclose(actual, theirs[name], rtol=rtol, err_msg=name)
    if rtol < 1e-5:
        np.testing.assert_allclose(*means, atol=1e-12)


@pytest.mark.parametrize("c", [0.0, 0.1, 2.0])
def test_search_terms_are_those_of_the_ball(float64, c):
    space, ball = Lorentz(c, 1.0), PoincareBall(c, 1.0)
    x, p = embed(space, FEATURES), embed(ball, FEATURES)
    centre = np.mean(x, axis=0)
    ours = search_terms(space, x, centre)
    theirs = search_terms(ball, p, space.to_ball(centre))
    np.testing.assert_allclose(ours.offset, theirs.offset, rtol=1e-10)
    for name in ("query", "gallery"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-9)
    separations = programs.separation(x[:, None], x, c)
    products = np.asarray(ours.query @ ours.gallery.T) - ours.offset[:, None] - ours.offset[None]
    np.testing.assert_allclose(products, -separations, atol=1e-10)
    at_centre = search_terms(space, centre[None], centre)
    assert not np.any(at_centre.query) and not np.any(at_centre.offset)


@pytest.mark.parametrize("c", CURVATURES)
def test_cones_equal_their_closed_forms(float64, c):
    """Exterior angles are those of the hyperbolic law of cosines, in triangles with the origin."""
    near, far = 1.2, 2.0
    x, y = pairs((near, far), c, np.linspace(0.1, 3, 30))
    apart = np.sqrt(c) * programs.dist(x, y, c)
    cosines = (np.cosh(near) * np.cosh(apart) - np.cosh(far)) / (np.sinh(near) * np.sinh(apart))
    np.testing.assert_allclose(angle(x, y, c), np.pi - np.arccos(cosines), rtol=1e-9)
    np.testing.assert_allclose(aperture(x, c, 0.3), np.arcsin(0.6 / np.sinh(near)), rtol=1e-12)
    # Close to the origin a cone is a half-space, and at it or at y itself there is no angle.
    for right in (aperture(x / 9, c, 0.3), angle(0 * x, y, c), angle(x, x, c)):
        np.testing.assert_array_equal(right, np.pi / 2)


@pytest.mark.parametrize("c", CURVATURES)
def test_maps_are_inverses_and_lead_as_far_as_the_tangent_is_long(float64, c):
    v = FEATURES / np.sqrt(c)
    x, origin = programs.expmap0(v, c), np.zeros_like(v)
    np.testing.assert_allclose(programs.logmap0(x, c), v, rtol=1e-12)
    np.testing.assert_allclose(programs.dist(x, origin, c), np.linalg.norm(v, axis=1), rtol=1e-12)
    whole = programs.with_time(x, c)
    np.testing.assert_array_equal(whole[:, 1:], x)
    np.testing.assert_allclose(whole[:, 0] ** 2 - np.sum(x * x, axis=1), 1 / c, rtol=1e-9)


centroids = jax.jit(lorentz.centroids, static_argnums=2)


@pytest.mark.parametrize("c", CURVATURES)
def test_centroids_are_normalised_sums_and_einsteins_midpoints(float64, c):
    x, groups = embed(Lorentz(c, None), FEATURES / (2 * c**0.5)), np.arange(40) % 3
    actual = np.asarray(centroids(x, groups, 4, c))
    klein = c**0.5 * x / np.sqrt(1 + c * np.sum(x * x, axis=1, keepdims=True))
    gamma = 1 / np.sqrt(1 - np.sum(klein**2, axis=1, keepdims=True))
    for group in range(3):
        total = np.sum(programs.with_time(x, c)[groups == group], axis=0)
        length = np.sqrt(c * (total[0] ** 2 - total[1:] @ total[1:]))
        np.testing.assert_allclose(actual[group], total[1:] / length, rtol=1e-9)
        mean = np.average(klein[groups == group], axis=0, weights=gamma[groups == group][:, 0])
        mean /= 1 + np.sqrt(1 - mean @ mean)
        np.testing.assert_allclose(programs.to_poincare(actual[group], c), mean / c**0.5, rtol=1e-9)
    assert not actual[3].any()
    np.testing.assert_allclose(centroids(x, groups, 3, 0.0)[0], np.mean(x[::3], axis=0), rtol=1e-12)
    jax.test_util.check_grads(
        lambda x: centroids(x, groups, 3, c), (x / x.max(),), order=1, modes=["rev"], rtol=1e-6
    )


@pytest.mark.parametrize("radius", [0.1, 3.0, 6.2, 10.0])
def test_float32_centroids_keep_their_digits_far_out(radius):
    """Of single points, of close ones and of those at larger angles."""
    angles, c = np.geomspace(1e-4, 3, 30), np.float32(0.1)
    x, y = pairs((radius, radius), c, angles, np.float32)
    x, groups = np.concatenate([x, y, x]), np.concatenate([np.arange(30)] * 2 + [np.arange(30, 60)])
    actual = np.asarray(centroids(x, groups, 60, c))
    with jax.enable_x64(True):
        exact = centroids(x.astype(float), groups, 60, float(c))
        errors = np.sqrt(c) * np.asarray(programs.dist(actual.astype(float), exact, float(c)))
        time = np.asarray(programs.with_time(exact, float(c)))[:, 0] * np.sqrt(c)
    assert np.all(errors < 2e-7 * time)


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
    np.testing.assert_allclose(programs.dist(x, y, 1e-9), flat, rtol=1e-6)
    slope = jax.jit(jax.grad(lambda c: lorentz.dist(x[0], y[0], c)))(0.0)
    xx, yy = np.sum(x[0] ** 2), np.sum(y[0] ** 2)
    s = flat[0] ** 2  # d² = 4q·(1 − c·q/3), q = s/4 − c(‖x‖² − ‖y‖²)²/16, to first order in c.
    expected = -((xx - yy) ** 2) / (8 * flat[0]) - flat[0] * s / 24
    np.testing.assert_allclose(slope, expected, rtol=1e-5)
