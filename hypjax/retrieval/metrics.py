"""Retrieval metrics: a score for each query, and means over queries."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.ranks import match_ranks

_MAX_ENTRIES = 2**24  # Largest number of neighbours in memory at once.


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

    Args:
        queries: Points of the space, [n, d].
        query_labels: Class numbers or names of the queries, [n].
        gallery: Points of the space to search, [m, d]. If None, the gallery is the queries, and
            each query is excluded from its own results.
        gallery_labels: Classes of the gallery, [m]; required if there is a gallery.
        ks: Numbers of neighbours K.
        space: Space that measures the distances.

    Returns:
        {K: recall}, between 0 and 1. Queries without a match in the gallery are left out of the
        mean, and a warning says how many.

    Raises:
        UserError: A point is not finite or not in the space, shapes do not match, or no query has
            a match.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return _means_at_k("recall", ks, points, space)


def mean_reciprocal_rank(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> float:
    """Mean of 1 / (rank of the nearest match), with ranks from 1.

    Arguments and errors are those of `recall_at_k`.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["mrr"], space=space)["mrr"])


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
    precision up to that item if it is a match, and 0 if it is not. Arguments and errors are those
    of `recall_at_k`.
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

    Arguments and errors are those of `recall_at_k`.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["r_precision"], space=space)["r_precision"])


def precision_at_k(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    ks: Sequence[int],
    space: Space,
) -> dict[int, float]:
    """Precision@K: share of matches among the K nearest items of a query.

    Arguments and errors are those of `recall_at_k`; K may be at most the number of items.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return _means_at_k("precision", ks, points, space)


def query_scores(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    metrics: Sequence[str],
    space: Space,
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query, from which means over all queries, classes or resamples can be taken.

    Args:
        queries: Points of the space, [n, d].
        query_labels: Class numbers or names of the queries, [n].
        gallery: Points of the space to search, [m, d]. If None, the gallery is the queries, and
            each query is excluded from its own results.
        gallery_labels: Classes of the gallery, [m]; required if there is a gallery.
        metrics: Names: recall@K and precision@K with a number for K, mrr, map@r, r_precision.
        space: Space that measures the distances.

    Returns:
        {metric: scores [n], float64}. The score is NaN for queries without a match in the gallery,
        and a warning says how many there are.

    Raises:
        UserError: A point is not finite or not in the space, shapes do not match, a metric is
            unknown, K of a precision exceeds the number of items, or no query has a match.
    """
    selected = {name: _metric(name) for name in metrics}
    own_ids = np.arange(len(queries)) if gallery is None else None
    searched = (queries, query_labels) if gallery is None else (gallery, gallery_labels)
    query_labels, labels = inputs.check_labelled(queries, query_labels, *searched)
    matches = np.bincount(labels, minlength=int(query_labels.max()) + 1)[query_labels]
    matches -= own_ids is not None
    _report_excluded(matches)
    _report_trivial(metrics, items=len(labels) - (own_ids is not None))
    scores = {name: np.full(len(queries), np.nan) for name in metrics}
    if any(metric.depth is None for metric in selected.values()):
        separate_gallery = () if own_ids is not None else (gallery, labels)
        rank_metrics = {name: metric for name, metric in selected.items() if metric.depth is None}
        ks = [metric.k for metric in rank_metrics.values()]
        ranks = match_ranks(
            queries, query_labels, *separate_gallery, space=space, ks=None if None in ks else ks
        )
        for name, metric in rank_metrics.items():
            scores[name][:] = metric.score(ranks)
    list_metrics = {name: metric for name, metric in selected.items() if metric.depth is not None}
    if list_metrics:
        k = max(metric.depth(matches) for metric in list_metrics.values())
        for part in _parts(len(queries), k):
            part_ids = None if own_ids is None else own_ids[part]
            found = search(queries[part], part_ids, searched[0], k=k, space=space)[1]
            hits = labels[found] == query_labels[part, None]
            for name, metric in list_metrics.items():
                scores[name][part] = metric.score(hits, matches[part])
    return {name: np.where(matches > 0, scores[name], np.nan) for name in metrics}


class _Metric(NamedTuple):
    """A rule that scores queries.

    Attributes:
        depth: Number of neighbours needed, as a function of the queries' numbers of matches; or
            None if the rule uses the rank of the nearest match instead.
        score: Scores as a function of the ranks; or, with a depth, of the hits among the neighbours
            and the numbers of matches.
        k: Number such that the score depends on whether the rank is below it, or None if it depends
            on more.
    """

    depth: Callable[[Int[np.ndarray, " n"]], int] | None
    score: Callable[..., Float[np.ndarray, " n"]]
    k: int | None = None


def _within_r(hits: Bool[np.ndarray, "b k"], matches: Int[np.ndarray, " b"]) -> np.ndarray:
    return hits & (np.arange(hits.shape[1]) < matches[:, None])


def _precision_at_r(
    hits: Bool[np.ndarray, "b k"], matches: Int[np.ndarray, " b"]
) -> Float[np.ndarray, " b"]:
    return _within_r(hits, matches).sum(axis=1) / np.maximum(matches, 1)


def _average_precision_at_r(
    hits: Bool[np.ndarray, "b k"], matches: Int[np.ndarray, " b"]
) -> Float[np.ndarray, " b"]:
    hits = _within_r(hits, matches)
    precision = np.cumsum(hits, axis=1) / np.arange(1, hits.shape[1] + 1)
    return np.sum(precision * hits, axis=1) / np.maximum(matches, 1)


# Metrics at K, as functions of K; and metrics without a K.
AT_K: dict[str, Callable[[int], _Metric]] = {
    "recall": lambda k: _Metric(None, lambda ranks: ranks < k, k),
    "precision": lambda k: _Metric(lambda matches: k, lambda hits, _: hits[:, :k].mean(axis=1)),
}
WITHOUT_K: dict[str, _Metric] = {
    "mrr": _Metric(None, lambda ranks: 1 / (ranks + 1.0)),
    "map@r": _Metric(np.max, _average_precision_at_r),
    "r_precision": _Metric(np.max, _precision_at_r),
}


def metric_names(metrics: Sequence[str], ks: Sequence[int]) -> list[str]:
    """Full names of metrics: one name per K for those that take a K, the plain name for others."""
    return [
        full
        for name in metrics
        for full in ([f"{name}@{k}" for k in ks] if name in AT_K else [name])
    ]


def _metric(name: str) -> _Metric:
    kind, _, number = name.partition("@")
    if name in WITHOUT_K:
        return WITHOUT_K[name]
    if kind in AT_K and number.isdecimal() and int(number):
        return AT_K[kind](int(number))
    raise UserError(
        f"unknown metric {name!r}; choose among {', '.join(f'{kind}@K' for kind in AT_K)} (with a "
        f"number for K), {', '.join(WITHOUT_K)}"
    )


def _means_at_k(
    name: str, ks: Sequence[int], points: tuple[ArrayLike | None, ...], space: Space
) -> dict[int, float]:
    """Means over queries of a metric at each K.

    Raises:
        UserError: `ks` is not a sequence of whole numbers, or as `query_scores`.
    """
    if not np.iterable(ks) or isinstance(ks, str):
        raise UserError(f"ks is {ks!r}; it must be a list of whole numbers, such as (1, 10)")
    ks = [inputs.check_whole_number("a K in ks", k) for k in ks]
    values = query_scores(*points, metrics=[f"{name}@{k}" for k in ks], space=space)
    return {k: mean_score(values[f"{name}@{k}"]) for k in ks}


def _parts(queries: int, k: int) -> Iterator[slice]:
    """Splits the queries into parts whose neighbours fit into memory."""
    size = max(_MAX_ENTRIES // k, 1)
    return (slice(start, start + size) for start in range(0, queries, size))


def _report_trivial(metrics: Sequence[str], items: int) -> None:
    """Warns of recalls that are 1 by definition, because K reaches the number of items."""
    names = [name for name in metrics if name.startswith("recall@")]
    trivial = [name for name in names if int(name.partition("@")[2]) >= items]
    if trivial:
        warnings.warn(
            f"{', '.join(trivial)} cannot be below 1: a query has only {items} items to find",
            stacklevel=3,
        )


def _report_excluded(matches: Int[np.ndarray, " n"]) -> None:
    excluded = int(np.sum(matches == 0))
    if excluded == len(matches):
        raise UserError("no query has a match in the gallery; check the labels")
    if excluded:
        warnings.warn(
            f"{excluded} of {len(matches)} queries have no match and are left out of the scores",
            stacklevel=3,
        )


def mean_score(scores: Float[np.ndarray, " n"]) -> float:
    """Mean of scores [n] over the queries that have a match; NaN marks the others."""
    return float(np.nanmean(scores))


def scores_by_class(
    scores: Float[np.ndarray, " n"], labels: Shaped[ArrayLike, " n"]
) -> dict[int, float]:
    """Mean score of each class, without queries that have no match.

    Args:
        scores: Scores of the queries, [n]; NaN for queries without a match.
        labels: Class numbers or names of the queries, [n].

    Returns:
        {class: mean score}, without classes that have no match.
    """
    labels = np.asarray(labels)
    kept = ~np.isnan(scores)
    classes, indices = np.unique(labels[kept], return_inverse=True)
    means = np.bincount(indices, scores[kept]) / np.bincount(indices)
    return dict(zip(classes.tolist(), means.tolist(), strict=True))


def bootstrap_interval(
    scores: Float[np.ndarray, " n"],
    *,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean score over queries (Efron, 1979).

    It shows how much the mean depends on the choice of queries, not how much it varies between
    training runs.

    Args:
        scores: Scores of the queries, [n]; NaN for queries without a match.
        confidence: Share of the resampled means that the interval contains.
        num_resamples: Number of resamples.
        seed: Random seed of the resamples.

    Returns:
        (low, high), the ends of the interval.

    Raises:
        UserError: No query has a match.
    """
    scores = scores[~np.isnan(scores)]
    if not len(scores):
        raise UserError("there are no scores to resample: no query has a match")
    rng = np.random.default_rng(seed)
    means = [rng.choice(scores, len(scores)).mean() for _ in range(num_resamples)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
