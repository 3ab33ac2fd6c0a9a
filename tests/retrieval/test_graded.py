"""Metrics of graded relevance against loops in float64 over whole rankings."""

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Sphere
from hypjax.retrieval import graded_scores, positives
from hypjax.retrieval.graded import GRADED
from hypjax.retrieval.positives import Ranking
from hypjax.retrieval.postprocessing import Postprocessing, Reranking, rerank
from tests.helpers.exact_order import FUSED, true_order
from tests.helpers.galleries import points


def by_loops(levels, num_own=0):
    """H-AP, NDCG and ASI of levels in order; `num_own` further items have the highest level."""
    highest = max(levels)
    count = {level: levels.count(level) + num_own * (level == highest) for level in levels}
    relevance = [level / count[level] for level in levels]
    h_ap = gain = intersection = 0.0
    ideal = sorted(levels, reverse=True)
    positives = [rank for rank, level in enumerate(levels) if level]
    for rank in positives:
        lesser = [min(relevance[rank], x) for x in relevance[: rank + 1]]
        h_ap += sum(lesser) / (rank + 1) / sum(relevance)
    for order, sign in ((levels, 1), (ideal, -1)):
        total = sum((2**level - 1) / np.log2(rank + 2) for rank, level in enumerate(order))
        gain = total if sign == 1 else gain / total
    for n in range(1, len(positives) + 1):
        pairs = ((levels[:n].count(x), ideal[:n].count(x)) for x in range(1, highest + 1))
        intersection += sum(map(min, pairs)) / n / len(positives)
    return [h_ap, gain, intersection]


def ranking(levels, depth, num_own=0):
    """The `Ranking` of levels in the order of the ranking."""
    levels = np.array(levels)
    counts = np.bincount(levels, minlength=depth + 1)
    counts[depth] += num_own
    ranks = np.flatnonzero(levels)
    return Ranking(ranks, levels[ranks], counts)


def scores_of(*arguments, **options):
    return [GRADED[name](ranking(*arguments, **options)) for name in ("h_ap", "ndcg", "asi")]


@pytest.mark.parametrize(
    ("levels", "depth", "num_own", "expected"),
    [  # First, values of the released evaluation.
        (
            *([0, 2, 1, 0, 2, 1, 1, 0], 2, 1),
            [0.5782312925170069, 0.6831997612941982, 0.4533333333333333],
        ),
        ([1, 1, 2, 0, 0, 1], 2, 1, [0.7222222222222222, 0.7644537258240657, 0.5625]),
        (
            *([3, 0, 1, 2, 2, 0, 1, 1, 1], 3, 1),
            [0.7643738977072311, 0.9161802814234797, 0.6806122448979591],
        ),
        # One item of level 1; one of level 2, and the query itself: both have relevance 1, so that
        # this is average precision. The released code, which counts levels twice, has 7/6.
        ([0, 1, 2], 2, 1, [(1 / 2 + 2 / 3) / 2]),
        ([0, 1, 0, 0, 1, 1, 0], 1, 1, [(1 / 2 + 2 / 5 + 3 / 6) / 3]),
        ([3, 2, 2, 1, 1, 1, 0, 0], 3, 0, [1, 1, 1]),
    ],
)
def test_small_rankings_have_known_scores(levels, depth, num_own, expected):
    actual = scores_of(levels, depth, num_own=num_own)[: len(expected)]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def tree_labels(rng, n):
    """Labels of a random tree with three levels: classes, and two levels above them."""
    family, order = rng.integers(0, 6, 15), rng.integers(0, 3, 6)
    classes = rng.integers(0, 15, n)
    return np.stack([classes, family[classes], order[family[classes]]])


@pytest.mark.filterwarnings("ignore:.* queries have no match")
@pytest.mark.parametrize("space", [Sphere(), FUSED], ids=str)
@pytest.mark.parametrize("separate_gallery", [False, True])
def test_scores_are_those_of_the_definitions(space, separate_gallery, monkeypatch):
    monkeypatch.setattr(positives, "_BOUND_BYTES", 16 * 90 * 7)  # Several blocks and chunks.
    monkeypatch.setattr(positives, "_CHUNK_BYTES", 8 * 3 * 37)
    monkeypatch.setattr(positives, "_KEPT_BYTES", 0 if separate_gallery else 2**30)
    monkeypatch.setattr(positives, "_CROWD_SIZE", 8)
    rng = np.random.default_rng(0)
    x, levels = points(space, 0, 90, 3), tree_labels(rng, 90)
    x[40:60] = x[20:40]  # Copies with other labels: ties are broken by index.
    x[70:] = x[0] + 1e-7 * (x[70:] - x[0])
    gallery, own_rows = (), [[i] for i in range(90)]
    if separate_gallery:
        gallery, own_rows = (x, levels), [[3, 50], [], [7]] + [[]] * 17
        x, levels = x[10:30], levels[:, 10:30]
    of_levels = [y if y.dtype == x.dtype else [*y] for y in (x, levels, *gallery)]
    actual = graded_scores(*of_levels, space=space, own_rows=own_rows if separate_gallery else ())
    items, item_levels = gallery or (x, levels)
    for i, order in enumerate(true_order(space, x, items)):
        shared = np.sum(item_levels == levels[:, i, None], axis=0)
        ranked_levels = [int(shared[j]) for j in order if j not in own_rows[i]]
        full = ranking(ranked_levels, 3)._replace(counts=np.bincount(shared, minlength=4))
        num_own = int(np.sum(shared[own_rows[i]] == 3))
        expected = [metric(full) for metric in GRADED.values()]
        if max(ranked_levels) == 3 and num_own == len(own_rows[i]):
            expected = by_loops(ranked_levels, num_own)
        scores = [actual[name][i] for name in GRADED]
        np.testing.assert_allclose(scores, expected, rtol=1e-12, err_msg=str(i))


def test_re_ranked_results_are_scored():
    x, labels = points(Sphere(), 0, 60, 4), np.arange(60) % 6
    reranking = Reranking(k1=5, k2=3, depth=10)
    top = rerank(x, x, own_ids=np.arange(60), space=Sphere(), parameters=reranking)[1]
    actual = graded_scores(
        *(x, [labels, labels // 3]),
        space=Sphere(),
        postprocessing=Postprocessing(reranking=reranking),
    )
    for i, order in enumerate(true_order(Sphere(), x, x)):
        items = [*top[i], *(j for j in order if j != i and j not in top[i])]
        shared = np.sum([labels == labels[i], labels // 3 == labels[i] // 3], axis=0)
        levels = shared[items].tolist()
        np.testing.assert_allclose([actual[n][i] for n in GRADED], by_loops(levels, 1), rtol=1e-12)


def test_queries_without_positives_have_no_score_and_wrong_arguments_are_errors():
    x, labels = points(Sphere(), 0, 9, 3), np.array([0, 0, 1, 1, 2, 9, 4, 4, 4])
    with pytest.warns(UserWarning, match="1 of 9 queries have no match"):
        actual = graded_scores(x, [labels, labels // 3], metrics=["asi"], space=Sphere())
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(actual["asi"])), [5])
    for arguments, options, words in (
        (([labels], x), {}, "the same levels"),
        (([],), {}, "the same levels"),
        (([labels], x, [labels, labels]), {}, "the same levels"),
        (([labels],), {"metrics": ["hap"]}, "unknown graded metric 'hap'"),
        (([np.arange(9)],), {}, "no query has a match"),
        (([labels],), {"own_rows": [[0]]}, "own_rows has 1 lists for 9 queries"),
    ):
        with pytest.raises(UserError, match=words):
            graded_scores(x, *arguments, space=Sphere(), **options)
