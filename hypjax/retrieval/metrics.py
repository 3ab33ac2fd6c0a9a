"""What a retrieval is scored by: a value for each query, and means over queries."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.ranks import match_ranks

_ENTRIES = 2**24  # Neighbours held at a time.


def recall_at_k(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    ks: Sequence[int],
    space: Space,
) -> dict[int, float]:
    """Share of queries with an item of their class among their k nearest.

    Args:
        queries: Points of the space.
        query_labels: Their classes.
        gallery: Points to search; None: every query searches the other queries.
        gallery_labels: Their classes.
        ks: Numbers of neighbours.
        space: Measures the distances.

    Returns:
        {k: recall} with recalls between 0 and 1. Queries without any match are left out of the
        mean, with a warning that counts them.

    Raises:
        UserError: A point is not finite or outside the space, sizes do not fit, or no query has a
            match.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    values = query_scores(*points, metrics=[f"recall@{k}" for k in ks], space=space)
    return {int(k): mean_score(values[f"recall@{k}"]) for k in ks}


def mean_reciprocal_rank(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> float:
    """Mean of 1/(rank of the nearest match), ranks from 1. See `recall_at_k` for arguments."""
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["mrr"], space=space)["mrr"])


def mean_average_precision_at_r(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> float:
    """MAP@R (Musgrave et al., *A Metric Learning Reality Check*, ECCV 2020, Section 3.2).

    With R the number of a query's matches, the mean over its R nearest items of the precision up to
    each that is a match, and 0 for each that is none. See `recall_at_k` for arguments.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["map@r"], space=space)["map@r"])


def r_precision(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    space: Space,
) -> float:
    """Share of matches among a query's R nearest items, R being the number of its matches.

    See `recall_at_k` for arguments.
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["r_precision"], space=space)["r_precision"])


def precision_at_k(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    ks: Sequence[int],
    space: Space,
) -> dict[int, float]:
    """Share of matches among the k nearest. See `recall_at_k` for arguments."""
    points = (queries, query_labels, gallery, gallery_labels)
    values = query_scores(*points, metrics=[f"precision@{k}" for k in ks], space=space)
    return {int(k): mean_score(values[f"precision@{k}"]) for k in ks}


def query_scores(
    queries: Float[ArrayLike, "n d"],
    query_labels: Int[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Int[ArrayLike, " m"] | None = None,
    *,
    metrics: Sequence[str],
    space: Space,
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query, for means over all, over a class, or over resamples.

    Args:
        queries: Points of the space.
        query_labels: Their classes.
        gallery: Points to search; None: every query searches the other queries.
        gallery_labels: Their classes.
        metrics: Names: recall@K and precision@K with a number for K, mrr, map@r, r_precision.
        space: Measures the distances.

    Returns:
        {metric: a value for each query}, NaN where a query has no match to find, which a warning
        counts.

    Raises:
        UserError: A point is not finite or outside the space, sizes do not fit, a metric is
            unknown, precision's K exceeds the gallery, or no query has a match.
    """
    chosen = {name: _metric(name) for name in metrics}
    own = np.arange(len(queries)) if gallery is None else None
    searched = (queries, query_labels) if gallery is None else (gallery, gallery_labels)
    query_labels, labels = inputs.check_labelled(queries, query_labels, *searched)
    matches = np.bincount(labels, minlength=int(query_labels.max()) + 1)[query_labels]
    matches -= own is not None
    _tell_excluded(matches)
    scores = {name: np.full(len(queries), np.nan) for name in metrics}
    if any(metric.depth is None for metric in chosen.values()):
        apart = () if own is not None else (gallery, labels)
        ranks = match_ranks(queries, query_labels, *apart, space=space)
        for name, metric in chosen.items():
            if metric.depth is None:
                scores[name][:] = metric.score(ranks)
    lists = {name: metric for name, metric in chosen.items() if metric.depth is not None}
    if lists:
        k = max(metric.depth(matches) for metric in lists.values())
        for part in _parts(len(queries), k):
            mine = None if own is None else own[part]
            found = search(queries[part], mine, searched[0], k=k, space=space)[1]
            hits = labels[found] == query_labels[part, None]
            for name, metric in lists.items():
                scores[name][part] = metric.score(hits, matches[part])
    return {name: np.where(matches > 0, scores[name], np.nan) for name in metrics}


class _Metric(NamedTuple):
    """How queries are scored.

    Attributes:
        depth: From their numbers of matches to how many neighbours it takes; None: it takes the
            rank of the nearest match instead.
        score: From the ranks, or from which neighbours are matches and the numbers of matches.
    """

    depth: Callable[[Int[np.ndarray, " n"]], int] | None
    score: Callable[..., Float[np.ndarray, " n"]]


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


AT_K: dict[str, Callable[[int], _Metric]] = {
    "recall": lambda k: _Metric(None, lambda ranks: ranks < k),
    "precision": lambda k: _Metric(lambda matches: k, lambda hits, _: hits[:, :k].mean(axis=1)),
}
WITHOUT_K: dict[str, _Metric] = {
    "mrr": _Metric(None, lambda ranks: 1 / (ranks + 1.0)),
    "map@r": _Metric(np.max, _average_precision_at_r),
    "r_precision": _Metric(np.max, _precision_at_r),
}


def metric_names(metrics: Sequence[str], ks: Sequence[int]) -> list[str]:
    """Full names of metrics: those that take a K once for each, the others as they are."""
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
        f"unknown metric {name!r}; there are {', '.join(f'{kind}@K' for kind in AT_K)} (with a "
        f"number for K), {', '.join(WITHOUT_K)}"
    )


def _parts(queries: int, k: int) -> Iterator[slice]:
    """Queries at a time, so that their neighbours take little memory."""
    size = max(_ENTRIES // k, 1)
    return (slice(start, start + size) for start in range(0, queries, size))


def _tell_excluded(matches: Int[np.ndarray, " n"]) -> None:
    excluded = int(np.sum(matches == 0))
    if excluded == len(matches):
        raise UserError("no query has an item of its own class to find; check the labels")
    if excluded:
        warnings.warn(
            f"{excluded} of {len(matches)} queries have no match and are left out of the scores",
            stacklevel=3,
        )


def mean_score(scores: Float[np.ndarray, " n"]) -> float:
    """Mean over the queries that have a match."""
    return float(np.nanmean(scores))


def scores_by_class(
    scores: Float[np.ndarray, " n"], labels: Int[ArrayLike, " n"]
) -> dict[int, float]:
    """Mean over each class's queries, of the classes that have a match."""
    labels = np.asarray(labels)
    kept = ~np.isnan(scores)
    classes, places = np.unique(labels[kept], return_inverse=True)
    means = np.bincount(places, scores[kept]) / np.bincount(places)
    return dict(zip(classes.tolist(), means.tolist(), strict=True))


def bootstrap_interval(
    scores: Float[np.ndarray, " n"],
    *,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron, 1979), over queries.

    It tells how much a mean depends on the choice of queries, and nothing of other training runs.

    Args:
        scores: Of each query, NaN where it has no match.
        confidence: Share of resamples' means inside the interval.
        num_resamples: Number of resamples.
        seed: Of the resampling.

    Raises:
        UserError: No query has a match.
    """
    scores = scores[~np.isnan(scores)]
    if not len(scores):
        raise UserError("there is no score to resample; no query has a match")
    rng = np.random.default_rng(seed)
    means = [rng.choice(scores, len(scores)).mean() for _ in range(num_resamples)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
