"""Objectives: losses in any space, with their parameters and state."""

from hypjax.objectives.base import Group, Metrics, Objective, Spec
from hypjax.objectives.create import (
    OBJECTIVES,
    create_objective,
    softmax_temperature,
    unused_fields,
)
from hypjax.objectives.hier import Hier, hier, reciprocal_triplets
from hypjax.objectives.pair_losses import (
    PairObjective,
    contrastive,
    koleo,
    multi_similarity,
    scalable_nca,
    supcon,
    triplet,
    tuple_contrastive,
)
from hypjax.objectives.pairwise import (
    PairwiseCrossEntropy,
    mixed_space,
    negative_weights,
    pairwise_cross_entropy,
)
from hypjax.objectives.proxy_losses import (
    ProxyObjective,
    normalized_softmax,
    proxy_anchor,
    proxy_nca,
    soft_triple,
)

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
