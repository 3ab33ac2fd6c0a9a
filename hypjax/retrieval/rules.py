"""Rules that score queries by the ranks of their positives; `metrics` lists them by name.

A rule is a function of ranks, [b, p], and of the queries' numbers of positives, [b]. Ranks count
from 0 and ascend; rows are padded with `NO_MATCH`. A rule returns scores, [b].
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

Ranks = Int[np.ndarray, "b p"]
Counts = Int[np.ndarray, " b"]
Scores = Float[np.ndarray, " b"]
FIRST: Literal["first"] = "first"
ALL: Literal["all"] = "all"  # Depths: the nearest positive, and all positives.


class Metric(NamedTuple):
    """A rule, and which ranks the rule needs."""

    # `FIRST`, `ALL`, or a function of the numbers of positives, below whose value ranks are needed.
    depth: Literal["first", "all"] | Callable[[Counts], int]
    score: Callable[[Ranks, Counts], Scores]
    k: int | None = None  # Set if only comparing the first rank with k matters.


def precision_at_r(ranks: Ranks, positives: Counts) -> Scores:
    """Share of positives among the R nearest items, for R positives."""
    return np.sum(ranks < positives[:, None], axis=1) / np.maximum(positives, 1)


def average_precision_at_r(ranks: Ranks, positives: Counts) -> Scores:
    """Mean over the R nearest items of the precision at each positive, 0 at other items."""
    precision = np.arange(1, ranks.shape[1] + 1) / (ranks + 1.0)
    is_nearest = ranks < positives[:, None]
    return np.sum(precision, axis=1, where=is_nearest) / np.maximum(positives, 1)


def average_precision(ranks: Ranks, positives: Counts) -> Scores:
    """Area under the precision-recall curve by the trapezoid rule."""
    positives_before = np.arange(ranks.shape[1])
    precision_before = np.where(ranks == 0, 1, positives_before / np.maximum(ranks, 1))
    precision_at = (positives_before + 1) / (ranks + 1.0)
    return np.sum((precision_before + precision_at) / 2, axis=1) / np.maximum(positives, 1)


def mean_precision_at(k: int) -> Metric:
    """Precision among the K nearest items, or up to the last positive if that comes sooner."""

    # mP@K in the code of Revisited Oxford and Paris (Radenović et al., CVPR 2018).
    def score(ranks: Ranks, positives: Counts) -> Scores:
        last_rank = np.take_along_axis(ranks, np.maximum(positives - 1, 0)[:, None], axis=1)
        num_listed = np.minimum(last_rank + 1, k)
        return np.sum(ranks < num_listed, axis=1) / num_listed[:, 0]

    return Metric(ALL, score)
