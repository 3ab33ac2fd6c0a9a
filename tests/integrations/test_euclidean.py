"""Neighbours among candidates: of Euclidean searches, against brute force."""

import jax
import numpy as np
import pytest
from scipy.spatial import cKDTree

from hypjax.geometry import Lorentz, PoincareBall, Sphere
from hypjax.retrieval import euclidean
from hypjax.retrieval.euclidean import rank, recall_bound, recall_hits, shells_of


def points_of(space, rng, n, dim=4):
    """Points of the sphere, or up to 0.99 of the radius of a space's ball."""
    x = rng.normal(size=(n, dim))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    if not isinstance(space, Sphere):
        x *= 0.99 / np.sqrt(space.c or 0.1) * rng.uniform(0, 1, size=(n, 1))
        x = np.asarray(jax.jit(space.from_ball)(x))
    return x.astype(np.float32)


def separations_of(queries, x, space):
    q, x = queries[:, None].astype(np.float64), x.astype(np.float64)
    if isinstance(space, Lorentz):
        with jax.enable_x64(True):
            return np.asarray(jax.jit(space.separation)(q, x))
    c = getattr(space, "c", 0.0)
    gaps = [1 - c * np.sum(y**2, axis=-1) for y in (q, x)]
    return np.sum((q - x) ** 2, axis=-1) / (gaps[0] * gaps[1])


FLAT = [Sphere(), PoincareBall(0.0, None)]
CURVED = [PoincareBall(0.1, None), PoincareBall(1.0, None), Lorentz(1.0, None)]


@pytest.mark.parametrize("space", FLAT + CURVED, ids=str)
def test_candidates_are_ranked_once_each_by_their_separations(space):
    rng = np.random.default_rng(0)
    x = points_of(space, rng, 50)
    x[7] = x[3]  # A tie, which the order of the gallery decides.
    q = x[:3]
    rows = rng.integers(0, 2, 200)  # The last query has no candidate.
    items = rng.integers(0, 50, 200)
    found, listed = rank(q, x, rows, items, k=30, space=space)
    exact = separations_of(q, x, space)
    for row in range(3):
        candidates = np.unique(items[rows == row])
        order = candidates[np.argsort(exact[row, candidates], kind="stable")][:30]
        np.testing.assert_array_equal(listed[row, : len(order)], order)
        np.testing.assert_allclose(found[row, : len(order)], exact[row, order], rtol=1e-12)
        assert (listed[row, len(order) :] == -1).all() and np.isinf(found[row, len(order) :]).all()


def test_most_samples_assure_less_than_the_mean():
    for mean in (0.9, 0.99):
        samples = np.random.default_rng(0).random((1000, 200, 10)) < mean
        bounds = np.array([recall_bound(hits) for hits in samples])
        assert 0.93 < np.mean(bounds <= mean) < 0.999
        assert mean - bounds.mean() < 0.02
    assert recall_bound(np.zeros((0, 1), bool)) == 1  # A single image.


def test_items_as_far_as_the_last_neighbour_count_as_found():
    cases = (
        ([5, 3, 1, 2], [0, 1, 2, 2], [True, True, True, True]),
        ([5, 3, 9, 8], [0, 1, 2, 2], [True, True, True, True]),  # Others, as far as these.
        ([5, 9, 8, 7], [0, 2, 2, 2], [True, False, True, True]),
        ([5, 3, 2, 9], [0, 1, 2, 2.1], [True, True, True, False]),
        ([5, 3, -1, -1], [0, 1, np.inf, np.inf], [True, True, False, False]),
        ([3, 1, 9, 8], [1, 2, 2, 2], [False, True, True, True]),
        ([5, 4, 3, 1], [0, 0, 1, 2], [True, True, True, False]),
    )
    items, distances, expected = map(np.array, zip(*cases, strict=True))
    exact = np.tile([0.0, 1.0, 2.0, 2.0], (7, 1)), np.tile([5, 3, 1, 2], (7, 1))
    np.testing.assert_array_equal(recall_hits(exact, (distances, items)), expected)


def flat(x):
    """Exact Euclidean search among x."""

    def search(points, m):
        squares = np.sum((points[:, None].astype(np.float64) - x) ** 2, axis=-1)
        return np.argsort(squares, axis=1, kind="stable")[:, :m]

    return search


@pytest.mark.parametrize("space", CURVED, ids=str)
def test_two_searches_find_what_one_misses_near_the_boundary(space):
    rng, ball = np.random.default_rng(0), space.ball()
    features = 4 * points_of(PoincareBall(ball.c, None), rng, 5000, dim=3)
    x = np.asarray(space.embed(features))
    q, in_ball = x[:200], np.asarray(ball.embed(features))
    wide = separations_of(q, x, space)
    exact = np.argsort(wide, axis=1, kind="stable")[:, :10]
    found, items = euclidean.nearest(flat(in_ball), x, q, k=10, space=space, candidates=50)
    np.testing.assert_array_equal(items, exact)
    np.testing.assert_allclose(found, np.take_along_axis(wide, exact, axis=1), 1e-12, 1e-24)
    two = lambda points, m: np.where(np.arange(m) < 2, flat(in_ball)(points, m), -1)  # noqa: E731
    found, items = euclidean.nearest(two, x, q, k=3, space=space, candidates=10)
    assert (items[:, 2] == -1).all() and np.isinf(found[:, 2]).all()
    one = flat(in_ball)(in_ball[:200], 50)
    assert (exact[:, :, None] == one[:, None]).any(axis=2).mean() < 0.97


@pytest.mark.parametrize("c", [1e-3, 1.0, 10.0])
@pytest.mark.parametrize("k", [3, 10, 600])
def test_repeated_searches_of_an_exact_index_are_exact_up_to_the_boundary(c, k):
    rng, space = np.random.default_rng(0), PoincareBall(c, None)
    x = rng.normal(size=(600, 3))
    gaps = 10 ** rng.uniform(-6, 0, (600, 1))  # In places so crowded that neighbours are close.
    x = (0.1 * x).round(1) + 0.001 * x
    x *= np.sqrt((1 - gaps) / c) / np.linalg.norm(x, axis=1, keepdims=True)
    x = x.astype(np.float32)
    x[1::40] = x[::40]  # Duplicates.
    q, tree, rounds = x[:100], cKDTree(x.astype(np.float64)), []

    def search(points, m):
        rounds.append(len(points))
        return tree.query(points, [*range(1, m + 1)])[1]

    found, items = euclidean.nearest(search, x, q, k=k, space=space, candidates=k)
    exact = separations_of(q, x, space)  # Gaps of 1e-6 are known to 1e-10.
    np.testing.assert_allclose(found, np.sort(exact, axis=1)[:, :k], 1e-9, 1e-24)
    np.testing.assert_allclose(np.take_along_axis(exact, items, axis=1), found, 1e-9, 1e-24)
    assert k == 600 or sum(rounds[:2]) == 200 < sum(rounds)  # Two searches are not enough for all.


def test_points_of_a_shell_differ_by_a_factor_of_four_in_their_gaps():
    x = np.sqrt(1 - np.array([[1.0], [0.26], [0.24], [1 / 17], [1e-6]]))
    np.testing.assert_array_equal(shells_of(x, PoincareBall(1.0, None)), [0, 0, 1, 2, 9])
    assert not shells_of(x, Sphere()).any()
