"""Rules that score queries by the ranks of their positives; `metrics` lists them by name.

Rules are functions of the ranks of positives, [b, p], from 0, ascending and filled up with
`NO_MATCH`, and of the numbers of positives, [b]. They return scores, [b].
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

Ranks = Int[np.ndarray, "b p"]
Counts = Int[np.ndarray, " b"]
Scores = Float[np.ndarray, " b"]
FIRST, ALL = "first", "all"  # Depths: the nearest positive, and all positives.


class Metric(NamedTuple):
    """A rule, and the ranks that it needs."""

    # The first rank, all ranks, or those below a function of the queries' numbers of positives.
    depth: Literal["first", "all"] | Callable[[Counts], int]
    score: Callable[[Ranks, Counts], Scores]
    k: int | None = None  # Set if the score depends only on whether the first rank is below k.


def precision_at_r(ranks: Ranks, positives: Counts) -> Scores:
    """Share of positives among as many items as there are positives."""
    return np.sum(ranks < positives[:, None], axis=1) / np.maximum(positives, 1)


def average_precision_at_r(ranks: Ranks, positives: Counts) -> Scores:
    """Mean over as many items of the precision at each positive, 0 at others."""
    precision = np.arange(1, ranks.shape[1] + 1) / (ranks + 1.0)
    within = ranks < positives[:, None]
    return np.sum(precision, axis=1, where=within) / np.maximum(positives, 1)


def average_precision(ranks: Ranks, positives: Counts) -> Scores:
    """Area under the precision-recall curve by the trapezoid rule, from before to each positive."""
    before = np.arange(ranks.shape[1])
    precision_before = np.where(ranks == 0, 1, before / np.maximum(ranks, 1))
    mean = (precision_before + (before + 1) / (ranks + 1.0)) / 2
    return np.sum(mean, axis=1) / np.maximum(positives, 1)


def mean_precision_at(k: int) -> Metric:
    """Precision among the K nearest items, or up to the last positive if all are among these."""

    # The code of Revisited Oxford and Paris (Radenović et al., CVPR 2018) takes its mean as mP@K.
    def score(ranks: Ranks, positives: Counts) -> Scores:
        last = np.take_along_axis(ranks, np.maximum(positives - 1, 0)[:, None], axis=1)
        listed = np.minimum(last + 1, k)
        return np.sum(ranks < listed, axis=1) / listed[:, 0]

    return Metric(ALL, score)
