"""Retrieval metrics: a score for each query, and means over queries."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, rules
from hypjax.retrieval.inputs import Ids, Labelled, OwnIds, OwnRows, Rows
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.positives import ItemRelevance, Ranking, Relevance, rankings
from hypjax.retrieval.postprocessing import NO_POSTPROCESSING, Postprocessing
from hypjax.retrieval.ranks import NO_MATCH, first_ranks
from hypjax.retrieval.rules import ALL, FIRST, Counts, Metric
from hypjax.retrieval.selection import StreamedGallery

_MAX_ENTRIES = 2**22  # Largest number of neighbours in memory at once.
_Metrics = Mapping[str, Metric]
_Scores = dict[str, Float[np.ndarray, " n"] | Bool[np.ndarray, " n"]]  # By metric.
_Ranks = Int[np.ndarray, " n"]  # Of each query's nearest match.
# Functions from K to a metric, by the metric's name.
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
    lists = ([f"{name}@{k}" for k in ks] if name in AT_K else [name] for name in metrics)
    return [*itertools.chain.from_iterable(lists)]


def _find_metric(name: str) -> Metric:
    kind, _, number = name.partition("@")
    if name in WITHOUT_K:
        return WITHOUT_K[name]
    if kind in AT_K and number.isdecimal() and int(number):
        return AT_K[kind](int(number))
    known = ", ".join([*(f"{kind}@K" for kind in AT_K), *WITHOUT_K])
    raise UserError(f"unknown metric {name!r}; it must be one of {known} (K is a number)")


def recall_at_k(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"] | Sequence[Any],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | Sequence[Any] | None = None,
    *,
    ks: Sequence[int],
    space: Space,
) -> dict[int, float]:
    """Recall@K: share of queries with an item of their class among their K nearest items.

    Queries and gallery are points of the space, and labels are class numbers or names. Without a
    gallery, each query searches the other queries. Returns {K: recall}. Queries without a match in
    the gallery are left out of the mean, and a warning says how many. Raises UserError if a point
    is not finite or not in the space, shapes do not match, no query has a match, or K exceeds the
    number of items to find.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Sphere
        >>> from hypjax.retrieval import recall_at_k
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> recall_at_k(points, [0, 1, 0, 1], ks=(1, 2), space=Sphere())
        {1: 0.0, 2: 0.5}
    """
    points = (queries, query_labels, gallery, gallery_labels)
    scores = query_scores(*points, metrics=[f"recall@{k}" for k in ks], space=space)
    return {k: mean_score(scores[f"recall@{k}"]) for k in ks}


def mean_average_precision_at_r(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"] | Sequence[Any],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | Sequence[Any] | None = None,
    *,
    space: Space,
) -> float:
    """MAP@R (Musgrave et al., *A Metric Learning Reality Check*, ECCV 2020, Section 3.2).

    With R matches, a query scores the sum of the precisions at the matches among its R nearest
    items, divided by R. Takes the arguments and raises the errors of `recall_at_k`.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Sphere
        >>> from hypjax.retrieval import mean_average_precision_at_r
        >>> points = np.array([[1, 0], [0.8, 0.6], [0.6, 0.8], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{mean_average_precision_at_r(points, [0, 0, 1, 1], space=Sphere()):.2f}")
        0.50
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["map@r"], space=space)["map@r"])


def r_precision(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"] | Sequence[Any],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | Sequence[Any] | None = None,
    *,
    space: Space,
) -> float:
    """Share of matches among the R nearest items of a query that has R matches.

    Takes the arguments and raises the errors of `recall_at_k`.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Sphere
        >>> from hypjax.retrieval import r_precision
        >>> points = np.array([[1, 0], [0.8, 0.6], [0.6, 0.8], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{r_precision(points, [0, 0, 1, 1], space=Sphere()):.2f}")
        0.50
    """
    points = (queries, query_labels, gallery, gallery_labels)
    return mean_score(query_scores(*points, metrics=["r_precision"], space=space)["r_precision"])


def query_scores(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"] | Sequence[Any],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | Sequence[Any] | None = None,
    *,
    metrics: Sequence[str],
    space: Space,
    postprocessing: Postprocessing = NO_POSTPROCESSING,
    own_rows: OwnRows = (),
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query, to be averaged over queries, classes or resamples.

    Points may be memory-mapped and larger than the memory; they are read in chunks. For points,
    labels, space and errors see `recall_at_k`. `metrics` are names: recall@K, precision@K and mp@K
    with a number for K, mrr, map, map@r and r_precision. K of recall and precision is at most the
    number of items. `postprocessing` expands queries and re-ranks results before they are scored.

    `own_rows` lists, for each query, the gallery rows of the query's own image, which are left out
    of its results; post-processing leaves out only the first of these rows. By default, each query
    is its own image if there is no gallery.

    Returns {metric: scores}, float64. The score is NaN for queries without a match in the gallery,
    and a warning says how many there are.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Sphere
        >>> from hypjax.retrieval import query_scores
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(query_scores(points, [0, 1, 0, 1], metrics=["mrr"], space=Sphere())["mrr"])
        [0.5        0.33333333 0.33333333 0.5       ]
    """
    selected = {name: _find_metric(name) for name in metrics}
    query_set, gallery_set = inputs.labelled(queries, query_labels, gallery, gallery_labels)
    at_k = (name.split("@")[1] for name in selected if name.startswith(("recall@", "precision@")))
    largest_k = max(map(int, at_k), default=1)
    inputs.check_count(largest_k, len(gallery_set.points) - (query_set is gallery_set), "K")
    own_ids, own_rows = own_items(query_set, own_rows, len(gallery_set.points))
    if own_ids is not query_set.ids:
        query_set = query_set._replace(ids=own_ids)
    matches, needs_all_ranks = _count_matches(query_set, gallery_set, own_rows)
    if not matches.any():
        raise UserError("no query has a match in the gallery; check the labels")
    report_excluded(matches)
    points = query_set.points, own_ids, gallery_set.points
    expanded, nearest = postprocessing.apply(*points, space)
    reranked = None if nearest is None else nearest[1]
    if expanded is not query_set.points:  # Else the queries may be the gallery.
        query_set = query_set._replace(points=expanded)
    searches = _Searches(query_set, gallery_set, space, matches, own_rows, reranked)
    scores = {name: np.full(len(matches), np.nan) for name in metrics}
    for all_ranks in (False, True):
        rows = np.flatnonzero(needs_all_ranks == all_ranks)
        if matches[rows].any():
            group_scores = _scores_by_labels(searches.take(rows), selected, all_ranks)
            for name in metrics:
                scores[name][rows] = np.where(matches[rows] > 0, group_scores[name], np.nan)
    return scores


def own_items(queries: Labelled, own_rows: OwnRows, num_items: int) -> tuple[OwnIds, OwnRows]:
    """Gallery indices of the queries' own images: the first of each (−1 for none), and all.

    `own_rows` is the argument of `query_scores`, with indices below `num_items`.
    """
    count = len(queries.points)
    if not any(map(len, own_rows)):
        return queries.ids, [()] * count if queries.ids is None else queries.ids[:, None].tolist()
    if len(own_rows) != count:
        raise UserError(f"own_rows has {len(own_rows)} lists for {count} queries")
    pairs = [(query, row) for query, rows in enumerate(own_rows) for row in rows]
    are_valid = inputs.are_indices([row for _, row in pairs], num_items)
    if not are_valid or len(set(pairs)) < len(pairs):
        raise UserError(f"own_rows must be indices from 0 to {num_items - 1}, none twice")
    return np.array([rows[0] if len(rows) else -1 for rows in own_rows]), own_rows


def _count_matches(
    queries: Labelled, gallery: Labelled, own_rows: OwnRows
) -> tuple[Counts, Bool[np.ndarray, " n"]]:
    """Counts each query's matches, and marks queries that need the ranks of all their matches."""
    count = len(queries.labels)
    num_own = np.fromiter(map(len, own_rows), int)
    owners = np.repeat(np.arange(count), num_own)  # The query of each own image.
    own_images = np.fromiter(itertools.chain.from_iterable(own_rows), int)
    same_class = gallery.labels[own_images] == queries.labels[owners]
    matches = np.bincount(gallery.labels, minlength=queries.labels.max() + 1)[queries.labels]
    matches -= np.bincount(owners[same_class], minlength=count)
    # Faster searches exclude only one item per query, which must be of the query's class.
    needs_all_ranks = num_own > 1
    # A search that leaves out own images lists one item less than the gallery has.
    needs_all_ranks |= (matches == len(gallery.labels)) & (queries.ids is not None)
    needs_all_ranks[owners[~same_class]] = True
    return matches, needs_all_ranks


class _Searches(NamedTuple):
    """Queries, the gallery that they search, and what is known of each query's results."""

    queries: Labelled
    gallery: Labelled
    space: Space
    matches: Counts
    own_rows: OwnRows
    reranked: Ids | None  # The first results of each query, in their final order.

    def take(self, rows: Rows) -> "_Searches":
        if len(rows) == len(self.matches):  # Then copies no points; queries may be the gallery.
            return self
        queries, gallery, space, matches, own_rows, reranked = self
        own_rows = [own_rows[row] for row in rows]
        reranked = None if reranked is None else reranked[rows]
        return _Searches(queries.take(rows), gallery, space, matches[rows], own_rows, reranked)


def _scores_by_labels(searches: _Searches, metrics: _Metrics, all_ranks: bool) -> _Scores:
    """Scores from as few ranks as the metrics need, or from the ranks of all positives."""
    full = {name: x for name, x in metrics.items() if all_ranks or x.depth is ALL}
    others = {name: x for name, x in metrics.items() if name not in full}
    nearest = {name: x for name, x in others.items() if x.depth is FIRST}
    lengths = {name: x.depth(searches.matches) for name, x in others.items() if callable(x.depth)}
    listed = {name: metrics[name] for name in lengths}
    length = int(max(lengths.values(), default=0))
    scores: _Scores = {}
    nearest_ranks = np.full(len(searches.matches), NO_MATCH)
    streamed, most = StreamedGallery(searches.gallery.points), _largest_k(nearest)
    # A tree lists so many neighbours in less time than products take to count.
    if most > length and streamed.tree(searches.space, searches.queries.points, most + 1):
        length = most
    if length:
        scores, nearest_ranks = _scores_of_lists(searches, streamed, listed, length)
    if nearest:
        scores |= _scores_of_nearest(searches, nearest, nearest_ranks, length)
    if full:
        queries, gallery, space, _, own_rows, reranked = searches
        relevances = (
            ItemRelevance((gallery.labels == label).astype(np.int8), rows)
            for label, rows in zip(queries.labels, own_rows, strict=True)
        )
        ranked = rankings(queries.points, gallery.points, relevances, space, reranked)
        scores |= _scores_of_all(ranked, len(queries.points), full)
    return scores


def _largest_k(metrics: _Metrics) -> int:
    """The largest K of metrics of nearest matches; 0 if one of them takes no K."""
    ks = [metric.k or 0 for metric in metrics.values()]
    return max(ks, default=0) if all(ks) else 0


def _scores_of_lists(
    searches: _Searches, streamed: StreamedGallery, metrics: _Metrics, length: int
) -> tuple[_Scores, _Ranks]:
    """Scores from lists of nearest items, and each nearest match's rank, `NO_MATCH` if unlisted."""
    gallery, reranked = searches.gallery, searches.reranked
    scores = {name: np.empty(len(searches.matches)) for name in metrics}
    nearest_ranks = np.empty(len(searches.matches), int)
    for block in inputs.blocks(len(searches.matches), _MAX_ENTRIES // length):
        queries = searches.queries.take(block)
        ids = search(queries.points, queries.ids, streamed, k=length, space=searches.space)[1]
        if reranked is not None:  # The same items in another order.
            ids[:, : reranked.shape[1]] = reranked[block, :length]
        is_match = gallery.labels[ids] == queries.labels[:, None]
        # Ranks of the matches in the lists, padded with `NO_MATCH`.
        counts = is_match.sum(axis=1)
        ranks = np.full((len(counts), max(counts.max(), 1)), NO_MATCH)
        ranks[np.arange(ranks.shape[1]) < counts[:, None]] = np.nonzero(is_match)[1]
        for name, metric in metrics.items():
            scores[name][block] = metric.score(ranks, searches.matches[block])
        nearest_ranks[block] = ranks[:, 0]
    return scores, nearest_ranks


def _scores_of_nearest(
    searches: _Searches, metrics: _Metrics, ranks: _Ranks, length: int
) -> _Scores:
    """Scores from the ranks of nearest matches; `ranks` are `NO_MATCH` beyond lists of `length`."""
    queries, gallery, space, matches, _, reranked = searches
    most, unknown = _largest_k(metrics), np.flatnonzero(ranks == NO_MATCH)
    if len(unknown) and (not most or most > length):
        ks = [metric.k or 0 for metric in metrics.values()] if most else None
        ranks[unknown] = first_ranks(searches.take(unknown).queries, gallery, space, ks)
    if reranked is not None:
        is_match = gallery.labels[reranked] == queries.labels[:, None]
        ranks = np.where(is_match.any(axis=1), is_match.argmax(axis=1), ranks)
    return {name: metric.score(ranks[:, None], matches) for name, metric in metrics.items()}


def _scores_of_all(ranked: Iterable[Ranking], count: int, metrics: _Metrics) -> _Scores:
    """Scores from the ranks of all positives of `count` queries; NaN for those without any."""
    scores = {name: np.full(count, np.nan) for name in metrics}
    for query, ranking in enumerate(ranked):
        if num_matches := len(ranking.ranks):
            for name, metric in metrics.items():
                scores[name][query] = metric.score(ranking.ranks[None], np.array([num_matches]))[0]
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
    report_excluded(np.array([len(items) for items in relevance.positives]))
    queries, nearest = postprocessing.apply(queries, None, gallery, space)
    reranked = None if nearest is None else nearest[1]
    ranked = rankings(queries, gallery, relevances, space, reranked)
    return _scores_of_all(ranked, len(queries), selected)


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
    The rule averages the precisions just before and at each positive. Takes the arguments and
    raises the errors of `relevance_scores`; returns float64, NaN for queries without a positive.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Sphere
        >>> from hypjax.retrieval import Relevance, average_precision
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> relevance = Relevance(positives=[[2]], ignored=[[0]])  # Of the only query.
        >>> average_precision(points[:1], points, relevance, space=Sphere()).round(2)
        array([0.25])
    """
    return relevance_scores(queries, gallery, relevance, metrics=["map"], space=space)["map"]


def report_excluded(matches: Counts | Bool[np.ndarray, " b"]) -> None:
    """Warns that queries without matches are left out of the scores."""
    if excluded := int(np.sum(matches == 0)):
        problem = f"{excluded} of {len(matches)} queries have no match"
        warnings.warn(f"{problem} and are left out of the scores", stacklevel=3)


def mean_score(scores: Float[np.ndarray, " n"]) -> float:
    """Mean over the queries with a match; NaN marks queries without one."""
    return float(np.nanmean(scores))


def bootstrap_intervals(
    scores: Sequence[Float[np.ndarray, " n"]],
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """Percentile bootstrap intervals (low, high) of mean scores over queries (Efron, 1979).

    An interval contains a share `confidence` of the means of resampled queries. It shows how much
    the mean depends on the choice of queries, not how much it varies between training runs.
    `scores` holds an array for each metric, in which NaN marks queries without a match. Metrics
    share the resampled queries. Raises UserError if all scores of a metric are NaN.

    Examples:
        >>> import numpy as np
        >>> from hypjax.retrieval import bootstrap_intervals
        >>> bootstrap_intervals([np.array([1.0, 0.0, 1.0, 1.0])])
        [(0.25, 1.0)]
    """
    scores = [metric_scores[~np.isnan(metric_scores)] for metric_scores in scores]
    if not all(map(len, scores)):
        raise UserError("there are no scores to resample: no query has a match")
    means = np.empty((len(scores), num_resamples))
    counts = np.array([len(metric_scores) for metric_scores in scores])
    for count in np.unique(counts):  # Metrics with as many scores are resampled together.
        rows = np.flatnonzero(counts == count)
        group = np.stack([scores[row] for row in rows])
        rng = np.random.default_rng(seed)
        for i in range(num_resamples):
            means[rows, i] = group.take(rng.integers(count, size=count), axis=1).mean(axis=1)
    tail = (1 - confidence) / 2
    lows, highs = np.quantile(means, [tail, 1 - tail], axis=1).tolist()
    return list(zip(lows, highs, strict=True))
