"""Retrieval metrics against their definitions, computed query by query."""

import jax
import numpy as np
import pytest

from hypjax import retrieval
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.retrieval import bootstrap_intervals, metrics, query_scores
from tests.helpers.galleries import labelled

BALL = PoincareBall(0.1, 2.3)


def by_definition(name, hits, matches):
    """Score of one query, given which items of its full ranking are matches."""
    if name == "mrr":
        return 1 / (1 + np.flatnonzero(hits)[0])
    if name.startswith("precision@"):
        return np.mean(hits[: int(name[10:])])
    if name.startswith("recall@"):
        return float(any(hits[: int(name[7:])]))
    if name == "map":
        ranks = np.flatnonzero(hits)
        steps = [((j / r if r else 1) + (j + 1) / (r + 1)) / 2 for j, r in enumerate(ranks)]
        return np.mean(steps)
    precisions = [np.mean(hits[: i + 1]) if hits[i] else 0 for i in range(matches)]
    return np.mean(precisions) if name == "map@r" else np.mean(hits[:matches])


NAMES = ["recall@1", "recall@7", "precision@1", "precision@10"]
NAMES += ["mrr", "map", "map@r", "r_precision"]


@pytest.mark.parametrize("separate_gallery", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scores_equal_their_definitions(separate_gallery, monkeypatch):
    x, labels = labelled(BALL, 300, 25)
    gallery = labelled(BALL, 200, 25, seed=1) if separate_gallery else ()
    monkeypatch.setattr(metrics, "_MAX_ENTRIES", 2000)  # Several parts.
    scores = query_scores(x, labels, *gallery, metrics=NAMES, space=BALL)
    y, y_labels = gallery or (x, labels)
    distances = np.asarray(jax.jit(BALL.distance_matrix)(x, y), np.float64)
    if not separate_gallery:
        np.fill_diagonal(distances, np.inf)
    for i, row in enumerate(distances):
        order = np.argsort(row, kind="stable")[: len(y) - (not separate_gallery)]
        hits = y_labels[order] == labels[i]
        for name in NAMES:
            expected = by_definition(name, hits, hits.sum())
            assert scores[name][i] == pytest.approx(expected, abs=1e-12), (name, i)
    means = {"map@r": retrieval.mean_average_precision_at_r, "r_precision": retrieval.r_precision}
    for name, mean in means.items():
        assert mean(x, labels, *gallery, space=BALL) == pytest.approx(scores[name].mean())


def test_queries_without_a_match_are_left_out_of_all_means():
    x, labels = labelled(BALL, 50, 4)
    labels[3] = 99
    with pytest.warns(UserWarning, match="1 of 50 queries have no match and are left out"):
        scores = query_scores(x, labels, metrics=NAMES, space=BALL)
    for values in scores.values():
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(values)), [3])


def test_bootstrap_interval_has_the_requested_coverage():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        scores = rng.binomial(1, 0.7, 150).astype(float)
        ((low, high),) = bootstrap_intervals([scores], 0.9, num_resamples=300, seed=seed)
        covered += low <= 0.7 <= high
    assert 0.83 <= covered / 200 <= 0.96
    assert bootstrap_intervals([np.array([1.0, np.nan, 1.0])]) == [(1.0, 1.0)]
    with pytest.raises(UserError, match="no scores to resample"):
        bootstrap_intervals([np.array([np.nan])])


def test_invalid_arguments_are_an_error():
    x, labels = labelled(BALL, 20, 2)
    of_other_types = x, labels.astype(str)
    for arguments, metric, space, keyword in (
        ((labels,), "recall@0", BALL, "unknown metric"),
        ((labels,), "recall@20", BALL, "K is 20, but a search finds only 19"),
        ((labels,), "precision@20", BALL, "K is 20, but a search finds only 19"),
        ((labels,), "mrr", "poincare", "space"),
        ((labels / 2,), "mrr", BALL, "whole numbers or strings"),
        ((labels.astype(object),), "mrr", BALL, "whole numbers or strings"),
        ((labels, *of_other_types), "mrr", BALL, "both be numbers or strings"),
        ((labels, None, labels), "mrr", BALL, "labels of a gallery need the gallery's points"),
        ((np.ma.masked_equal(labels, 1),), "mrr", BALL, "labels of the queries have masked values"),
        ((labels, np.ma.masked_greater(x, 0), labels), "mrr", BALL, "gallery have masked values"),
        (([*labels[:-1], np.ma.masked],), "mrr", BALL, "labels of the queries have masked values"),
    ):
        with pytest.raises((ValueError, TypeError), match=keyword):  # By types, if checked.
            query_scores(x, *arguments, metrics=[metric], space=space)
    for own_rows in ([[-1]] * 20, [[20]] * 20, [[3, 3]] * 20):
        with pytest.raises(UserError, match="own_rows must be indices from 0 to 19, none twice"):
            query_scores(x, labels, x, labels, metrics=["mrr"], space=BALL, own_rows=own_rows)
    unmasked = np.ma.array(labels, mask=np.zeros(20, bool))
    assert retrieval.recall_at_k(x, unmasked, ks=(1,), space=BALL)


@pytest.mark.parametrize("kind", [str, object])
def test_labels_may_be_names(kind):
    x, labels = labelled(BALL, 60, 5)
    names = np.array(["zebra", "ant", "bee", "cat", "dog"])[labels].astype(kind)
    numbers = retrieval.recall_at_k(x, -(10**12) * labels, ks=(1, 5), space=BALL)
    assert retrieval.recall_at_k(x, names, ks=(1, 5), space=BALL) == numbers
    assert retrieval.recall_at_k(x, names, x, list(names), ks=(1,), space=BALL) == {1: 1.0}


def test_in_a_gallery_of_one_class_only_some_queries_may_have_own_images():
    x, _ = labelled(BALL, 12, 1)
    names = ["map@r", "r_precision", "recall@9", "mrr", "precision@7"]
    arguments = x[[3, 10, 11]], [5, 5, 5], x[:9], [5] * 9
    for own_rows in ([[3], [], []], [[3, 4], [], []], [[3], [0], []]):
        scores = query_scores(*arguments, metrics=names, space=BALL, own_rows=own_rows)
        assert all((values == 1).all() for values in scores.values())


def test_queries_without_a_match_beside_one_with_two_own_images_have_no_score():
    x = np.random.default_rng(0).normal(size=(13, 4)).astype(np.float32)
    labels, gallery_labels = np.array([0, 7, 7, 8]), np.array([0, 0, 0, 1, 1, 2, 2, 3, 3])
    arguments = x[:4], labels, x[4:], gallery_labels
    own_rows = [[0, 1], [], [], []]
    scores = query_scores(
        *arguments, metrics=["recall@1", "map@r"], space=PoincareBall(0.0, None), own_rows=own_rows
    )
    for of_metric in scores.values():
        np.testing.assert_array_equal(np.isnan(of_metric), [False, True, True, True])
