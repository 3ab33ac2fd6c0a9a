"""Exact nearest-neighbour evaluation of embeddings in any space."""

from hypjax.retrieval.recall import match_ranks, recall_at_k

__all__ = ["match_ranks", "recall_at_k"]
