"""Recall@K against float64 brute force, and in cases that naive counting gets wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import match_ranks, ranks, recall_at_k

SPACES = [Sphere(), PoincareBall(0.1, 2.3), PoincareBall(1.0, 0.8), PoincareBall(0.0, None)]


def brute_force(queries, query_labels, gallery, gallery_labels, space, exclude_self):
    """Sorts all float64 distances, ties by index, and finds the first match."""
    with jax.enable_x64(True):
        x, y = (np.asarray(z, np.float64) for z in (queries, gallery))
        distances = np.stack([np.asarray(space.distance(row, y)) for row in x])
    ranks = []
    for i, row in enumerate(distances):
        order = np.lexsort((np.arange(len(row)), row))
        order = order[order != i] if exclude_self else order
        hits = np.flatnonzero(gallery_labels[order] == query_labels[i])
        ranks.append(hits[0] if len(hits) else np.iinfo(np.int32).max)
    return np.array(ranks)


def labelled_points(space, seed, n, dim, classes, duplicates):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, dim)).astype(np.float32)
    features[rng.integers(0, n, duplicates)] = features[rng.integers(0, n, duplicates)]
    return np.asarray(space.embed(features)), rng.integers(0, classes, n)


@pytest.mark.parametrize(
    "space",
    [SPACES[1], *(pytest.param(s, marks=pytest.mark.slow) for s in (SPACES[0], *SPACES[2:]))],
    ids=str,
)
def test_equals_brute_force_on_2000_points_with_duplicates(space):
    x, labels = labelled_points(space, 0, 2000, 32, 150, duplicates=500)
    expected = brute_force(x, labels, x, labels, space, exclude_self=True)
    recalls = recall_at_k(x, labels, ks=(1, 2, 4, 8, 10, 100), space=space)
    assert recalls == {k: np.mean(expected < k) for k in recalls}
    np.testing.assert_array_equal(match_ranks(x, labels, space=space), expected)


@pytest.mark.parametrize("space", SPACES[:2], ids=str)
def test_equals_brute_force_with_a_separate_gallery(space):
    x, labels = labelled_points(space, 0, 150, 8, 20, duplicates=0)
    y, gallery_labels = labelled_points(space, 1, 333, 8, 20, duplicates=100)
    expected = brute_force(x, labels, y, gallery_labels, space, exclude_self=False)
    got = match_ranks(x, labels, y, gallery_labels, space=space)
    np.testing.assert_array_equal(got, expected)


@given(seed=st.integers(0, 2**32 - 1), dim=st.sampled_from([1, 3]), copies=st.integers(0, 12))
@settings(max_examples=12, deadline=None)
def test_small_galleries_with_many_ties(seed, dim, copies):
    """With coordinates on a coarse grid, many distances are equal in both float64 and float32."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, size=(40, dim)) / 8
    x[:copies] = x[0]
    labels = rng.integers(0, 6, 40)
    space = PoincareBall(0.0, None)
    expected = brute_force(x, labels, x, labels, space, exclude_self=True)
    np.testing.assert_array_equal(match_ranks(x, labels, space=space), expected)


@pytest.mark.parametrize("space", SPACES[:2], ids=str)
def test_constant_embeddings_score_at_chance(space):
    x = np.asarray(space.embed(np.tile([[0.3, 0.4, 0.5]], (1000, 1))))
    labels = np.random.default_rng(0).permutation(np.arange(1000) // 10)
    recalls = recall_at_k(x, labels, ks=(1, 100), space=space)
    assert recalls[1] <= 0.02
    assert recalls[100] == pytest.approx(1 - 0.9**10, abs=0.2)


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


def test_queries_without_a_match_are_left_out():
    x = np.array([[0.1, 0.0], [0.12, 0.0], [0.5, 0.5]])
    with pytest.warns(UserWarning, match="1 of 3 queries have no match and are left out"):
        recalls = recall_at_k(x, [0, 0, 9], ks=(1,), space=PoincareBall(0.1))
    assert recalls == {1: 1.0}
    with pytest.raises(UserError, match="no query has a match in the gallery"):
        recall_at_k(x, [0, 1, 2], ks=(1,), space=PoincareBall(0.1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_embeddings_are_an_error(value):
    x, labels = labelled_points(Sphere(), 0, 20, 4, 5, duplicates=0)
    bad = x.copy()
    bad[11, 2] = value
    for call in (
        lambda: recall_at_k(bad, labels, ks=(1,), space=Sphere()),
        lambda: recall_at_k(x, labels, bad, labels, ks=(1,), space=Sphere()),
    ):
        with pytest.raises(UserError, match="embedding 11 is not finite"):
            call()


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


def test_labels_may_be_any_integers():
    x, labels = labelled_points(Sphere(), 0, 60, 4, 9, duplicates=0)
    expected = match_ranks(x, labels, space=Sphere())
    np.testing.assert_array_equal(match_ranks(x, -(10**12) * labels, space=Sphere()), expected)


def test_half_precision_points_are_compared_in_float32():
    x, labels = labelled_points(PoincareBall(), 0, 60, 4, 9, duplicates=0)
    x = jnp.asarray(x, jnp.bfloat16)
    expected = match_ranks(np.asarray(x, np.float32), labels, space=PoincareBall())
    np.testing.assert_array_equal(match_ranks(x, labels, space=PoincareBall()), expected)


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
    expected = brute_force(x, labels, x, labels, space, exclude_self=True)
    got = match_ranks(x, labels, space=space)
    jax.clear_caches()
    np.testing.assert_array_equal(got, expected)
