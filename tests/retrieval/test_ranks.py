"""Ranks and Recall@K in cases that naive counting gets wrong; see also test_exactness.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import match_ranks, ranks, recall_at_k
from tests.helpers.exact_order import true_order, true_ranks


def labelled_points(space, seed, n, dim, classes, duplicates):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, dim)).astype(np.float32)
    features[rng.integers(0, n, duplicates)] = features[rng.integers(0, n, duplicates)]
    return np.asarray(space.embed(features)), rng.integers(0, classes, n)


@given(seed=st.integers(0, 2**32 - 1), dim=st.sampled_from([1, 3]), copies=st.integers(0, 12))
@settings(max_examples=12, deadline=None)
def test_small_galleries_with_many_ties(seed, dim, copies):
    """With coordinates on a coarse grid, many distances are equal in both float64 and float32."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, size=(40, dim)) / 8
    x[:copies] = x[0]
    labels = rng.integers(0, 6, 40)
    space = PoincareBall(0.0, None)
    expected = true_ranks(true_order(space, x, x), labels, labels, exclude_self=True)
    np.testing.assert_array_equal(match_ranks(x, labels, space=space), expected)


def test_copy_of_the_query_counts_as_a_neighbour():
    """Dropping the first hit as the query itself would drop the copy instead."""
    x = np.array([[0.1, 0.2], [0.1, 0.2], [0.5, 0.5], [0.5, 0.6]])
    np.testing.assert_array_equal(
        match_ranks(x, [0, 0, 1, 1], space=PoincareBall(0.1)), [0, 0, 0, 0]
    )


def test_ties_are_ranked_by_index():
    x = np.array([[0.0, 0.0], [0.0, 0.2], [0.2, 0.0], [0.0, -0.2]])
    labels = [7, 5, 7, 6]
    assert match_ranks(x, labels, space=PoincareBall(0.1))[0] == 1


def test_ranks_mark_queries_without_a_match():
    x, labels = labelled_points(Sphere(), 0, 300, 4, 5, duplicates=0)
    labels[7] = 9
    separate = match_ranks(x, labels, x, np.where(labels == 3, 2, labels), space=Sphere())
    np.testing.assert_array_equal(separate == ranks.NO_MATCH, labels == 3)
    np.testing.assert_array_equal(
        np.flatnonzero(match_ranks(x, labels, space=Sphere()) == ranks.NO_MATCH), [7]
    )


def test_no_query_with_a_match_is_an_error():
    x = np.array([[0.1, 0.0], [0.12, 0.0], [0.5, 0.5]])
    with pytest.raises(UserError, match="no query has a match in the gallery"):
        recall_at_k(x, [0, 1, 2], ks=(1,), space=PoincareBall(0.1))


@pytest.mark.parametrize("place", [0, 1])
def test_nonfinite_embeddings_are_an_error(place):
    x, labels = labelled_points(Sphere(), 0, 20, 4, 5, duplicates=0)
    searched = [x.copy(), x.copy()]
    searched[place][11, 2] = np.inf
    with pytest.raises(UserError, match="embedding 11 is not finite"):
        recall_at_k(searched[0], labels, searched[1], labels, ks=(1,), space=Sphere())


def test_points_on_the_boundary_in_float32_are_an_error():
    x, labels = labelled_points(Sphere(), 0, 40, 4, 5, duplicates=0)
    x = x.astype(np.float64) * (1 - 1e-9)
    with pytest.raises(UserError, match="is outside the ball of radius 1/√1, or too close to"):
        recall_at_k(x, labels, ks=(1,), space=PoincareBall(1.0))


def test_shapes_and_labels_that_do_not_fit_are_an_error():
    x = np.zeros((5, 3))
    ball = PoincareBall()
    with pytest.raises(UserError, match=r"queries has 5 rows but labels of shape \(4,\)"):
        recall_at_k(x, np.zeros(4, int), ks=(1,), space=ball)
    with pytest.raises(UserError, match="queries have 3 coordinates, the gallery 2"):
        recall_at_k(x, np.zeros(5, int), x[:, :2], np.zeros(5, int), ks=(1,), space=ball)
    with pytest.raises(UserError, match="a gallery needs gallery_labels"):
        recall_at_k(x, np.zeros(5, int), x, ks=(1,), space=ball)
    with pytest.raises(UserError, match="queries must be"):
        recall_at_k(x[:0], np.zeros(0, int), ks=(1,), space=ball)
    with pytest.raises(UserError, match="must fit into int64"):
        recall_at_k(x[:2], np.array([2**63, 1], np.uint64), ks=(1,), space=ball)


def test_labels_may_be_any_integers_and_points_of_half_precision():
    x, labels = labelled_points(PoincareBall(), 0, 60, 4, 9, duplicates=0)
    x = jnp.asarray(x, jnp.bfloat16)
    expected = match_ranks(np.asarray(x, np.float32), labels, space=PoincareBall())
    got = match_ranks(x, -(10**12) * labels, space=PoincareBall())
    np.testing.assert_array_equal(got, expected)


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=40), tile=st.sampled_from([64, 128]))
@settings(max_examples=100, deadline=None)
def test_small_classes_do_not_cross_tile_boundaries(sizes, tile):
    rows = ranks._rows_of_classes(np.array(sizes), tile)
    assert len(rows) == sum(sizes) and (np.diff(rows) > 0).all()
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        if 0 < size <= tile // 16:
            assert rows[end - size] // tile == rows[end - 1] // tile


def test_equals_brute_force_over_many_tiles(monkeypatch):
    monkeypatch.setattr(ranks, "_TILE", 64)
    jax.clear_caches()
    space = Sphere()
    x, _ = labelled_points(space, 0, 300, 8, 5, duplicates=60)
    labels = np.repeat(np.arange(60), np.random.default_rng(0).integers(1, 22, 60))[:300]
    labels = np.random.default_rng(1).permutation(np.pad(labels, (0, 300 - len(labels))))
    expected = true_ranks(true_order(space, x, x), labels, labels, exclude_self=True)
    got = match_ranks(x, labels, space=space)
    jax.clear_caches()
    np.testing.assert_array_equal(got, expected)
