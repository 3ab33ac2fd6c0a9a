"""The nearest among candidates, and scans of the points near the centre, against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.engines.candidates import Centre, assured, found_neighbours, rank, separation_factors
from hypjax.errors import UserError
from hypjax.geometry import Fused, PoincareBall, Sphere


def points_of(space, rng, n, dim=4):
    """Points of a ball up to 0.99 of its radius, or of the sphere."""
    x = rng.normal(size=(n, dim))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    if not isinstance(space, Sphere):
        radius = 1 / np.sqrt(space.c) if space.c else 3.0
        x *= 0.99 * radius * rng.uniform(0, 1, size=(n, 1))
    return x.astype(np.float32)


def separations(queries, x, space):
    q, x = queries[:, None].astype(np.float64), x.astype(np.float64)
    if isinstance(space, Sphere):
        return np.sum((q - x) ** 2, axis=-1)
    gaps = (1 - space.c * np.sum(y**2, axis=-1) for y in (q, x))
    return np.sum((q - x) ** 2, axis=-1) / np.prod(np.broadcast_arrays(*gaps), axis=0)


SPACES = [Sphere(), PoincareBall(0.1, None), PoincareBall(1.0, None), PoincareBall(0.0, None)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_candidates_are_ranked_once_each_by_their_separations(space):
    rng = np.random.default_rng(0)
    x = points_of(space, rng, 50)
    x[7] = x[3]  # A tie, which the order of the gallery decides.
    q = x[:3]
    rows = rng.integers(0, 2, 200)  # The last query has no candidate.
    items = rng.integers(0, 50, 200)
    found, listed = rank(q, x, rows, items, k=30, space=space)
    exact = separations(q, x, space)
    for row in range(3):
        candidates = np.unique(items[rows == row])
        order = candidates[np.argsort(exact[row, candidates], kind="stable")][:30]
        np.testing.assert_array_equal(listed[row, : len(order)], order)
        np.testing.assert_allclose(found[row, : len(order)], exact[row, order], rtol=1e-12)
        assert (listed[row, len(order) :] == -1).all() and np.isinf(found[row, len(order) :]).all()


def test_most_samples_assure_less_than_the_mean():
    """Queries find themselves, which counts for nothing."""
    own = np.zeros((200, 11), bool)
    own[:, 0] = True
    for mean in (0.9, 0.99):
        samples = np.random.default_rng(0).random((1000, *own.shape)) < mean
        bounds = np.array([assured(own | hits, own) for hits in samples])
        assert 0.93 < np.mean(bounds <= mean) < 0.999
        assert mean - bounds.mean() < 0.02
    assert assured(own[:1, :1], own[:1, :1]) == 1  # A single image.


def test_items_as_far_as_the_last_neighbour_count_as_found():
    exact = np.array([[0.0, 1.0, 2.0, 2.0]]), np.array([[5, 3, 1, 2]])
    for items, distances, found in (
        ([5, 3, 1, 2], [0, 1, 2, 2], [True, True, True, True]),
        ([5, 3, 9, 8], [0, 1, 2, 2], [True, True, True, True]),  # Others, as far as these.
        ([5, 9, 8, 7], [0, 2, 2, 2], [True, False, True, True]),
        ([5, 3, 2, 9], [0, 1, 2, 2.1], [True, True, False, True]),
        ([5, 3, -1, -1], [0, 1, np.inf, np.inf], [True, True, False, False]),
    ):
        hits = found_neighbours(exact, (np.array([distances]), np.array([items])))
        assert hits.tolist() == [found], items


@given(
    seed=st.integers(0, 999),
    space=st.sampled_from(SPACES),
    scanned=st.integers(0, 40),
    queries=st.sampled_from([1, 3, 300]),
)
@settings(max_examples=40, deadline=None)
def test_a_scan_finds_all_points_within_a_separation(seed, space, scanned, queries):
    rng = np.random.default_rng(seed)
    x, q = points_of(space, rng, 60), points_of(space, rng, queries)
    items = rng.permutation(60)[:scanned]
    exact = separations(q, x, space)
    limits = np.quantile(exact, 0.3, axis=1)
    rows, found = Centre(x, items, space).within(q, limits)
    listed = np.zeros(exact.shape, bool)
    listed[rows, found] = True
    expected = np.isin(np.arange(60), items) & (exact <= limits[:, None])
    assert (listed | ~expected).all()
    assert not listed[:, np.setdiff1d(np.arange(60), items)].any()
    if isinstance(space, Sphere) or space.c == 0:  # Elsewhere float32 is coarse near the boundary.
        assert (exact[rows, found] <= limits[rows] + 1e-3).all()


def test_other_spaces_are_refused():
    fused = Fused(((Sphere(), 1.0),))
    with pytest.raises(UserError, match="there is no approximate search in"):
        separation_factors(np.ones((1, 2), np.float32), fused)
