"""Scores of queries in one number: means, by class, and intervals."""

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from hypjax.errors import UserError


def mean_score(scores: Float[np.ndarray, " n"]) -> float:
    """Mean of scores [n] over the queries that have a match; NaN marks the others."""
    return float(np.nanmean(scores))


def scores_by_class(
    scores: Float[np.ndarray, " n"], labels: Shaped[ArrayLike, " n"]
) -> dict[int, float]:
    """Mean score of each class, without queries that have no match.

    Args:
        scores: Scores of the queries, [n]; NaN for queries without a match.
        labels: Class numbers or names of the queries, [n].

    Returns:
        {class: mean score}, without classes that have no match.
    """
    labels = np.asarray(labels)
    kept = ~np.isnan(scores)
    classes, indices = np.unique(labels[kept], return_inverse=True)
    means = np.bincount(indices, scores[kept]) / np.bincount(indices)
    return dict(zip(classes.tolist(), means.tolist(), strict=True))


def bootstrap_interval(
    scores: Float[np.ndarray, " n"],
    *,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean score over queries (Efron, 1979).

    It shows how much the mean depends on the choice of queries, not how much it varies between
    training runs.

    Args:
        scores: Scores of the queries, [n]; NaN for queries without a match.
        confidence: Share of the resampled means that the interval contains.
        num_resamples: Number of resamples.
        seed: Random seed of the resamples.

    Returns:
        (low, high), the ends of the interval.

    Raises:
        UserError: No query has a match.
    """
    scores = scores[~np.isnan(scores)]
    if not len(scores):
        raise UserError("there are no scores to resample: no query has a match")
    rng = np.random.default_rng(seed)
    means = [rng.choice(scores, len(scores)).mean() for _ in range(num_resamples)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
