"""Scores where positives and ignored items are listed, against plain loops in float64.

The protocol of Revisited Oxford and Paris is written from its description.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import Sphere
from hypjax.retrieval import (
    LEVELS,
    GroundTruth,
    Relevance,
    average_precision,
    relevance_at,
    relevance_scores,
)
from hypjax.retrieval.postprocessing import Postprocessing, Reranking, rerank
from tests.helpers.exact_order import FUSED, true_order

KS = (1, 5, 10)
METRICS = ["map", *(f"mp@{k}" for k in KS)]


def by_protocol(ranking, positives, ignored):
    """Average precision and mP@K of one ranking: junk is removed, then ranks are counted from 1."""
    ranked = [item for item in ranking if item not in ignored]
    ranks = [rank for rank, item in enumerate(ranked, 1) if item in positives]
    if not ranks:
        return [np.nan] * len(METRICS)
    area = 0.0
    for actual, rank in enumerate(ranks):
        before = 1.0 if rank == 1 else actual / (rank - 1)
        area += (before + (actual + 1) / rank) / 2 / len(ranks)
    listed = [min(max(ranks), k) for k in KS]
    return [area, *(sum(rank <= n for rank in ranks) / n for n in listed)]


@pytest.mark.filterwarnings("ignore:.* queries have no match")
@pytest.mark.parametrize("space", [Sphere(), pytest.param(FUSED, marks=pytest.mark.slow)], ids=str)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1, 1e-3, 0]))
@settings(max_examples=15, deadline=None)
def test_scores_are_those_of_the_protocol(space, data, seed, spread):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(2, 3))[rng.integers(0, 2, 40)] + spread * rng.normal(size=(40, 3))
    points = np.array(space.embed(features.astype(np.float32)))
    points[20:28] = points[12:20]
    queries, gallery = points[:8], points[8:]
    items = st.lists(st.integers(0, 31), unique=True, max_size=12)
    lists = [data.draw(items) for _ in queries]
    positives, ignored = [x[: len(x) // 2] for x in lists], [x[len(x) // 2 :] for x in lists]
    relevance = Relevance(positives, ignored)
    scores = relevance_scores(queries, gallery, relevance, metrics=METRICS, space=space)
    order = true_order(space, queries, gallery)
    for i, lists in enumerate(zip(positives, ignored, strict=True)):
        expected = by_protocol(order[i], *lists)
        np.testing.assert_allclose([scores[name][i] for name in METRICS], expected, rtol=1e-12)


def test_lists_that_are_not_valid_are_an_error():
    x = np.asarray(Sphere().embed(np.eye(4)))
    for relevance, message in [
        (Relevance([[0], [1, 1]]), "positives of query 1"),
        (Relevance([[0], [1]], [[], [2, 1]]), "item 1 is both positive and ignored"),
    ]:
        with pytest.raises(UserError, match=message):
            average_precision(x[:2], x, relevance, space=Sphere())


def counted(ground_truth, level, query):
    easy, hard, junk = (set(map(int, lists[query])) for lists in ground_truth)
    return {
        "easy": (easy, junk | hard),
        "medium": (easy | hard, junk),
        "hard": (hard, junk | easy),
    }[level]


@pytest.mark.parametrize("level", LEVELS)
def test_postprocessed_results_are_scored_without_what_is_ignored(level):
    """Queries are expanded, and the first results re-ranked, by a search that knows no junk."""
    space, rng = Sphere(), np.random.default_rng(1)
    points = np.asarray(space.embed(rng.normal(size=(70, 4)).astype("f")))
    queries, gallery = points[:10], points[10:]
    numbers = np.stack([rng.permutation(60) for _ in queries])
    ground_truth = GroundTruth(numbers[:, :4], numbers[:, 4:8], numbers[:, 8:20])
    postprocessing = Postprocessing(
        expansion=3, alpha=1.0, reranking=Reranking(depth=20, k1=6, k2=3)
    )
    actual = relevance_scores(
        *(queries, gallery, relevance_at(level, ground_truth)),
        metrics=METRICS,
        space=space,
        postprocessing=postprocessing,
    )
    expanded = np.asarray(postprocessing.apply(queries, None, gallery, space)[0])
    _, first = rerank(expanded, gallery, space=space, parameters=postprocessing.reranking)
    for i, order in enumerate(true_order(space, expanded, gallery)):
        rest = [item for item in order if item not in first[i]]
        assert len(rest) == 40
        expected = by_protocol([*first[i], *rest], *counted(ground_truth, level, i))
        np.testing.assert_allclose([actual[name][i] for name in METRICS], expected, rtol=1e-12)
