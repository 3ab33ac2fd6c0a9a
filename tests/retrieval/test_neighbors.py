"""Exact search and mining against sorting, from memory, from disk and over several devices."""

import functools
import itertools
import unittest.mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.retrieval import mining, nearest_neighbors, neighbors, selection
from hypjax.retrieval.mining import hardest_negatives
from hypjax.retrieval.selection import StreamedGallery
from tests.helpers.exact_order import true_order
from tests.helpers.galleries import points
from tests.helpers.process_pair import python

SPACES = [Sphere(), PoincareBall(1.0, 0.8), PoincareBall(0.0, None), Lorentz(1.0, 0.8)]
CASES = {
    "2d": lambda x: (x[:70] * (np.arange(32) < 2), x[70:] * (np.arange(32) < 2), 40),
    "copies": lambda x: (x[:70], x[np.random.default_rng(0).integers(0, 70, 760)], 40),
    "one item": lambda x: (x[:3], x[-1:], 1),
}


QUICK = [*itertools.product(CASES, SPACES[1:2]), ("copies", SPACES[3])]
SLOW = [case for case in itertools.product(CASES, SPACES) if case not in QUICK]


@pytest.mark.parametrize(
    ("case", "space"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_equals_sorting_by_subtraction(space, case):
    features = np.random.default_rng(0).normal(size=(830, 32)).astype(np.float32)
    features, items, k = CASES[case](features)
    x, y = (np.asarray(space.embed(x)) for x in (features, items))
    distances, ids = nearest_neighbors(x, y, k=k, space=space)
    assert distances.dtype == np.float32 and ids.dtype == np.int32
    np.testing.assert_array_equal(ids, true_order(space, x, y)[:, :k])
    with jax.enable_x64(True):
        expected = jax.jit(space.distance)(np.float64(x)[:, None], np.float64(y)[ids])
    np.testing.assert_allclose(distances, expected, rtol=3e-5, atol=1e-6)


def test_a_kept_gallery_is_searched_as_any_other():
    space = SPACES[1]
    x = points(space, 0, 700, 8)
    x[300:] = x[300] + 1e-7 * (x[300:] - x[300])  # A crowd, which needs float64.
    gallery = StreamedGallery(x, keep=True)
    for rows in ([0], [5, 301, 650], range(40)):
        queries, own_ids = x[rows], np.array(rows)
        expected = neighbors.search(queries, own_ids, x, k=5, space=space)
        for _ in range(2):
            actual = neighbors.search(queries, own_ids, gallery, k=5, space=space)
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(a, b)


def test_result_does_not_depend_on_the_size_of_streamed_chunks(monkeypatch, tmp_path):
    space = PoincareBall(0.1, 2.3)
    x, y = points(space, 0, 100, 16), points(space, 1, 1500, 16)
    y[1200:] = y[:300]
    order = true_order(space, x, y)
    np.save(tmp_path / "gallery.npy", y)
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    monkeypatch.setattr(neighbors, "_SCORE_BYTES", 100_000)
    _, ids = nearest_neighbors(x, mapped, k=70, space=space, block_size=64)
    np.testing.assert_array_equal(ids, order[:, :70])
    y[1400, 2] = np.inf  # In a later chunk.
    with pytest.raises(UserError, match="embedding 1400 is not finite"):
        nearest_neighbors(x, y, k=70, space=space, block_size=64)


def test_excludes_the_query_but_not_its_copies():
    x = points(Sphere(), 0, 300, 8)
    x[7] = x[200]
    _, ids = nearest_neighbors(x, x, k=5, space=Sphere(), exclude_self=True)
    assert not (ids == np.arange(300)[:, None]).any()
    assert ids[7, 0] == 200 and ids[200, 0] == 7
    # With more copies than neighbours, a query need not be among its own neighbours.
    same = np.tile(x[:1], (300, 1))
    _, ids = nearest_neighbors(same, same, k=5, space=Sphere(), exclude_self=True)
    np.testing.assert_array_equal(ids[50], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(ids[1], [0, 2, 3, 4, 5])


def test_padding_of_fused_galleries_hides_no_item():
    """In a ball of c > 4, the separation of padding has no finite distance in float32."""
    space = Fused(((Sphere(), 1.0), (PoincareBall(5.0, None), 1.0)))
    x = np.array(space.embed(np.random.default_rng(0).normal(size=(5057, 8)).astype(np.float32)))
    x[-1] = x[0]
    np.testing.assert_array_equal(nearest_neighbors(x[:1], x, k=2, space=space)[1], [[0, 5056]])


DEVICES = """
import sys, jax, numpy as np
from hypjax.geometry import PoincareBall
from hypjax.retrieval import nearest_neighbors, neighbors, tiles
from tests.helpers.exact_order import FUSED, crowds, match_ranks, true_order, true_ranks
assert jax.device_count() == 4
tiles.SIDE = 256
labels = np.random.default_rng(0).integers(0, 100, 1200)
for space, spread in ((PoincareBall(0.1, 2.3), 0.003), (FUSED, 1)):
    x = crowds(space, spread, n=1200, dim=16)
    order = true_order(space, x, x)
    ranks = true_ranks(order, labels, labels, exclude_self=True)
    for limit in (2**27, 2**17):  # One chunk, and several.
        tiles._CPU_FACTOR_BYTES = limit
        np.testing.assert_array_equal(match_ranks(x, labels, space=space), ranks)
    np.save(sys.argv[1], x)
    mapped = np.load(sys.argv[1], mmap_mode="r")
    default_limit = neighbors._SCORE_BYTES
    for limit, gallery in ((20_000, mapped), (default_limit, x)):
        neighbors._SCORE_BYTES = limit
        _, ids = nearest_neighbors(x[:150], gallery, k=30, space=space)
        np.testing.assert_array_equal(ids, order[:150, :30])
"""


@pytest.mark.slow
def test_searches_on_several_devices_are_exact(tmp_path):
    done = python("-c", DEVICES, tmp_path / "gallery.npy", devices=4)
    assert done.returncode == 0, done.stderr


def test_invalid_arguments_are_an_error():
    x = points(Sphere(), 0, 40, 4)
    for change, message in [
        ({"k": 40, "exclude_self": True}, "k is 40, but a search finds only 39"),
        ({"k": 0}, "k is 0; it must be a positive"),
        ({"k": True}, "k is True; it must be"),
        ({"gallery": x[:0]}, r"\[number, dimension\] and not empty"),
        ({"queries": 0 * x}, "embedding 0 is not of length 1"),
        ({"gallery": np.where(np.arange(40)[:, None] == 9, np.nan, x)}, "embedding 9 is"),
        ({"queries": x[:9], "exclude_self": True}, "exclude_self requires the queries"),
        ({"queries": x[::-1], "exclude_self": True}, "exclude_self requires the queries"),
        ({"queries": np.ma.masked_less(x, 0)}, "queries have masked values"),
        ({"gallery": 1e19 * x, "space": SPACES[2]}, "embedding 0 is too far out"),
    ]:
        arguments = {"queries": x, "gallery": x, "k": 3, "space": Sphere()} | change
        with pytest.raises(UserError, match=message):
            nearest_neighbors(arguments.pop("queries"), arguments.pop("gallery"), **arguments)


_distances = jax.jit(lambda space, x, y: space.distance(x[:, None], y))


def by_ranking(distances, label, labels, count):
    """Walks down the ranking and takes at most one image of each other class."""
    order = np.argsort(distances, kind="stable")
    used, actual = {label}, []
    for item in order:
        if labels[item] not in used:
            actual.append(item)
            used.add(labels[item])
    return actual[:count]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), space=st.sampled_from(SPACES[:2]), count=st.sampled_from([1, 4]))
def test_negatives_are_the_hardest_under_the_rule(seed, space, count):
    rng = np.random.default_rng(seed)
    anchors, pool = (
        np.asarray(space.embed(rng.normal(size=(n, 6)).astype(np.float32))) for n in (9, 40)
    )
    anchor_labels = rng.integers(0, 8, 9)
    labels = np.concatenate([np.arange(8), rng.integers(0, 8, 32)])
    with unittest.mock.patch.object(mining, "_BLOCK", 4):  # The last block is padded.
        actual = hardest_negatives(anchors, anchor_labels, pool, labels, count=count, space=space)
    distances = np.asarray(_distances(space, anchors, pool))
    for row, of_anchor, label in zip(actual, distances, anchor_labels, strict=True):
        assert row.tolist() == by_ranking(of_anchor, label, labels, count)


def test_negatives_of_all_other_classes_are_listed_and_of_more_refused():
    points, labels = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 2])
    among = functools.partial(hardest_negatives, points, labels, points, labels, space=Sphere())
    # Of equally near ones, the first.
    assert among(count=2).tolist() == [[2, 3], [2, 3], [0, 3], [0, 2]]
    with pytest.raises(UserError, match="3 negatives of other classes, .* has images of 2"):
        among(count=3)


@pytest.mark.parametrize("k", [3, 7])
def test_devices_select_the_best_items_of_a_chunk(k):
    """From fewer groups of items than there are neighbours, too; a CPU selects by NumPy."""
    scores = np.random.default_rng(0).normal(size=(5, 4 * selection.GROUP)).astype(np.float32)
    maxima = scores.reshape(5, 4, -1).max(axis=2)
    chunk = selection.Chunk((), np.array([100], np.int32))
    actual = jax.jit(functools.partial(selection._select, k=k))(scores, maxima, chunk)
    order = np.argsort(-scores, axis=1)[:, :k]
    np.testing.assert_array_equal(actual.ids, 100 + order)
    np.testing.assert_array_equal(actual.scores, np.take_along_axis(scores, order, axis=1))
