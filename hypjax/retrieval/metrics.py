"""Retrieval metrics: a score for each query, and means over queries."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, rules
from hypjax.retrieval.inputs import Ids, Labelled, OwnIds, Points
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.own_images import OwnRows
from hypjax.retrieval.positives import ItemRelevance, Relevance, rankings, relevance_by_labels
from hypjax.retrieval.postprocessing import NO_POSTPROCESSING, Postprocessing
from hypjax.retrieval.ranks import NO_MATCH, first_ranks
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
    """Full names of metrics, such as recall@1: one for each K where a metric takes a K."""
    full_names = []
    for name in metrics:
        full_names += [f"{name}@{k}" for k in ks] if name in AT_K else [name]
    return full_names


def _find_metric(name: str) -> Metric:
    kind, _, number = name.partition("@")
    if name in WITHOUT_K:
        return WITHOUT_K[name]
    if kind in AT_K and number.isdecimal() and int(number):
        return AT_K[kind](int(number))
    known = [*(f"{kind}@K" for kind in AT_K), *WITHOUT_K]
    raise UserError(
        f"unknown metric {name!r}; it must be one of {', '.join(known)} (K is a number)"
    )


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
    names, [n] and [m]. Without a gallery, each query searches the other queries.
    Returns {K: recall}; queries without a match in the gallery are left out of the
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

    R is the number of a query's matches. The score is the mean over the query's R nearest items of
    the precision up to the item if it is a match, else of 0. Takes the arguments and raises the
    errors of `recall_at_k`.
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
    postprocessing: Postprocessing = NO_POSTPROCESSING,
    own_rows: OwnRows = (),
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query, to be averaged over queries, classes or resamples.

    NumPy arrays may be memory-mapped and larger than the memory; they are read in chunks. For
    points, labels, space and errors see `recall_at_k`. `metrics` are names: recall@K, precision@K
    and mp@K with a number for K, mrr, map, map@r and r_precision; K of recall and precision is at
    most the number of items. `postprocessing` expands queries and re-ranks results before they are
    scored. `own_rows` lists, for each query, the gallery rows of the query's own image, which are
    left out of its results; post-processing leaves out the first of these rows only. By default,
    each query is its own image if there is no gallery.

    Returns:
        {metric: scores [n], float64}. The score is NaN for queries without a match in the gallery,
        and a warning says how many there are.
    """
    selected = {name: _find_metric(name) for name in metrics}
    query_set, gallery_set = inputs.labelled(queries, query_labels, gallery, gallery_labels)
    count = len(query_set.points)
    deepest = max((metric.k or 1 for metric in selected.values()), default=1)
    inputs.check_count(deepest, len(gallery_set.points) - (query_set is gallery_set), "K")
    own_ids, own_rows = own_items(query_set, own_rows)
    if own_ids is not query_set.ids:
        query_set = query_set._replace(ids=own_ids)
    matches, needs_all = _count_matches(query_set, gallery_set, own_rows)
    if not matches.any():
        raise UserError("no query has a match in the gallery; check the labels")
    report_excluded(matches)
    arguments = query_set.points, own_ids, gallery_set.points, space
    points, (_, reranked) = postprocessing.apply(*arguments)
    if points is not query_set.points:  # Else the queries may be the gallery.
        query_set = query_set._replace(points=points)
    scores = {name: np.full(count, np.nan) for name in metrics}
    for all_ranks in (False, True):
        rows = np.flatnonzero(needs_all == all_ranks)
        if not matches[rows].any():
            continue
        group, group_reranked = query_set, reranked
        if len(rows) < count:
            group = Labelled(points[rows], query_set.labels[rows], own_ids[rows])
            group_reranked = None if reranked is None else reranked[rows]
        arguments = group, gallery_set, matches[rows], [own_rows[row] for row in rows], selected
        group_scores = _scores_by_labels(*arguments, space, group_reranked, all_ranks)
        for name in metrics:
            scores[name][rows] = np.where(matches[rows] > 0, group_scores[name], np.nan)
    return scores


def own_items(queries: Labelled, own_rows: OwnRows) -> tuple[OwnIds, OwnRows]:
    """Gallery indices of the queries' own images: the first of each (−1 for none), and all.

    `own_rows` is the argument of `query_scores`.
    """
    count = len(queries.points)
    if not any(map(len, own_rows)):
        return queries.ids, [()] * count if queries.ids is None else queries.ids[:, None]
    if len(own_rows) != count:
        raise UserError(f"own_rows has {len(own_rows)} lists for {count} queries")
    return np.array([rows[0] if len(rows) else -1 for rows in own_rows]), own_rows


def _count_matches(
    queries: Labelled, gallery: Labelled, own_rows: OwnRows
) -> tuple[Counts, Bool[np.ndarray, " n"]]:
    """Counts each query's matches, and marks queries that need the ranks of all their matches."""
    count = len(queries.labels)
    lengths = np.fromiter(map(len, own_rows), int)
    owners = np.repeat(np.arange(count), lengths)
    own_items = np.fromiter(itertools.chain.from_iterable(own_rows), int)
    same_class = gallery.labels[own_items] == queries.labels[owners]
    matches = np.bincount(gallery.labels, minlength=queries.labels.max() + 1)[queries.labels]
    matches -= np.bincount(owners[same_class], minlength=count)
    # Faster searches exclude only one item per query, which must be of the query's class.
    needs_all = lengths > 1
    needs_all[owners[~same_class]] = True
    return matches, needs_all


def _scores_by_labels(
    query_set: Labelled,
    gallery_set: Labelled,
    matches: Counts,
    own_rows: OwnRows,
    metrics: _Metrics,
    space: Space,
    reranked: Ids | None,
    all_ranks: bool,
) -> _Scores:
    """Scores from as few ranks as the metrics need, or from the ranks of all positives."""
    first, listed, full = {}, {}, {}
    for name, metric in metrics.items():
        if all_ranks or metric.depth is ALL:
            full[name] = metric
        elif metric.depth is FIRST:
            first[name] = metric
        else:
            listed[name] = metric
    depth = max((metric.depth(matches) for metric in listed.values()), default=0)
    scores, ranks = {}, np.full(len(matches), NO_MATCH)
    if listed:
        scores, ranks = _scores_of_lists(
            query_set, gallery_set, matches, listed, depth, space, reranked
        )
    if first:
        ks = [metric.k for metric in first.values()]
        if None in ks or max(ks) > depth:  # Else the lists of neighbours answer these, too.
            ranks = _completed(ranks, query_set, gallery_set, space, None if None in ks else ks)
        if reranked is not None:
            hits = gallery_set.labels[reranked] == query_set.labels[:, None]
            ranks = np.where(hits.any(axis=1), hits.argmax(axis=1), ranks)
        scores |= {name: metric.score(ranks[:, None], matches) for name, metric in first.items()}
    if full:
        relevances = relevance_by_labels(query_set, gallery_set, own_rows)
        points = query_set.points, gallery_set.points
        scores |= _scores_of_all(*points, relevances, full, space, reranked)
    return scores


def _completed(
    ranks: Int[np.ndarray, " n"],
    query_set: Labelled,
    gallery_set: Labelled,
    space: Space,
    ks: Sequence[int] | None,
) -> Int[np.ndarray, " n"]:
    """Ranks of nearest matches, where those within a query's list of neighbours are known."""
    rows = np.flatnonzero(ranks == NO_MATCH)
    if len(rows) == len(ranks):
        return first_ranks(query_set, gallery_set, space, ks)
    if len(rows):
        ids = None if query_set.ids is None else query_set.ids[rows]
        others = Labelled(query_set.points[rows], query_set.labels[rows], ids)
        ranks[rows] = first_ranks(others, gallery_set, space, ks)
    return ranks


def _scores_of_lists(
    query_set: Labelled,
    gallery_set: Labelled,
    matches: Counts,
    metrics: _Metrics,
    k: int,
    space: Space,
    reranked: Ids | None,
) -> tuple[_Scores, Int[np.ndarray, " n"]]:
    """Scores from the k nearest items, as many as the metrics need, and ranks of nearest matches.

    The rank is `NO_MATCH` for queries without a match among the k nearest items.
    """
    scores = {name: np.empty(len(matches)) for name in metrics}
    first = np.empty(len(matches), int)
    for part in inputs.blocks(len(matches), _MAX_ENTRIES // k):
        own_ids = None if query_set.ids is None else query_set.ids[part]
        ids = search(query_set.points[part], own_ids, gallery_set.points, k=k, space=space)[1]
        if reranked is not None:  # The same items in another order.
            ids[:, : reranked.shape[1]] = reranked[part, :k]
        hits = gallery_set.labels[ids] == query_set.labels[part, None]
        # Ranks of the positives in the lists, padded with `NO_MATCH`.
        counts = hits.sum(axis=1)
        ranks = np.full((len(hits), max(counts.max(), 1)), NO_MATCH)
        ranks[np.arange(ranks.shape[1]) < counts[:, None]] = np.nonzero(hits)[1]
        for name, metric in metrics.items():
            scores[name][part] = metric.score(ranks, matches[part])
        first[part] = ranks[:, 0]
    return scores, first


def _scores_of_all(
    queries: Points,
    gallery: Points,
    relevances: Iterable[ItemRelevance],
    metrics: _Metrics,
    space: Space,
    reranked: Ids | None,
) -> _Scores:
    """Scores from the ranks of all positives."""
    scores = {name: np.full(len(queries), np.nan) for name in metrics}
    for i, ranking in enumerate(rankings(queries, gallery, relevances, space, reranked)):
        if count := len(ranking.ranks):
            for name, metric in metrics.items():
                scores[name][i] = metric.score(ranking.ranks[None], np.array([count]))[0]
    return scores


def relevance_scores(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    relevance: Relevance,
    *,
    metrics: Sequence[str],
    space: Space,
    postprocessing: Postprocessing = NO_POSTPROCESSING,
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query from lists of positives and of ignored items.

    Ignored items are removed from a query's ranking, but may take part in its expansion. For other
    arguments, results and errors see `query_scores`. Raises UserError if a list is not valid.
    """
    queries, gallery = inputs.check_points(queries, gallery)
    relevances = relevance.of_items(len(queries), len(gallery))
    selected = {name: _find_metric(name) for name in metrics}
    report_excluded(np.array(list(map(len, relevance.positives))))
    queries, (_, reranked) = postprocessing.apply(queries, None, gallery, space)
    return _scores_of_all(queries, gallery, relevances, selected, space, reranked)


def average_precision(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    relevance: Relevance,
    *,
    space: Space,
) -> Float[np.ndarray, " n"]:
    """Average precision of each query over its whole ranking, without the ignored items.

    Average precision is the area below the curve of precision over recall, by the trapezoid rule,
    as in the protocol of Oxford and Paris (Philbin et al., CVPR 2007; Radenović et al., CVPR 2018).
    The rule averages the precisions just before and at each positive. For arguments and errors see
    `relevance_scores`; returns scores [n], float64, NaN for queries without a positive.
    """
    return relevance_scores(queries, gallery, relevance, metrics=["map"], space=space)["map"]


def report_excluded(matches: Counts) -> None:
    """Warns that queries without matches are left out."""
    if excluded := int(np.sum(matches == 0)):
        warnings.warn(
            f"{excluded} of {len(matches)} queries have no match and are left out of the scores",
            stacklevel=3,
        )


def mean_score(scores: Float[np.ndarray, " n"]) -> float:
    """Mean of scores [n] over the queries with a match; the scores of others are NaN."""
    return float(np.nanmean(scores))


def bootstrap_intervals(
    scores: Sequence[Float[np.ndarray, " n"]],
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """Percentile bootstrap intervals (low, high) of mean scores over queries (Efron, 1979).

    An interval contains a share `confidence` of the means of resampled queries. It shows how much
    the mean depends on the choice of queries, not how much it varies between training runs. Each
    metric's scores [n] are NaN for queries without a match; raises UserError if all are. Metrics
    share the resampled queries.
    """
    scores = [of_metric[~np.isnan(of_metric)] for of_metric in scores]
    if not all(map(len, scores)):
        raise UserError("there are no scores to resample: no query has a match")
    means = np.empty((len(scores), num_resamples))
    sizes = np.array(list(map(len, scores)))
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        of_size, rng = np.stack([scores[row] for row in rows]), np.random.default_rng(seed)
        for i in range(num_resamples):
            means[rows, i] = of_size.take(rng.integers(size, size=size), axis=1).mean(axis=1)
    tail = (1 - confidence) / 2
    return list(zip(*np.quantile(means, [tail, 1 - tail], axis=1).tolist(), strict=True))
