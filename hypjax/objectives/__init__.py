"""Objectives: losses in any space, with their parameters and state."""

from hypjax.objectives.base import Group, Metrics, Objective, Spec
from hypjax.objectives.create import OBJECTIVES, create_objective, unused_fields
from hypjax.objectives.hier import Hier, hier, reciprocal_triplets
from hypjax.objectives.koleo import koleo
from hypjax.objectives.mix import mixed_space
from hypjax.objectives.negative_weights import negative_weights, softmax_temperature
from hypjax.objectives.of_pairs import PairObjective
from hypjax.objectives.of_proxies import ProxyObjective
from hypjax.objectives.pair_losses import contrastive, multi_similarity, scalable_nca, supcon
from hypjax.objectives.pairwise import PairwiseCrossEntropy, pairwise_cross_entropy
from hypjax.objectives.proxy_losses import (
    normalized_softmax,
    proxy_anchor,
    proxy_nca,
    soft_triple,
)
from hypjax.objectives.triplets import triplet
from hypjax.objectives.tuples import tuple_contrastive

__all__ = [
    "OBJECTIVES",
    "Group",
    "Hier",
    "Metrics",
    "Objective",
    "PairObjective",
    "PairwiseCrossEntropy",
    "ProxyObjective",
    "Spec",
    "contrastive",
    "create_objective",
    "hier",
    "koleo",
    "mixed_space",
    "multi_similarity",
    "negative_weights",
    "normalized_softmax",
    "pairwise_cross_entropy",
    "proxy_anchor",
    "proxy_nca",
    "reciprocal_triplets",
    "scalable_nca",
    "soft_triple",
    "softmax_temperature",
    "supcon",
    "triplet",
    "tuple_contrastive",
    "unused_fields",
]
