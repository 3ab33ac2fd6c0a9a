"""Retrieval metrics: a score for each query, and means over queries."""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, metric_rules
from hypjax.retrieval.metric_rules import Metric
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.rankings import positive_ranks
from hypjax.retrieval.ranks import match_ranks
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.relevance import Relevance, by_labels
from hypjax.retrieval.summaries import mean_score

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
    refinement: Refinement | None = None,
    rows: slice | None = None,
) -> dict[str, Float[np.ndarray, " r"]]:
    """Scores of each query, from which means over all queries, classes or resamples can be taken.

    Args:
        queries: Points of the space, [n, d].
        query_labels: Class numbers or names of the queries, [n].
        gallery: Points of the space to search, [m, d]. If None, the gallery is the queries, and
            each query is excluded from its own results.
        gallery_labels: Classes of the gallery, [m]; required if there is a gallery.
        metrics: Names: recall@K, precision@K and mp@K with a number for K, mrr, map, map@r and
            r_precision.
        space: Space that measures the distances.
        refinement: How queries are expanded and results re-ranked before they are scored. Beyond
            the results that are re-ranked, the order is that of the distances.
        rows: Queries to score, for processes that share the work; by default all. Re-ranking needs
            all.

    Returns:
        {metric: scores [r], float64}. The score is NaN for queries without a match in the gallery,
        and a warning says how many of all queries there are.

    Raises:
        UserError: A point is not finite or not in the space, shapes do not match, a metric is
            unknown, K of a precision exceeds the number of items, or no query has a match.
    """
    inputs.check_space(space)
    selected = {name: metric_rules.metric(name) for name in metrics}
    own_ids = np.arange(len(queries)) if gallery is None else None
    searched = (queries, query_labels) if gallery is None else (gallery, gallery_labels)
    query_labels, labels = inputs.check_labelled(queries, query_labels, *searched)
    matches = np.bincount(labels, minlength=int(query_labels.max()) + 1)[query_labels]
    matches -= own_ids is not None
    _report_excluded(matches)
    _report_trivial(metrics, items=len(labels) - (own_ids is not None))
    separate_gallery = () if own_ids is not None else (gallery, labels)
    if rows is not None:
        space.check(inputs.float32(queries))  # All, so that all processes raise the same error.
        queries, query_labels, matches = queries[rows], query_labels[rows], matches[rows]
        own_ids = None if own_ids is None else own_ids[rows]
        separate_gallery = searched[0], labels
    scores = {name: np.full(len(queries), np.nan) for name in metrics}
    reordered = None  # Whether the first results are matches, in their new order.
    if refinement is not None:
        queries = refinement.expanded(queries, own_ids, searched[0], space)
        if refinement.expansion:
            separate_gallery = searched[0], labels
        if refinement.reranking is not None:
            found = refinement.first_results(queries, own_ids, searched[0], space)
            reordered = labels[found] == query_labels[:, None]
    first = {
        name: metric for name, metric in selected.items() if metric.depth is metric_rules.FIRST
    }
    if first:
        ks = [metric.k for metric in first.values()]
        ranks = match_ranks(
            *(queries, query_labels, *separate_gallery),
            space=space,
            ks=None if None in ks else ks,
            own_ids=own_ids,
        )
        if reordered is not None:
            ranks = np.where(reordered.any(axis=1), reordered.argmax(axis=1), ranks)
        for name, metric in first.items():
            scores[name][:] = metric.score(ranks[:, None], matches)
    listed = {name: metric for name, metric in selected.items() if callable(metric.depth)}
    if listed:
        k = max(metric.depth(matches) for metric in listed.values())
        for part in _parts(len(queries), k):
            part_ids = None if own_ids is None else own_ids[part]
            found = search(queries[part], part_ids, searched[0], k=k, space=space)[1]
            hits = labels[found] == query_labels[part, None]
            if reordered is not None:
                hits[:, : reordered.shape[1]] = reordered[part, :k]
            ranks = metric_rules.ranks_of_hits(hits)
            for name, metric in listed.items():
                scores[name][part] = metric.score(ranks, matches[part])
    full = {name: metric for name, metric in selected.items() if metric.depth is metric_rules.ALL}
    if full:
        relevance = by_labels(query_labels, labels, own_ids)
        scores |= _scores_of_all(queries, searched[0], relevance, full, space, reordered)
    return {name: np.where(matches > 0, scores[name], np.nan) for name in metrics}


def relevance_scores(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    relevance: Relevance,
    *,
    metrics: Sequence[str],
    space: Space,
    refinement: Refinement | None = None,
    rows: slice | None = None,
) -> dict[str, Float[np.ndarray, " r"]]:
    """Scores of each query where positives and ignored items are listed.

    Args:
        queries: Points of the space, [n, d].
        gallery: Points of the space to search, [m, d].
        relevance: Positives and ignored items of each query. Ignored ones are removed from its
            ranking.
        metrics: Names, see `query_scores`.
        space: Space that measures the distances.
        refinement: See `query_scores`. Ignored items may expand a query, as in a search that does
            not know them.
        rows: See `query_scores`.

    Returns:
        {metric: scores [r], float64}. The score is NaN for queries without a positive, and a
        warning says how many of all queries there are.

    Raises:
        UserError: A point is not finite or not in the space, shapes do not match, a metric is
            unknown, or the lists are not valid.
    """
    inputs.check_space(space)
    if not isinstance(relevance, Relevance):
        raise UserError(f"relevance is a {type(relevance).__name__}; make a Relevance of it")
    queries, gallery = inputs.check_points(queries, gallery)
    relevance = relevance.checked(len(queries), len(gallery))
    selected = {name: metric_rules.metric(name) for name in metrics}
    counts = np.array([len(items) for items in relevance.positives])
    if np.any(counts == 0):
        _warn_of_excluded(counts)
    if rows is not None:
        space.check(inputs.float32(queries))
        queries = queries[rows]
        relevance = Relevance(relevance.positives[rows], relevance.ignored[rows])
    reordered = None
    if refinement is not None:
        queries = refinement.expanded(queries, None, gallery, space)
        if refinement.reranking is not None:
            found = refinement.first_results(queries, None, gallery, space)
            listed = zip(found, relevance.positives, relevance.ignored, strict=True)
            reordered = [np.isin(row[~np.isin(row, out)], wanted) for row, wanted, out in listed]
    return _scores_of_all(queries, gallery, relevance, selected, space, reordered)


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
    precisions just before and at each positive are averaged. Arguments and errors are those of
    `relevance_scores`.

    Returns:
        Scores [n], float64; NaN for queries without a positive.
    """
    return relevance_scores(queries, gallery, relevance, metrics=["map"], space=space)["map"]


def _scores_of_all(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    relevance: Relevance,
    metrics: Mapping[str, Metric],
    space: Space,
    reordered: Sequence[Bool[np.ndarray, " k"]] | None = None,
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores from the ranks of all positives, the first of them from `reordered` if it is given."""
    scores = {name: np.full(len(queries), np.nan) for name in metrics}
    for i, ranks in enumerate(positive_ranks(queries, gallery, relevance, space)):
        if reordered is not None:
            hits = np.flatnonzero(reordered[i])
            ranks = np.concatenate([hits, ranks[len(hits) :]])
        if len(ranks):
            for name, metric in metrics.items():
                scores[name][i] = metric.score(ranks[None], np.array([len(ranks)]))[0]
    return scores


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
        _warn_of_excluded(matches)


def _warn_of_excluded(matches: Int[np.ndarray, " n"]) -> None:
    excluded = int(np.sum(matches == 0))
    warnings.warn(
        f"{excluded} of {len(matches)} queries have no match and are left out of the scores",
        stacklevel=4,
    )
