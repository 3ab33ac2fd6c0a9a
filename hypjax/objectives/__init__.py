"""Objectives: losses in any space, with their parameters and state."""

from hypjax.objectives.base import Group, Metrics, Objective, Spec
from hypjax.objectives.create import OBJECTIVES, create_objective
from hypjax.objectives.pairwise import PairwiseCrossEntropy, pairwise_cross_entropy

__all__ = [
    "OBJECTIVES",
    "Group",
    "Metrics",
    "Objective",
    "PairwiseCrossEntropy",
    "Spec",
    "create_objective",
    "pairwise_cross_entropy",
]
