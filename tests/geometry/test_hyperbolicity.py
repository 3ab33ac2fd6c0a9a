"""Gromov's δ against trees, closed forms and the definition in float64; and random samples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import hyperbolicity
from hypjax.geometry.hyperbolicity import curvature_from_delta, gromov_delta, relative_delta

KEY = jax.random.key(0)


def gaussian(n, dim=6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, dim))


def euclidean(points):
    points = np.asarray(points, np.float64)
    return np.sqrt(np.stack([np.sum((points - point) ** 2, axis=-1) for point in points]))


def by_definition(distances):
    """Largest element of (M ⊗ M) − M, computed in full in float64."""
    d = np.asarray(distances, np.float64)
    m = (d[0][:, None] + d[0] - d) / 2
    product = np.full(m.shape, -np.inf)
    for column, row in zip(m.T, m, strict=True):
        product = np.maximum(product, np.minimum(column[:, None], row))
    return (product - m).max()


def four_point_delta(d):
    """Largest value, over four points, of half the difference of the two largest sums."""
    largest = 0
    for i, j, k, m in itertools.combinations(range(len(d)), 4):
        sums = sorted([d[i, j] + d[k, m], d[i, k] + d[j, m], d[i, m] + d[j, k]])
        largest = max(largest, (sums[2] - sums[1]) / 2)
    return largest


def tree(edges):
    """Distances between the nodes of a tree, to which each edge (parent, weight) adds a node."""
    distances = np.zeros((len(edges) + 1, len(edges) + 1))
    for child, (parent, weight) in enumerate(edges, start=1):
        distances[child, :child] = distances[parent % child, :child] + weight
        distances[:child, child] = distances[child, :child]
    return distances


def cycle(n):
    steps = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return np.minimum(steps, n - steps)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 1000)), min_size=39, max_size=39))
def test_delta_of_a_tree_is_0(edges):
    assert gromov_delta(tree(edges)) == 0  # Small integers and halves are exact.


@pytest.mark.parametrize("n", [4, 5, 6, 7, 21])
def test_delta_of_a_cycle_is_a_quarter_of_its_length(n):
    expected = n // 4 - (0.5 if n % 4 == 1 else 0)
    assert gromov_delta(cycle(n)) == four_point_delta(cycle(n)) == expected


@pytest.mark.parametrize("n", [4, 16, 17, 60, 530])
def test_delta_equals_its_definition_for_any_number_of_points(n):
    distances = euclidean(gaussian(n))
    np.testing.assert_allclose(gromov_delta(distances), by_definition(distances), rtol=2e-6)


@pytest.mark.parametrize("indices", list(itertools.permutations([1, 280, 529])))
def test_delta_depends_on_points_of_all_tiles(indices):
    """The δ of a square depends on all corners, which are in different tiles and chunks here."""
    points = np.zeros((530, 2))
    points[list(indices)] = [[1, 0], [0, 1], [1, 1]]
    np.testing.assert_allclose(gromov_delta(euclidean(points)), np.sqrt(2) - 1, rtol=1e-6)


def test_float64_is_preserved(float64):
    distances = euclidean(gaussian(60))
    delta = gromov_delta(distances)
    assert delta.dtype == jnp.float64
    np.testing.assert_allclose(delta, by_definition(distances), rtol=1e-13)


def test_diagonal_is_ignored():
    path = np.abs(np.subtract.outer(np.arange(20.0), np.arange(20.0)))
    assert gromov_delta(path + 1e-2 * np.eye(20)) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_delta_of_nonfinite_distances_is_nan(value):
    distances = euclidean(gaussian(20))
    distances[3, 7] = distances[7, 3] = value
    assert np.isnan(jax.jit(gromov_delta)(distances))


def test_max_min_product_needs_little_memory():
    matrix = jax.ShapeDtypeStruct((2000, 2000), jnp.float32)
    compiled = hyperbolicity._delta.lower(matrix).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 50e6


@pytest.mark.parametrize("dim", [1, 16, 50])
def test_relative_delta_of_all_points(dim):
    points = gaussian(60, dim)
    distances = euclidean(points)
    expected = 2 * by_definition(distances) / distances.max()
    got = relative_delta(points, num_trials=3, key=KEY)
    assert got.shape == (3,) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 7.0, 1e30])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_relative_delta_is_invariant_to_scale_and_translation(scale, shift):
    points = gaussian(60)
    expected = relative_delta(points, num_trials=1, key=KEY)
    got = relative_delta(scale * (points + shift), num_trials=1, key=KEY)
    np.testing.assert_allclose(got, expected, rtol=3e-6)


def test_distances_within_tight_clusters_are_accurate():
    """Up to their small size, three clusters are the leaves of a tree."""
    centres = np.repeat(1e3 * np.eye(3), 20, axis=0)
    points = (centres + 1e-3 * gaussian(60, dim=3)).astype(np.float32)
    distances = euclidean(points)
    expected = 2 * by_definition(distances) / distances.max()
    got = relative_delta(points, num_trials=1, key=KEY)[0]
    assert expected < 1e-5
    np.testing.assert_allclose(got, expected, atol=3e-7)


def test_samples_depend_only_on_the_key():
    points = gaussian(200)
    first, fewer, others = (
        relative_delta(points, num_samples=40, num_trials=trials, key=jax.random.key(seed))
        for seed, trials in ((0, 4), (0, 2), (1, 4))
    )
    assert len({*first.tolist(), *others.tolist()}) == 8
    np.testing.assert_array_equal(fewer, first[:2])


def test_samples_are_without_replacement(monkeypatch):
    monkeypatch.setattr(hyperbolicity, "_relative_delta", lambda x: len(np.unique(x, axis=0)))
    counts = relative_delta(gaussian(200), num_samples=199, num_trials=2, key=KEY)
    assert counts.tolist() == [199, 199]


def test_curvature_from_delta():
    assert curvature_from_delta(0.144) == 1
    np.testing.assert_allclose(curvature_from_delta(np.float32(0.288)), 0.25, rtol=1e-6)


def test_invalid_arguments_are_an_error():
    for delta in (0.0, -0.1, np.nan, np.inf):
        with pytest.raises(UserError, match=f"positive.*, got {delta:g}"):
            curvature_from_delta(delta)
    for distances, message in [
        (np.zeros((5, 4)), r"square matrix, got shape \(5, 4\)"),
        (np.zeros((3, 3)), "at least 4 points, got 3"),
    ]:
        with pytest.raises(UserError, match=message):
            gromov_delta(distances)
    for points, arguments, message in [
        (np.full((9, 2), 0.1), {}, "the 9 sampled points are identical"),
        (np.array([[0.0]] * 7 + [[np.inf]] * 2), {}, "not all finite"),
        (gaussian(3), {}, "at least 4 points, got 3"),
    ]:
        with pytest.raises(UserError, match=message):
            relative_delta(points, key=KEY, **arguments)


def test_there_are_100_trials_by_default():
    assert relative_delta(gaussian(5), key=KEY).shape == (100,)
