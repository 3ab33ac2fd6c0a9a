"""Revisited Oxford's and Paris's protocol, against one written from its description."""

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import LEVELS, Judgements, relevance_at, relevance_scores
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.reranking import Reranking

KS = (1, 5, 10)
METRICS = ["map", *(f"mp@{k}" for k in KS)]


def by_protocol(ranking, positives, ignored):
    """Average precision and mP@K of one ranking: junk is removed, then ranks are counted from 1."""
    kept = [item for item in ranking if item not in ignored]
    places = [place for place, item in enumerate(kept, 1) if item in positives]
    if not places:
        return [np.nan] * len(METRICS)
    area = 0.0
    for found, place in enumerate(places):
        before = 1.0 if place == 1 else found / (place - 1)
        area += (before + (found + 1) / place) / 2 / len(places)
    listed = [min(max(places), k) for k in KS]
    return [area, *(sum(place <= n for place in places) / n for n in listed)]


def counted(judgements, level, query):
    easy, hard, junk = (set(map(int, lists[query])) for lists in judgements)
    return {
        "easy": (easy, junk | hard),
        "medium": (easy | hard, junk),
        "hard": (hard, junk | easy),
    }[level]


@pytest.mark.filterwarnings("ignore:.* queries have no match")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("space", [Sphere(), PoincareBall(1.0, 2.3)], ids=["sphere", "ball"])
def test_scores_are_those_of_the_protocol(space, level):
    """With ties, which the smaller index wins, and queries without positives at a level."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(90, 3)).astype("f")
    features[70:] = features[20:40]
    points = np.asarray(space.embed(features))
    queries, gallery = points[:20], points[20:]
    numbers = np.stack([rng.permutation(70) for _ in queries])
    ends = np.sort(rng.integers(0, 25, (20, 3)), axis=1)
    ends[:3] = [[0, 4, 6], [5, 5, 9], [0, 0, 2]]  # Nothing easy; nothing hard; neither.
    parts = [np.split(row, end)[:3] for row, end in zip(numbers, ends, strict=True)]
    judgements = Judgements(*zip(*parts, strict=True))
    found = relevance_scores(
        queries, gallery, relevance_at(level, judgements), metrics=METRICS, space=space
    )
    distances = np.asarray(space.separation(queries[:, None].astype(float), gallery.astype(float)))
    for i, row in enumerate(np.argsort(distances, axis=1, kind="stable")):
        expected = by_protocol(row.tolist(), *counted(judgements, level, i))
        np.testing.assert_allclose([found[name][i] for name in METRICS], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # Of the ranking 0 to 6, where 1 and 4 are easy, 2 and 5 hard, 0 is junk.
        ("easy", [(1 + 1) / 4 + (1 / 2 + 2 / 3) / 4, 1, 2 / 3, 2 / 3]),  # 1 3 4 6
        ("medium", [(1 + 1 + 1 + 1 + 2 / 3 + 3 / 4 + 3 / 4 + 4 / 5) / 8, 1, 4 / 5, 4 / 5]),
        ("hard", [(1 + 1) / 4 + (1 / 2 + 2 / 3) / 4, 1, 2 / 3, 2 / 3]),  # 2 3 5 6
    ],
)
def test_an_example_by_hand(level, expected):
    angles = np.radians(np.arange(1, 8) * 10)
    gallery = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("f")
    judgements = Judgements([[1, 4]], [[5, 2]], [[0]])
    query = np.array([[1, 0]], "f")
    found = relevance_scores(
        query, gallery, relevance_at(level, judgements), metrics=METRICS, space=Sphere()
    )
    np.testing.assert_allclose([found[name][0] for name in METRICS], expected, rtol=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_refined_results_are_scored_without_what_is_ignored(level):
    """Queries are expanded, and the first results re-ranked, by a search that knows no junk."""
    space, rng = Sphere(), np.random.default_rng(1)
    points = np.asarray(space.embed(rng.normal(size=(70, 4)).astype("f")))
    queries, gallery = points[:10], points[10:]
    numbers = np.stack([rng.permutation(60) for _ in queries])
    judgements = Judgements(numbers[:, :4], numbers[:, 4:8], numbers[:, 8:20])
    refinement = Refinement(expansion=3, alpha=1.0, reranking=Reranking(depth=20, k1=6, k2=3))
    found = relevance_scores(
        *(queries, gallery, relevance_at(level, judgements)),
        metrics=METRICS,
        space=space,
        refinement=refinement,
    )
    expanded = np.asarray(refinement.expanded(queries, None, gallery, space))
    first = refinement.first_results(expanded, None, gallery, space)
    rankings = np.argsort(-expanded.astype(float) @ gallery.astype(float).T, axis=1, kind="stable")
    for i, ranking in enumerate(rankings):
        rest = [item for item in ranking if item not in first[i]]
        assert len(rest) == 40
        expected = by_protocol([*first[i], *rest], *counted(judgements, level, i))
        np.testing.assert_allclose([found[name][i] for name in METRICS], expected, rtol=1e-12)


def test_an_unknown_level_is_an_error():
    with pytest.raises(UserError, match="no level 'Hard'; choose among easy, medium, hard"):
        relevance_at("Hard", Judgements([], [], []))
