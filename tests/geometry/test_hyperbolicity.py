"""Gromov's δ against trees, closed forms and the definition in float64; and random samples."""

import itertools

import jax
import numpy as np
import pytest

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


def cycle(n):
    steps = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return np.minimum(steps, n - steps)


@pytest.mark.parametrize("n", [4, 16, 17, 60, 530])
def test_delta_equals_its_definition_for_any_number_of_points(n):
    distances = euclidean(gaussian(n))
    np.testing.assert_allclose(gromov_delta(distances), by_definition(distances), rtol=2e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(gromov_delta(distances), by_definition(distances), rtol=1e-13)


@pytest.mark.parametrize("indices", list(itertools.permutations([1, 280, 529])))
def test_delta_depends_on_points_of_all_tiles(indices):
    """The δ of a square depends on all corners, which are in different tiles and chunks here."""
    points = np.zeros((530, 2))
    points[list(indices)] = [[1, 0], [0, 1], [1, 1]]
    np.testing.assert_allclose(gromov_delta(euclidean(points)), np.sqrt(2) - 1, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_delta_of_nonfinite_distances_is_nan(value):
    distances = euclidean(gaussian(20))
    distances[3, 7] = distances[7, 3] = value
    assert np.isnan(jax.jit(gromov_delta)(distances))


@pytest.mark.parametrize("scale", [1e-30, 7.0, 1e30])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_relative_delta_of_all_points_is_invariant_to_scale_and_translation(scale, shift):
    points = gaussian(60, 16)
    distances = euclidean(points)
    expected = 2 * by_definition(distances) / distances.max()
    got = relative_delta(scale * (points + shift), num_trials=3, key=KEY)
    assert got.shape == (3,) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=4e-6)


def test_distances_within_tight_clusters_are_accurate():
    """Up to their small size, three clusters are the leaves of a tree."""
    points = np.repeat(1e3 * np.eye(3), 20, axis=0) + 1e-3 * gaussian(60, dim=3)
    assert relative_delta(points.astype(np.float32), num_trials=1, key=KEY)[0] < 1e-5


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


def test_curvature_follows_from_delta_and_invalid_arguments_are_an_error():
    np.testing.assert_allclose([*map(curvature_from_delta, (0.144, 0.288))], [1, 0.25])
    identical, infinite = np.full((9, 2), 0.1), np.array([[0.0]] * 7 + [[np.inf]] * 2)
    for function, argument, message in [
        (curvature_from_delta, 0.0, "positive.*, got 0"),
        (gromov_delta, np.zeros((5, 4)), r"square matrix, got shape \(5, 4\)"),
        (gromov_delta, np.zeros((3, 3)), "at least 4 points, got 3"),
        (lambda x: relative_delta(x, key=KEY), identical, "all 9 sampled points are identical"),
        (lambda x: relative_delta(x, key=KEY), infinite, "are not finite"),
    ]:
        with pytest.raises(UserError, match=message):
            function(argument)
    assert relative_delta(gaussian(5), key=KEY).shape == (100,)
