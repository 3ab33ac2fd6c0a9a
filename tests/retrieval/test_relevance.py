"""Scores where positives and ignored items are listed, against a plain loop in float64."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import Fused, PoincareBall, Sphere
from hypjax.retrieval import Relevance, average_precision, rankings, relevance_scores

FUSED = Fused(((Sphere(), 10.0), (PoincareBall(1.0, 2.3), 15.0)), normalized=False)


def area_below_precision(ranking, positives):
    """Area of the trapezoids below precision over recall, one positive after the other."""
    found, area, last_recall, last_precision = 0, 0.0, 0.0, 1.0
    for place, item in enumerate(ranking):
        found += item in positives
        recall, precision = found / len(positives), found / (place + 1)
        area += (recall - last_recall) * (last_precision + precision) / 2
        last_recall, last_precision = recall, precision
    return area


def by_definition(space, query, gallery, positives, ignored):
    with jax.enable_x64(True):
        distances = space.separation(query.astype(np.float64), gallery.astype(np.float64))
    ranking = np.argsort(np.asarray(distances), kind="stable").tolist()
    ranking = [item for item in ranking if item not in set(ignored)]
    return area_below_precision(ranking, set(positives)) if len(positives) else np.nan


@pytest.mark.filterwarnings("ignore:.* queries have no match")
@pytest.mark.parametrize("space", [Sphere(), PoincareBall(1.0, 2.3), FUSED], ids=str)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1, 1e-3, 0]))
@settings(max_examples=15, deadline=None)
def test_average_precision_equals_its_definition(space, data, seed, spread):
    """With duplicates, crowds, ignored items, and queries without positives."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(2, 3))[rng.integers(0, 2, 40)] + spread * rng.normal(size=(40, 3))
    points = np.array(space.embed(features.astype(np.float32)))
    points[20:28] = points[12:20]
    queries, gallery = points[:8], points[8:]
    items = st.lists(st.integers(0, 31), unique=True, max_size=12)
    lists = [data.draw(items) for _ in queries]
    positives, ignored = [x[: len(x) // 2] for x in lists], [x[len(x) // 2 :] for x in lists]
    got = average_precision(queries, gallery, Relevance(positives, ignored), space=space)
    expected = [
        by_definition(space, query, gallery, wanted, removed)
        for query, wanted, removed in zip(queries, positives, ignored, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_results_do_not_depend_on_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    x = np.asarray(PoincareBall().embed(rng.normal(size=(230, 8)).astype(np.float32)))
    relevance = Relevance([rng.permutation(230)[:9] for _ in range(100)])
    names = ["recall@1", "precision@5", "mrr", "map", "map@r", "r_precision"]
    arguments = {"metrics": names, "space": PoincareBall()}
    expected = relevance_scores(x[:100], x, relevance, **arguments)
    monkeypatch.setattr(rankings, "_BOUND_BYTES", 8 * 230 * 17)
    monkeypatch.setattr(rankings, "_CHUNK_BYTES", 4 * 8 * 37)
    found = relevance_scores(x[:100], x, relevance, **arguments)
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name])
    assert 0 < expected["map"].mean() < 0.3  # Positives were drawn at random.


def test_processes_that_share_the_queries_find_the_same_scores():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(50, 4)).astype(np.float32) / 5
    relevance = Relevance([[i, 49 - i] for i in range(9)], [[20], *[[]] * 8])
    arguments = (points[:9], points, relevance)
    options = {"metrics": ["map", "mp@5"], "space": PoincareBall()}
    whole = relevance_scores(*arguments, **options)
    parts = [relevance_scores(*arguments, **options, rows=slice(*at)) for at in ((0, 4), (4, 9))]
    for name, values in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)


def test_queries_without_positives_are_counted():
    x = np.asarray(Sphere().embed(np.eye(4)))
    with pytest.warns(UserWarning, match="1 of 2 queries have no match"):
        found = average_precision(x[:2], x, Relevance([[0], []], [[1], [0]]), space=Sphere())
    np.testing.assert_array_equal(found, [1, np.nan])


def test_lists_alone_are_no_relevance():
    x = np.asarray(Sphere().embed(np.eye(4)))
    with pytest.raises(UserError, match="relevance is a list; make a Relevance of it"):
        average_precision(x[:2], x, [[0], [1]], space=Sphere())


@pytest.mark.parametrize(
    ("positives", "ignored", "message"),
    [
        ([[0]], None, "positives has 1 lists for 2 queries"),
        ([[0], [1]], [[]], "ignored has 1 lists for 2 queries"),
        ([[0], [4]], None, "positives of query 1 has an index outside 0 to 3"),
        ([[0], [1, 1]], None, "positives of query 1 has an index twice"),
        ([[0], [0.5]], None, "positives of query 1 must be a list of indices"),
        ([[0], [1]], [[], [2, 1]], "item 1 is both positive and ignored for query 1"),
    ],
)
def test_lists_that_are_not_valid_are_an_error(positives, ignored, message):
    x = np.asarray(Sphere().embed(np.eye(4)))
    with pytest.raises(UserError, match=message):
        average_precision(x[:2], x, Relevance(positives, ignored), space=Sphere())
