"""Exact nearest-neighbour search and evaluation of embeddings in any space."""

from hypjax.retrieval.metrics import (
    bootstrap_interval,
    mean_average_precision_at_r,
    mean_reciprocal_rank,
    mean_score,
    precision_at_k,
    query_scores,
    r_precision,
    recall_at_k,
    scores_by_class,
)
from hypjax.retrieval.neighbors import nearest_neighbors
from hypjax.retrieval.ranks import NO_MATCH, match_ranks

__all__ = [
    "NO_MATCH",
    "bootstrap_interval",
    "match_ranks",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "mean_score",
    "nearest_neighbors",
    "precision_at_k",
    "query_scores",
    "r_precision",
    "recall_at_k",
    "scores_by_class",
]
