"""Means over runs and test classes, with bootstrap intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

_RESAMPLES = 4_000


class Interval(NamedTuple):
    """A mean and its 95% interval.

    Attributes:
        mean: The mean.
        low: The 2.5th percentile of the resampled means.
        high: Their 97.5th percentile.
    """

    mean: float
    low: float
    high: float


class Sums(NamedTuple):
    """Scores of some runs of one method, summed by class.

    Attributes:
        totals: Sum of the scores of each class's queries, for each run.
        counts: Number of queries of each class.
    """

    totals: Float[np.ndarray, "runs classes"]
    counts: Int[np.ndarray, " classes"]

    @classmethod
    def of(
        cls, scores: Float[np.ndarray, "runs queries"], labels: Int[np.ndarray, " queries"]
    ) -> "Sums":
        """Sums scores by label; NaN marks queries without a match, which do not count."""
        valid = ~np.isnan(scores[0])
        _, numbers, counts = np.unique(labels[valid], return_inverse=True, return_counts=True)
        return cls(np.stack([np.bincount(numbers, run[valid]) for run in scores]), counts)


def bootstrap(methods: Sequence[Sums], *, seed: int = 0) -> tuple[list[Interval], list[Interval]]:
    """Mean score of each method, and its difference from that of the first.

    Queries of one class are alike, and so are those of one run. Classes and runs are therefore what
    is drawn with replacement: the same classes for all methods, since all are tested on the same
    images, but runs separately. Percentiles of 4,000 such draws bound an interval (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, Section 13.3). Few runs give an interval
    that is too short.

    Args:
        methods: Scores of each method, on the same test classes.
        seed: Seed of the draws.

    Returns:
        The means, and the differences from the first method, each with its interval.
    """
    generator = np.random.default_rng(seed)
    counts = methods[0].counts
    classes = generator.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), _RESAMPLES)
    means, drawn = [], []
    for totals, _ in methods:
        runs = generator.multinomial(len(totals), np.full(len(totals), 1 / len(totals)), _RESAMPLES)
        of_runs = classes @ totals.T / (classes @ counts)[:, None]
        drawn.append(np.mean(runs * of_runs, axis=1))
        means.append(totals.sum() / (len(totals) * counts.sum()))
    pairs = list(zip(means, drawn, strict=True))
    differences = [_interval(mean - means[0], draws - drawn[0]) for mean, draws in pairs]
    return [_interval(*pair) for pair in pairs], differences


def _interval(mean: float, draws: Float[np.ndarray, " resamples"]) -> Interval:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(float(mean), float(low), float(high))
