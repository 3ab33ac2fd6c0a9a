"""Retrieval metrics: a score for each query, and means over queries."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from hypjax.errors import UserError, nearest
from hypjax.geometry import Space
from hypjax.retrieval import inputs, rules
from hypjax.retrieval.inputs import Ids, Labelled, OwnIds, Points
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.own_images import OwnRows
from hypjax.retrieval.positives import Lists, Relevance, by_labels, positive_ranks
from hypjax.retrieval.postprocessing import Postprocessing
from hypjax.retrieval.ranks import NO_MATCH, first_ranks
from hypjax.retrieval.reranking import rerank
from hypjax.retrieval.rules import ALL, FIRST, Counts, Metric

_MAX_ENTRIES = 2**22  # Largest number of neighbours in memory at once.
_Metrics = Mapping[str, Metric]
_Scores = dict[str, Float[np.ndarray, " n"]]  # By metric.
# Metrics at K, as functions of K; and metrics without a K.
AT_K: dict[str, Callable[[int], Metric]] = {
    "recall": lambda k: Metric(FIRST, lambda ranks, _: ranks[:, 0] < k, k),
    "precision": lambda k: Metric(lambda _: k, lambda ranks, _: np.sum(ranks < k, axis=1) / k),
    "mp": rules.mean_precision_at,
}
WITHOUT_K: dict[str, Metric] = {
    "mrr": Metric(FIRST, lambda ranks, _: 1 / (ranks[:, 0] + 1.0)),
    "map": Metric(ALL, rules.average_precision),
    "map@r": Metric(np.max, rules.average_precision_at_r),
    "r_precision": Metric(np.max, rules.precision_at_r),
}


def metric_names(metrics: Sequence[str], ks: Sequence[int]) -> list[str]:
    """Full names of metrics: one per K for those that take a K, such as recall@1."""
    names = ([f"{name}@{k}" for k in ks] if name in AT_K else [name] for name in metrics)
    return list(itertools.chain.from_iterable(names))


def _find_metric(name: str) -> Metric:
    kind, _, number = name.partition("@")
    if name in WITHOUT_K:
        return WITHOUT_K[name]
    if kind in AT_K and number.isdecimal() and int(number):
        return AT_K[kind](int(number))
    known = [*(f"{kind}@K" for kind in AT_K), *WITHOUT_K]
    raise UserError(f"unknown metric {name!r} (K is a number){nearest(name, known)}")


def recall_at_k(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    ks: Sequence[int],
    space: Space,
) -> dict[int, float]:
    """Recall@K: share of queries with an item of their class among their K nearest items.

    Queries and gallery are points of the space, [n, d] and [m, d], and labels are class numbers or
    names, [n] and [m]. Without a gallery, the queries are searched, and each is excluded from its
    own results. Returns {K: recall}; queries without a match in the gallery are left out of the
    mean, and a warning says how many.

    Raises:
        UserError: A point is not finite or not in the space, shapes do not match, no query has a
            match, or K exceeds the number of items to find.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    scores = query_scores(*points, metrics=[f"recall@{k}" for k in ks], space=space)
    return {k: mean_score(scores[f"recall@{k}"]) for k in ks}


def mean_average_precision_at_r(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> float:
    """MAP@R (Musgrave et al., *A Metric Learning Reality Check*, ECCV 2020, Section 3.2).

    R is the number of a query's matches. Its score is the mean over its R nearest items of the
    precision up to that item if it is a match, and 0 if it is not. Takes the arguments and raises
    the errors of `recall_at_k`.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["map@r"], space=space)["map@r"])


def r_precision(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> float:
    """Share of matches among the R nearest items of a query that has R matches.

    Takes the arguments and raises the errors of `recall_at_k`.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["r_precision"], space=space)["r_precision"])


def query_scores(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    metrics: Sequence[str],
    space: Space,
    postprocessing: Postprocessing | None = None,
    own_rows: OwnRows = (),
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query, to be averaged over queries, classes or resamples.

    NumPy arrays may be memory-mapped and larger than the memory; they are read in chunks. For
    points, labels, space and errors see `recall_at_k`. `metrics` are names: recall@K, precision@K
    and mp@K with a number for K, mrr, map, map@r and r_precision; K of recall and precision is at
    most the number of items. A `postprocessing` expands queries and re-ranks results before they
    are scored. `own_rows` lists, for each query, the gallery rows of its own image, which it does
    not find; the first of them takes no part in its post-processing either. By default, that is the
    query itself if there is no gallery.

    Returns:
        {metric: scores [n], float64}. The score is NaN for queries without a match in the gallery,
        and a warning says how many there are.
    """
    selected = {name: _find_metric(name) for name in metrics}
    asked, searched = inputs.labelled(queries, query_labels, gallery, gallery_labels)
    deepest = max((metric.k or 1 for metric in selected.values()), default=1)
    inputs.check_count(deepest, len(searched.points) - (asked is searched), "K")
    matches = np.bincount(searched.labels, minlength=int(asked.labels.max()) + 1)[asked.labels]
    needs_lists = np.zeros(len(matches), bool)
    if any(map(len, own_rows)):
        asked, matches, needs_lists = _without_own(asked, searched, matches, own_rows)
    else:
        matches -= asked is searched  # A query is no match of itself.
    if not matches.any():
        raise UserError("no query has a match in the gallery; check the labels")
    report_excluded(matches)
    points, top = postprocessed(postprocessing, asked.points, asked.ids, searched.points, space)
    if points is not asked.points:  # Else the queries may be the gallery.
        asked = asked._replace(points=points)
    if not needs_lists.any():
        scores = _scores_by_labels(asked, searched, matches, selected, space, top)
        return {name: np.where(matches > 0, scores[name], np.nan) for name in metrics}
    scores = {name: np.full(len(matches), np.nan) for name in metrics}
    for rows in filter(len, map(np.flatnonzero, (needs_lists, ~needs_lists & (matches > 0)))):
        part = Labelled(points[rows], asked.labels[rows], asked.ids[rows])
        part_top = None if top is None else top[rows]
        if needs_lists[rows[0]]:
            lists = by_labels(part, searched, [own_rows[row] for row in rows])
            part_scores = _scores_of_all(
                part.points, searched.points, lists, selected, space, part_top
            )
        else:
            part_scores = _scores_by_labels(
                part, searched, matches[rows], selected, space, part_top
            )
        for name in metrics:
            scores[name][rows] = part_scores[name]
    return scores


def _without_own(
    asked: Labelled, searched: Labelled, matches: Counts, own_rows: OwnRows
) -> tuple[Labelled, Counts, Bool[np.ndarray, " n"]]:
    """Queries with the first rows of their own images, other matches, and which need lists."""
    # Programs exclude one item of a query's own class. Other queries take longer.
    lengths = np.fromiter(map(len, own_rows), int)
    if len(lengths) != len(matches):
        raise UserError(f"own_rows has {len(lengths)} lists for {len(matches)} queries")
    queries = np.repeat(np.arange(len(matches)), lengths)
    items = np.fromiter(itertools.chain.from_iterable(own_rows), int)
    same_class = searched.labels[items] == asked.labels[queries]
    ids = np.full(len(matches), -1)
    ids[queries[::-1]] = items[::-1]
    matches = matches - np.bincount(queries[same_class], minlength=len(matches))
    needs_lists = lengths > 1
    needs_lists[queries[~same_class]] = True
    return asked._replace(ids=ids), matches, needs_lists


def postprocessed(
    postprocessing: Postprocessing | None,
    queries: Points,
    own_ids: OwnIds,
    gallery: Points,
    space: Space,
) -> tuple[Points, Ids | None]:
    """Expanded queries, and their re-ranked first results, or None without re-ranking."""
    postprocessing = postprocessing or Postprocessing()
    queries = postprocessing.expanded(queries, own_ids, gallery, space)
    if (numbers := postprocessing.reranking) is None:
        return queries, None
    return queries, rerank(queries, gallery, space=space, own_ids=own_ids, numbers=numbers)[1]


def _scores_by_labels(
    asked: Labelled,
    searched: Labelled,
    matches: Counts,
    metrics: _Metrics,
    space: Space,
    top: Ids | None,
) -> _Scores:
    """Scores from as few ranks as the metrics need; `top` holds re-ranked first results."""
    first, full = (
        {name: metric for name, metric in metrics.items() if metric.depth is depth}
        for depth in (FIRST, ALL)
    )
    listed = {name: metric for name, metric in metrics.items() if callable(metric.depth)}
    depth = max((metric.depth(matches) for metric in listed.values()), default=0)
    if all(metric.k is not None and metric.k <= depth for metric in first.values()):
        listed, first = listed | first, {}  # The lists of neighbours answer these, too.
    scores = {}
    if first:
        ks = [metric.k for metric in first.values()]
        ranks = first_ranks(asked, searched, space, None if None in ks else ks)
        if top is not None:
            hits = searched.labels[top] == asked.labels[:, None]
            ranks = np.where(hits.any(axis=1), hits.argmax(axis=1), ranks)
        scores |= {name: metric.score(ranks[:, None], matches) for name, metric in first.items()}
    if listed:
        scores |= _scores_of_lists(asked, searched, matches, listed, depth, space, top)
    if full:
        lists = by_labels(asked, searched)
        scores |= _scores_of_all(asked.points, searched.points, lists, full, space, top)
    return scores


def _scores_of_lists(
    asked: Labelled,
    searched: Labelled,
    matches: Counts,
    metrics: _Metrics,
    k: int,
    space: Space,
    top: Ids | None,
) -> _Scores:
    """Scores from the k nearest items, as many as the metrics need."""
    scores = {name: np.empty(len(matches)) for name in metrics}
    for part in inputs.blocks(len(matches), _MAX_ENTRIES // k):
        own_ids = None if asked.ids is None else asked.ids[part]
        ids = search(asked.points[part], own_ids, searched.points, k=k, space=space)[1]
        if top is not None:  # The same items in another order.
            ids[:, : top.shape[1]] = top[part, :k]
        hits = searched.labels[ids] == asked.labels[part, None]
        # Ranks of the positives in the lists, filled up with `NO_MATCH`.
        counts = hits.sum(axis=1)
        ranks = np.full((len(hits), max(counts.max(), 1)), NO_MATCH)
        ranks[np.arange(ranks.shape[1]) < counts[:, None]] = np.nonzero(hits)[1]
        for name, metric in metrics.items():
            scores[name][part] = metric.score(ranks, matches[part])
    return scores


def _scores_of_all(
    queries: Points,
    gallery: Points,
    lists: Iterable[Lists],
    metrics: _Metrics,
    space: Space,
    top: Ids | None,
) -> _Scores:
    """Scores from the ranks of all positives."""
    scores = {name: np.full(len(queries), np.nan) for name in metrics}
    lists, same_lists = itertools.tee(lists)
    ranked = zip(positive_ranks(queries, gallery, lists, space), same_lists, strict=True)
    for i, (ranks, (positives, ignored)) in enumerate(ranked):
        if top is not None:  # Positives among the first results are the same, in another order.
            results = top[i][~np.isin(top[i], ignored)]
            hits = np.flatnonzero(np.isin(results, positives))
            ranks = np.concatenate([hits, ranks[len(hits) :]])
        if len(ranks):
            for name, metric in metrics.items():
                scores[name][i] = metric.score(ranks[None], np.array([len(ranks)]))[0]
    return scores


def relevance_scores(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    relevance: Relevance,
    *,
    metrics: Sequence[str],
    space: Space,
    postprocessing: Postprocessing | None = None,
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query where positives and ignored items are listed.

    Ignored items are removed from a query's ranking, but may expand it: the search does not know
    them. For other arguments, results and errors see `query_scores`; raises UserError for
    invalid lists, too.
    """
    queries, gallery = inputs.check_points(queries, gallery)
    lists = relevance.checked(len(queries), len(gallery))
    selected = {name: _find_metric(name) for name in metrics}
    report_excluded(np.array([len(positives) for positives, _ in lists]))
    queries, top = postprocessed(postprocessing, queries, None, gallery, space)
    return _scores_of_all(queries, gallery, lists, selected, space, top)


def average_precision(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    relevance: Relevance,
    *,
    space: Space,
) -> Float[np.ndarray, " n"]:
    """Average precision of each query over its whole ranking, without the ignored items.

    It is the area below the curve of precision over recall, by the trapezoid rule, as in the
    protocol of Oxford and Paris (Philbin et al., CVPR 2007; Radenović et al., CVPR 2018): the
    precisions just before and at each positive are averaged. For arguments and errors see
    `relevance_scores`; returns scores [n], float64, NaN for queries without a positive.
    """
    return relevance_scores(queries, gallery, relevance, metrics=["map"], space=space)["map"]


def report_excluded(matches: Counts) -> None:
    """Warns of queries without matches."""
    if excluded := int(np.sum(matches == 0)):
        warnings.warn(
            f"{excluded} of {len(matches)} queries have no match and are left out of the scores",
            stacklevel=3,
        )


def mean_score(scores: Float[np.ndarray, " n"]) -> float:
    """Mean of scores [n] over the queries that have a match; NaN marks the others."""
    return float(np.nanmean(scores))


def bootstrap_interval(
    scores: Float[np.ndarray, " n"],
    *,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval (low, high) of the mean score over queries (Efron, 1979).

    It contains a share `confidence` of the means of resampled queries. It shows how much the mean
    depends on the choice of queries, not how much it varies between training runs. Scores [n] are
    NaN for queries without a match; raises UserError if no query has one.
    """
    scores = scores[~np.isnan(scores)]
    if not len(scores):
        raise UserError("there are no scores to resample: no query has a match")
    rng = np.random.default_rng(seed)
    means = [rng.choice(scores, len(scores)).mean() for _ in range(num_resamples)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
