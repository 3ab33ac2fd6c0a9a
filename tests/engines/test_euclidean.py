"""Hyperbolic neighbours by Euclidean distances, with exact Euclidean searches in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.engines import euclidean
from hypjax.geometry import PoincareBall, Sphere


def ball_points(rng, n, dim, c, largest):
    x = rng.normal(size=(n, dim))
    radii = rng.uniform(0, largest, size=(n, 1)) / np.sqrt(c)
    return x / np.linalg.norm(x, axis=1, keepdims=True) * radii


def separations(q, x, c):
    squares = np.sum((q[:, None] - x) ** 2, axis=-1)
    gaps = [1 - c * np.sum(points**2, axis=1) for points in (q, x)]
    return squares / np.outer(*gaps)


def flat(x):
    """Exact searches among x, and the numbers of candidates they were asked for."""

    def search(points, m):
        squares = np.sum((points[:, None].astype(np.float64) - x) ** 2, axis=-1)
        return np.argsort(squares, axis=1, kind="stable")[:, :m]

    return search


@given(seed=st.integers(0, 999), c=st.sampled_from([0.01, 0.1, 1.0, 5.0]), dim=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_the_points_within_a_separation_are_a_euclidean_ball(seed, c, dim):
    rng = np.random.default_rng(seed)
    x, q = ball_points(rng, 60, dim, c, 0.99), ball_points(rng, 5, dim, c, 0.99)
    all_separations = separations(q, x, c)
    limits = np.median(all_separations, axis=1)
    centres = euclidean.centres(q, limits, PoincareBall(c, None)).astype(np.float64)
    squares = np.sum((centres[:, None] - x) ** 2, axis=-1)
    inside = all_separations <= limits[:, None]
    nearest_outside = np.where(inside, np.inf, squares).min(axis=1)
    farthest_inside = np.where(inside, squares, 0).max(axis=1)
    assert (farthest_inside <= nearest_outside * (1 + 1e-5) + 1e-6 / c).all()


@pytest.mark.parametrize("c", [0.1, 1.0])
def test_two_searches_find_what_one_misses_near_the_boundary(c):
    rng, ball = np.random.default_rng(0), PoincareBall(c, None)
    x = ball_points(rng, 5000, 3, c, 1.0)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    x = (x / norms * np.tanh(4 * norms * np.sqrt(c)) / np.sqrt(c)).astype(np.float32)
    q = x[:200]
    wide = separations(q.astype(np.float64), x.astype(np.float64), c)
    exact = np.argsort(wide, axis=1, kind="stable")[:, :10]
    found, places = euclidean.nearest(flat(x), x, q, k=10, space=ball, candidates=50)
    np.testing.assert_array_equal(places, exact)
    np.testing.assert_allclose(found, np.take_along_axis(wide, exact, axis=1), rtol=1e-12)
    one = flat(x)(q, 50)
    assert (exact[:, :, None] == one[:, None]).any(axis=2).mean() < 0.97


@pytest.mark.parametrize("space", [Sphere(), PoincareBall(0.0, None)], ids=str)
def test_flat_spaces_and_missing_items(space):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)).astype(np.float32)
    if isinstance(space, Sphere):
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    found, places = euclidean.nearest(flat(x), x, x[:5], k=3, space=space, candidates=10)
    np.testing.assert_array_equal(places, flat(x)(x[:5], 3))
    np.testing.assert_allclose(found[:, 1], np.sum((x[:5] - x[places[:, 1]]) ** 2, 1), rtol=1e-5)

    def two(points, m):
        return np.pad(flat(x)(points, 2), ((0, 0), (0, m - 2)), constant_values=-1)

    found, places = euclidean.nearest(two, x, x[:5], k=3, space=space, candidates=10)
    assert np.isinf(found[:, 2]).all() and (places[:, 2] == -1).all()
