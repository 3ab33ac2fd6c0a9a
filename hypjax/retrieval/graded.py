"""Metrics of graded relevance: rankings that should follow a hierarchy of labels.

An item's level for a query is the number of labels that the two share: the class, and the coarse
classes above it. Positives share at least one. H-AP, NDCG and ASI follow the released evaluation of
Ramzi et al., *Hierarchical Average Precision Training for Pertinent Image Retrieval* (ECCV 2022),
with one correction, see `h_ap`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from hypjax.errors import UserError, nearest
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import OwnRows
from hypjax.retrieval.metrics import own_items, report_excluded
from hypjax.retrieval.positives import ItemRelevance, Ranking, rankings
from hypjax.retrieval.postprocessing import NO_POSTPROCESSING, Postprocessing


def h_ap(ranking: Ranking) -> float:
    """Hierarchical average precision (Ramzi et al., ECCV 2022; α = 1 in the released code).

    The relevance of level l is l, divided by the number of items of exactly this level. This number
    includes the query's own image, which counts nowhere else. The H-rank of a positive p is the sum
    of min(relevance of p, relevance of q) over p and the positives q before p. The score is the sum
    of H-rank / rank, divided by the sum of relevances: 1 if relevance never rises in the ranking.
    Levels of equal relevance count once; the released code counts each of them twice.
    """
    relevance = np.arange(len(ranking.counts)) / np.maximum(ranking.counts, 1)
    smaller = np.minimum.outer(relevance[1:], relevance)
    # For each positive, the number of positives of each level up to its rank.
    counts = np.cumsum(ranking.levels == np.arange(1, len(ranking.counts))[:, None], axis=1)
    h_ranks = np.sum(counts * smaller[:, ranking.levels], axis=0)
    return np.sum(h_ranks / (ranking.ranks + 1)) / np.sum(relevance[ranking.levels])


def ndcg(ranking: Ranking) -> float:
    """Normalised discounted cumulative gain (Järvelin & Kekäläinen, 2002) of the whole ranking.

    Level l has gain 2^l − 1, and the discount of rank r, from 1, is log2(1 + r).
    """
    gains = np.exp2(ranking.levels) - 1
    ideal = np.sum(np.sort(gains)[::-1] / np.log2(np.arange(2, len(gains) + 2)))
    return np.sum(gains / np.log2(ranking.ranks + 2)) / ideal


def asi(ranking: Ranking) -> float:
    """Average set intersection (Sun et al., *Dynamic Metric Learning*, CVPR 2021).

    Mean over n, from 1 to the number of positives, of the overlap of the first n items with the
    first n of an ideal ranking, divided by n. Items of one level are interchangeable.
    """
    levels = np.arange(1, len(ranking.counts))[:, None]
    top_levels = np.zeros(len(ranking.ranks), int)  # Levels of the first p items, for p positives.
    is_top = ranking.ranks < len(top_levels)
    top_levels[ranking.ranks[is_top]] = ranking.levels[is_top]
    ideal_levels = np.sort(ranking.levels)[::-1]
    counts, ideal_counts = (np.cumsum(x == levels, axis=1) for x in (top_levels, ideal_levels))
    shared = np.minimum(counts, ideal_counts)
    return np.mean(np.sum(shared, axis=0) / np.arange(1, len(top_levels) + 1))


GRADED: dict[str, Callable[[Ranking], float]] = {"h_ap": h_ap, "ndcg": ndcg, "asi": asi}


def graded_scores(
    queries: Float[ArrayLike, "n d"],
    levels: Sequence[Shaped[ArrayLike, " n"]],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_levels: Sequence[Shaped[ArrayLike, " m"]] | None = None,
    *,
    space: Space,
    metrics: Sequence[str] = tuple(GRADED),
    postprocessing: Postprocessing = NO_POSTPROCESSING,
    own_rows: OwnRows = (),
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query by levels of labels: h_ap, ndcg and asi.

    `levels` lists the queries' labels at each level: their classes, then ever coarser classes;
    `gallery_levels` lists the gallery's. Levels need not nest: only the number of shared labels
    counts. Takes the other arguments, returns the results and raises the errors of `query_scores`;
    also raises UserError if queries and gallery differ in the number of levels.
    """
    for name in metrics:
        if name not in GRADED:
            raise UserError(f"unknown graded metric {name!r}{nearest(name, GRADED)}")
    no_levels: Sequence[None] = () if gallery is not None else [None] * len(levels)
    item_levels = no_levels if gallery_levels is None else gallery_levels
    if not 0 < len(levels) == len(item_levels):
        raise UserError("queries and gallery need labels at the same levels, at least one")
    labels, gallery_labels = [], []
    for level, item_level in zip(levels, item_levels, strict=True):
        query_set, gallery_set = inputs.labelled(queries, level, gallery, item_level)
        labels.append(query_set.labels)
        gallery_labels.append(gallery_set.labels)
    items, item_labels = gallery_set.points, np.stack(gallery_labels)
    own_ids, own_rows = own_items(query_set, own_rows, len(items))
    points, nearest_items = postprocessing.apply(query_set.points, own_ids, items, space)
    reranked = None if nearest_items is None else nearest_items[1]
    relevances = (
        ItemRelevance((item_labels == query_labels[:, None]).sum(axis=0, dtype=np.int8), rows)
        for query_labels, rows in zip(np.transpose(labels), own_rows, strict=True)
    )
    scores = np.full((len(metrics), len(points)), np.nan)
    for query, ranking in enumerate(rankings(points, items, relevances, space, reranked)):
        if len(ranking.ranks):
            scores[:, query] = [GRADED[name](ranking) for name in metrics]
    if np.isnan(scores[0]).all():
        raise UserError("no query has a match in the gallery; check the labels")
    report_excluded(~np.isnan(scores[0]))
    return dict(zip(metrics, scores, strict=True))
