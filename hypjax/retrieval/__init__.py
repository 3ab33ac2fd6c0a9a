"""Exact nearest-neighbour search and evaluation of embeddings in any space."""

from hypjax.retrieval.metrics import (
    average_precision,
    bootstrap_interval,
    mean_average_precision_at_r,
    mean_reciprocal_rank,
    mean_score,
    precision_at_k,
    query_scores,
    r_precision,
    recall_at_k,
    relevance_scores,
    scores_by_class,
)
from hypjax.retrieval.neighbors import nearest_neighbors
from hypjax.retrieval.ranks import NO_MATCH, match_ranks
from hypjax.retrieval.relevance import LEVELS, Relevance, relevance_at
from hypjax.types import Judgements

__all__ = [
    "LEVELS",
    "NO_MATCH",
    "Judgements",
    "Relevance",
    "average_precision",
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
    "relevance_at",
    "relevance_scores",
    "scores_by_class",
]
