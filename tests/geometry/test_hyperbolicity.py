"""δ against trees, closed forms and the definition in float64, and what draws depend on."""

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
    """(M ⊗ M) − M, every element of it, in float64."""
    d = np.asarray(distances, np.float64)
    m = (d[0][:, None] + d[0] - d) / 2
    product = np.full(m.shape, -np.inf)
    for column, row in zip(m.T, m, strict=True):
        product = np.maximum(product, np.minimum(column[:, None], row))
    return (product - m).max()


def four_point_delta(d):
    """Half the difference of the two largest of the three sums, at its largest."""
    largest = 0
    for i, j, k, m in itertools.combinations(range(len(d)), 4):
        sums = sorted([d[i, j] + d[k, m], d[i, k] + d[j, m], d[i, m] + d[j, k]])
        largest = max(largest, (sums[2] - sums[1]) / 2)
    return largest


def tree(edges):
    """Distances in a tree that grows by an edge (parent, weight) at a time."""
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
def test_trees_have_delta_0(edges):
    assert gromov_delta(tree(edges)) == 0  # Such whole numbers, and halves of them, are exact.


@pytest.mark.parametrize("seed", range(5))
def test_trees_with_real_weights_have_delta_0_to_rounding(seed):
    rng = np.random.default_rng(seed)
    distances = tree(list(zip(rng.integers(0, 999, 39), rng.exponential(size=39), strict=True)))
    assert gromov_delta(distances) <= 1e-6 * distances.max()


@pytest.mark.parametrize("n", [4, 5, 6, 7, 21])
def test_delta_of_a_cycle_is_a_quarter_of_its_length(n):
    expected = n // 4 - (0.5 if n % 4 == 1 else 0)
    assert gromov_delta(cycle(n)) == four_point_delta(cycle(n)) == expected


@pytest.mark.parametrize("n", [4, 16, 17, 60, 530])
def test_equals_the_definition_for_any_number_of_points(n):
    distances = euclidean(gaussian(n))
    np.testing.assert_allclose(gromov_delta(distances), by_definition(distances), rtol=2e-6)


@pytest.mark.parametrize("places", list(itertools.permutations([1, 280, 529])))
def test_points_count_wherever_they_are(places):
    """The δ of a square takes all its corners, here in different tiles and chunks."""
    points = np.zeros((530, 2))
    points[list(places)] = [[1, 0], [0, 1], [1, 1]]
    np.testing.assert_allclose(gromov_delta(euclidean(points)), np.sqrt(2) - 1, rtol=1e-6)


def test_float64_is_kept(float64):
    distances = euclidean(gaussian(60))
    delta = gromov_delta(distances)
    assert delta.dtype == jnp.float64
    np.testing.assert_allclose(delta, by_definition(distances), rtol=1e-13)


def test_from_all_points_together_it_is_the_four_point_delta():
    distances = euclidean(gaussian(12, dim=3))
    whole = four_point_delta(distances)
    orders = [np.roll(np.arange(12), shift) for shift in range(12)]
    seen = np.array([gromov_delta(distances[order][:, order]) for order in orders])
    np.testing.assert_allclose(seen.max(), whole, rtol=1e-6)
    assert (2 * seen > whole * (1 - 1e-6)).all()


def test_the_diagonal_counts_as_0():
    path = np.abs(np.subtract.outer(np.arange(20.0), np.arange(20.0)))
    assert gromov_delta(path + 1e-2 * np.eye(20)) == 0


@pytest.mark.parametrize("flaw", [np.nan, np.inf])
def test_distances_that_are_not_finite_have_no_delta(flaw):
    distances = euclidean(gaussian(20))
    distances[3, 7] = distances[7, 3] = flaw
    assert np.isnan(jax.jit(gromov_delta)(distances))


def test_the_product_takes_little_memory():
    room = jax.ShapeDtypeStruct((2000, 2000), jnp.float32)
    compiled = hyperbolicity._delta.lower(room).compile()
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
def test_neither_scale_nor_place_changes_the_relative_delta(scale, shift):
    points = gaussian(60)
    expected = relative_delta(points, num_trials=1, key=KEY)
    got = relative_delta(scale * (points + shift), num_trials=1, key=KEY)
    np.testing.assert_allclose(got, expected, rtol=3e-6)


def test_close_points_far_from_the_rest_keep_their_distances():
    """To within their tiny size, they are the three ends of a tree."""
    centres = np.repeat(1e3 * np.eye(3), 20, axis=0)
    points = (centres + 1e-3 * gaussian(60, dim=3)).astype(np.float32)
    distances = euclidean(points)
    expected = 2 * by_definition(distances) / distances.max()
    got = relative_delta(points, num_trials=1, key=KEY)[0]
    assert expected < 1e-5
    np.testing.assert_allclose(got, expected, atol=3e-7)


def test_half_precision_is_measured_as_it_stands():
    points = jnp.asarray(gaussian(60), jnp.bfloat16)
    got = relative_delta(points, num_trials=1, key=KEY)
    expected = relative_delta(np.asarray(points, np.float64), num_trials=1, key=KEY)
    np.testing.assert_array_equal(got, expected)


def test_draws_depend_on_the_key_and_on_nothing_else():
    points = gaussian(200)
    draw = lambda key, trials: relative_delta(  # noqa: E731
        points, num_samples=40, num_trials=trials, key=key
    )
    first = draw(KEY, 4)
    assert len(set(first.tolist())) == 4
    np.testing.assert_array_equal(draw(KEY, 4), first)
    np.testing.assert_array_equal(draw(KEY, 2), first[:2])
    assert not np.intersect1d(draw(jax.random.key(1), 4), first).size


def test_a_draw_takes_no_point_twice():
    drawn = hyperbolicity._sample(KEY, 200, 199)
    assert len(set(drawn.tolist())) == 199 and drawn.min() >= 0 and drawn.max() < 200


def test_draws_share_one_program():
    points = gaussian(200)
    relative_delta(points, num_samples=40, num_trials=1, key=KEY)
    programs = hyperbolicity._relative_delta._cache_size()
    relative_delta(points, num_samples=40, num_trials=3, key=jax.random.key(1))
    assert hyperbolicity._relative_delta._cache_size() == programs


def test_curvature_from_delta():
    assert curvature_from_delta(0.144) == 1
    np.testing.assert_allclose(curvature_from_delta(np.float32(0.288)), 0.25, rtol=1e-6)


@pytest.mark.parametrize("delta", [0.0, -0.1, np.nan, np.inf])
def test_no_curvature_from_what_is_not_positive(delta):
    with pytest.raises(UserError, match=f"positive.*, got {delta:g}"):
        curvature_from_delta(delta)


@pytest.mark.parametrize(
    ("distances", "message"),
    [
        (np.zeros(9), r"square matrix, got shape \(9,\)"),
        (np.zeros((5, 4)), r"square matrix, got shape \(5, 4\)"),
        (np.zeros((3, 3)), "at least 4 points, got 3"),
    ],
)
def test_matrices_that_hold_no_distances(distances, message):
    with pytest.raises(UserError, match=message):
        gromov_delta(distances)


@pytest.mark.parametrize(
    ("points", "arguments", "message"),
    [
        (gaussian(3), {}, "at least 4 points, got 3"),
        (np.zeros(9), {}, r"\[number, dimension\], got shape \(9,\)"),
        (np.zeros((9, 0)), {}, r"\[number, dimension\], got shape \(9, 0\)"),
        (np.zeros((9, 2), int), {}, "floating-point numbers, got int64"),
        (np.full((9, 2), 0.1), {}, "the 9 sampled points are identical"),
        (gaussian(9), {"num_samples": 3}, "num_samples must be at least 4, got 3"),
        (gaussian(9), {"num_trials": 0}, "num_trials must be at least 1, got 0"),
    ],
)
def test_points_without_a_relative_delta(points, arguments, message):
    with pytest.raises(UserError, match=message):
        relative_delta(points, key=KEY, **arguments)


@pytest.mark.parametrize("flaw", [np.nan, np.inf])
def test_the_first_point_that_is_not_finite_is_named(flaw):
    points = gaussian(30)
    points[[7, 20], [2, 0]] = flaw
    with pytest.raises(UserError, match=r"point 7 is not finite \(2 of 30 rows\)"):
        relative_delta(points, num_samples=5, key=KEY)
