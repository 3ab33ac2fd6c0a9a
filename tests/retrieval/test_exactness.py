"""Exactness of searches, ranks and scores, against float64 and exact arithmetic."""

import fractions
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere, lorentz
from hypjax.retrieval import (
    inputs,
    nearest_neighbors,
    positives,
    ranks,
    recall_at_k,
    selection,
    tiles,
)
from hypjax.retrieval.inputs import Labelled
from hypjax.retrieval.scores import DOUBLE, SINGLE, Score, highest, lowest
from tests.helpers.exact_order import FUSED, PRODUCTS, crowds, match_ranks, true_order, true_ranks
from tests.helpers.galleries import points
from tests.helpers.steps import float32_products

SPACES = [Sphere(), PoincareBall(0.1, 2.3), Lorentz(0.1, 2.3)]
SPACES += [PoincareBall(0.0, None), PoincareBall(10.0, None), Lorentz(0.0, None), Lorentz(1.0, 2.0)]
SPREADS = [0.003, 0, 1, 0.1, 0.01, 1e-6]
CROWDS = [*itertools.product(SPACES[:3], SPREADS)]
CROWDS += itertools.product([*SPACES[3:], FUSED, *PRODUCTS], SPREADS[:3])
QUICK = [(SPACES[1], spread) for spread in SPREADS[:2]]


@pytest.mark.parametrize(
    ("space", "spread"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CROWDS],
    ids=str,
)
def test_crowds_are_searched_and_ranked_exactly(space, spread):
    x = crowds(space, spread)
    labels = np.random.default_rng(1).integers(0, 100, len(x))
    order, expected = check_exact(space, x, labels)
    recalls = recall_at_k(x, labels, ks=(1, 10, 100), space=space)
    assert recalls == {k: np.mean(expected < k) for k in (1, 10, 100)}
    separate = true_ranks(order[:100], labels[:100], labels, exclude_self=False)
    actual = match_ranks(x[:100], labels[:100], x, labels, space=space)
    np.testing.assert_array_equal(actual, separate)


def check_exact(space, x, labels):
    """Checks neighbours and ranks among points; returns their true order and ranks."""
    order = true_order(space, x, x)
    distances, ids = nearest_neighbors(x, x, k=10, space=space)
    np.testing.assert_array_equal(ids, order[:, :10])
    assert (np.diff(distances, axis=1) >= 0).all()
    expected = true_ranks(order, labels, labels, exclude_self=True)
    np.testing.assert_array_equal(match_ranks(x, labels, space=space), expected)
    return order, expected


def far_out(space, n, dim):
    """Points in one direction, 1e-5 of the radius from the surface of the ball or its image."""
    rng, c = np.random.default_rng(2), space.c
    x = np.ones(dim) + 1e-4 * rng.normal(size=(n, dim))
    x = (0.99999 * x / np.linalg.norm(x, axis=1, keepdims=True) / c**0.5).astype(np.float32)
    return np.asarray(lorentz.from_poincare(x, c)) if isinstance(space, Lorentz) else x


FAR_OUT = (PoincareBall, 0.01, 512), (Lorentz, 1.0, 16), (Lorentz, 10.0, 2)


@pytest.mark.parametrize(
    ("kind", "c", "dim"),
    [(PoincareBall, 1.0, 32), *(pytest.param(*case, marks=pytest.mark.slow) for case in FAR_OUT)],
)
def test_points_near_the_surface_are_searched_exactly(kind, c, dim):
    space = kind(c, 2.3)  # As the crowds: programs depend on the clip radius and on shapes.
    check_exact(space, far_out(space, 1000, dim), np.arange(1000) % 40)


@given(
    seed=st.integers(0, 2**32 - 1),
    c=st.sampled_from([0.0, 1e-6, 0.1, 1.0, 10.0]),
    exponent=st.integers(-7, 0),
    dim=st.sampled_from([2, 8]),
)
@settings(max_examples=25, deadline=None)
def test_small_galleries_are_searched_as_in_exact_arithmetic(seed, c, exponent, dim):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(2, dim))[rng.integers(0, 2, 24)]
    space = PoincareBall(c, None)
    features = 2 * centres + 10.0**exponent * rng.normal(size=(24, dim))
    x = np.array(space.embed(features.astype(np.float32)))
    x[20:] = x[:4]
    exact = [[fractions.Fraction(float(value)) for value in row] for row in x]
    curvature = fractions.Fraction(c)
    gaps = [1 - curvature * sum(v * v for v in row) for row in exact]

    def key(i, j):
        return sum((a - b) ** 2 for a, b in zip(exact[i], exact[j], strict=True)) / gaps[j]

    expected = [sorted(range(24), key=lambda j, i=i: (key(i, j), j))[:8] for i in range(24)]
    _, ids = nearest_neighbors(x, x, k=8, space=space)
    np.testing.assert_array_equal(ids, expected)


_separations = jax.jit(lambda space, x: space.separation(x[:, None], x))
OFTEN = [*SPACES[:3], PRODUCTS[0]]
RARE = [pytest.param(x, marks=pytest.mark.slow) for x in (*SPACES[3:], FUSED, PRODUCTS[1])]


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("space", [*OFTEN, *RARE], ids=str)
@given(seed=st.integers(0, 2**32 - 1), scale=st.integers(-20, 1))
@settings(max_examples=8, deadline=None)
def test_scores_bound_separations(space, dtype, seed, scale):
    rng = np.random.default_rng(seed)
    x = np.array(space.embed((2.0**scale * rng.normal(size=(64, 8))).astype(np.float32)))
    score = Score.around(space, x[:7], dtype)
    factors = score.factors(x)
    with score.enabled():
        scores = np.asarray(highest(space, factors.query, factors.gallery), np.float64)
        least = np.asarray(lowest(space, factors, factors), np.float64)
    with jax.enable_x64(True):
        separations = np.asarray(_separations(space, x.astype(np.float64)))
    assert (-separations <= scores).all()
    assert (least <= -separations).all()


def test_the_smallest_curvature_is_searched_as_flat_space_is_and_smaller_ones_are_refused():
    x = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
    order = np.argsort(np.linalg.norm(x[:, None].astype(float) - x, axis=-1), axis=1)
    for kind in (PoincareBall, Lorentz):
        items = nearest_neighbors(x, x, k=8, space=kind(1e-12, None))[1]
        np.testing.assert_array_equal(items, order[:, :8])
    for c in (9e-13, 1e-20, -1.0, np.nan):
        space = PoincareBall(jnp.asarray(c))  # A Python number below 0 is refused at once.
        with pytest.raises(UserError, match=f"c is {c:g}; a search needs 0, or at least"):
            nearest_neighbors(x, x, k=1, space=space)


def test_queries_are_certified_by_products_in_float32_unless_they_are_collapsed(caplog):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 100, 1000)
    features = rng.normal(size=(100, 32))[labels] + 1.2 * rng.normal(size=(1000, 32))
    x, crowd = np.array(SPACES[1].embed(features.astype(np.float32))), crowds(SPACES[1], 1e-3)
    with caplog.at_level(logging.INFO, logger="hypjax.retrieval.subtraction"):
        recall_at_k(x, labels, ks=(1, 10, 100), space=SPACES[1])
        for queries, gallery in ((x, x), (crowd, crowd), (crowd[:20], crowd)):
            nearest_neighbors(queries, gallery, k=10, space=SPACES[1])
    ranked, healthy, collapsed, few = (record.getMessage() for record in caplog.records)
    assert "certified=1000" in ranked and "certified=1000" in healthy
    assert "certified=0 by products in float32, 1000 by products in float64" in collapsed
    assert "20 by subtraction" in few  # For a few queries, that is the fastest way.


@pytest.mark.parametrize(
    "space", [Lorentz(), Fused(((Sphere(), 1.0), (PoincareBall(), 1.0)))], ids=str
)
def test_no_product_of_the_search_is_rounded(space):
    x, mesh = np.asarray(space.embed(jnp.ones((64, 8)))), ranks.Mesh(jax.local_devices(), "tiles")
    score = Score.around(space, x)
    one_class = Labelled(x, np.zeros(64, np.int32))
    points = tiles.SortedPoints(one_class, np.arange(64), score, mesh).chunk(0)
    first_tile = tiles.distribute(mesh, np.zeros((1, 2), np.int32), capacity=1)
    match, count = ranks.programs(mesh, exclude_self=True, symmetric=True, match_sides=(64, 64))
    bounds = jnp.zeros((2, 64))
    chunk = next(selection.StreamedGallery(x).chunks(score, 64))
    programs = [
        match.trace(space, points, points, first_tile),
        count.trace(space, points, points, bounds, bounds, first_tile, first_tile),
        jax.jit(selection._multiply).trace(jnp.zeros((64, 64)), space, points.factors.query, chunk),
        positives.chunk_bounds.trace(space, points.factors, points.factors),
    ]
    for program in programs:
        actual = float32_products(program.lower(lowering_platforms=("tpu",)))
        assert actual and all(product.groups() == ("HIGHEST", "HIGHEST") for product in actual)


def test_ranks_mark_queries_without_a_match():
    x, labels = points(Sphere(), 0, 300, 4), np.random.default_rng(1).integers(0, 5, 300)
    labels[7] = 9
    separate = match_ranks(x, labels, x, np.where(labels == 3, 2, labels), space=Sphere())
    np.testing.assert_array_equal(separate == ranks.NO_MATCH, labels == 3)
    np.testing.assert_array_equal(
        np.flatnonzero(match_ranks(x, labels, space=Sphere()) == ranks.NO_MATCH), [7]
    )


def test_what_cannot_be_ranked_is_an_error():
    for arguments, message in [
        ((np.eye(3) / 2, [0, 1, 2]), "no query has a match"),
        ((np.eye(3) * (1 - 1e-9), [0, 0, 0]), "outside the ball"),
        ((np.eye(3) / 2, [0, 0]), "queries need 3 whole numbers"),
        ((np.eye(3), [0, 0, 0], np.eye(3)), "gallery need 3 whole numbers"),
    ]:
        with pytest.raises(UserError, match=message):
            recall_at_k(*arguments, ks=(1,), space=PoincareBall(1.0))


def test_points_may_be_of_half_precision():
    x, labels = jnp.asarray(points(PoincareBall(), 0, 60, 4), jnp.bfloat16), np.arange(60) % 9
    expected = match_ranks(np.asarray(x, np.float32), labels, space=PoincareBall())
    np.testing.assert_array_equal(match_ranks(x, labels, space=PoincareBall()), expected)


@pytest.mark.parametrize("space", [Sphere(), pytest.param(FUSED, marks=pytest.mark.slow)], ids=str)
def test_equals_brute_force_over_many_tiles_and_chunks(space, monkeypatch, tmp_path):
    monkeypatch.setattr(tiles, "SIDE", 64)
    jax.clear_caches()
    x = points(space, 0, 300, 8)
    x[100:160] = x[:60]
    labels = np.repeat(np.arange(60), np.random.default_rng(0).integers(1, 22, 60))[:300]
    labels = np.random.default_rng(1).permutation(np.pad(labels, (0, 300 - len(labels))))
    order = true_order(space, x, x)
    expected = true_ranks(order, labels, labels, exclude_self=True)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    one_tile = 2 * 4 * x.shape[1] * 64
    for limit, array in ((tiles._CPU_FACTOR_BYTES, x), (one_tile, mapped), (2 * one_tile, mapped)):
        monkeypatch.setattr(tiles, "_CPU_FACTOR_BYTES", limit)
        np.testing.assert_array_equal(match_ranks(array, labels, space=space), expected)
    own_ids = np.arange(40, 140)
    separate = mapped[40:140], labels[40:140], mapped, labels
    query_set, gallery_set = inputs.labelled(*separate)
    actual = ranks.first_ranks(query_set._replace(ids=own_ids), gallery_set, space, None)
    np.testing.assert_array_equal(actual, expected[40:140])
    actual = match_ranks(*separate, space=space)
    without = true_ranks(order[40:140], labels[40:140], labels, exclude_self=False)
    np.testing.assert_array_equal(actual, without)
    jax.clear_caches()
