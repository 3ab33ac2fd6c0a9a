"""Metrics as functions of the ranks of a query's positives."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hypjax.errors import UserError
from hypjax.retrieval.tiles import NO_MATCH

FIRST, ALL = "first", "all"  # Depths: the nearest positive, and all positives.


class Metric(NamedTuple):
    """A rule that scores queries by the ranks of their positives.

    Attributes:
        depth: Which ranks it needs: that of the first positive, all, or those below a number, which
            is a function of the queries' numbers of positives.
        score: Scores [b] as a function of the ranks of positives, [b, p], ascending and filled up
            with `NO_MATCH`, and of the numbers of positives, [b].
        k: Number such that the score depends on whether the first rank is below it, or None if it
            depends on more.
    """

    depth: Literal["first", "all"] | Callable[[Int[np.ndarray, " n"]], int]
    score: Callable[[Int[np.ndarray, "b p"], Int[np.ndarray, " b"]], Float[np.ndarray, " b"]]
    k: int | None = None


def ranks_of_hits(hits: Bool[np.ndarray, "b k"]) -> Int[np.ndarray, "b p"]:
    """Ranks of the positives in lists of neighbours, filled up with `NO_MATCH`."""
    rows, ranks = np.nonzero(hits)
    counts = hits.sum(axis=1)
    found = np.full((len(hits), max(counts.max(), 1)), NO_MATCH)
    found[np.arange(found.shape[1]) < counts[:, None]] = ranks
    return found


def _precision_at_r(
    ranks: Int[np.ndarray, "b p"], positives: Int[np.ndarray, " b"]
) -> Float[np.ndarray, " b"]:
    return np.sum(ranks < positives[:, None], axis=1) / np.maximum(positives, 1)


def _average_precision_at_r(
    ranks: Int[np.ndarray, "b p"], positives: Int[np.ndarray, " b"]
) -> Float[np.ndarray, " b"]:
    precision = np.arange(1, ranks.shape[1] + 1) / (ranks + 1.0)
    within = ranks < positives[:, None]
    return np.sum(precision, axis=1, where=within) / np.maximum(positives, 1)


def _average_precision(
    ranks: Int[np.ndarray, "b p"], positives: Int[np.ndarray, " b"]
) -> Float[np.ndarray, " b"]:
    before = np.arange(ranks.shape[1])
    precision_before = np.where(ranks == 0, 1, before / np.maximum(ranks, 1))
    mean = (precision_before + (before + 1) / (ranks + 1.0)) / 2
    return np.sum(mean, axis=1) / np.maximum(positives, 1)


def _precision_at(k: int) -> Metric:
    return Metric(lambda positives: k, lambda ranks, _: np.sum(ranks < k, axis=1) / k)


def _mean_precision_at(k: int) -> Metric:
    """Precision among the K nearest items, or up to the last positive if all are among these.

    The code of Revisited Oxford and Paris (Radenović et al., CVPR 2018) takes its mean as mP@K.
    """

    def score(
        ranks: Int[np.ndarray, "b p"], positives: Int[np.ndarray, " b"]
    ) -> Float[np.ndarray, " b"]:
        last = np.take_along_axis(ranks, np.maximum(positives - 1, 0)[:, None], axis=1)
        listed = np.minimum(last + 1, k)
        return np.sum(ranks < listed, axis=1) / listed[:, 0]

    return Metric(ALL, score)


# Metrics at K, as functions of K; and metrics without a K.
AT_K: dict[str, Callable[[int], Metric]] = {
    "recall": lambda k: Metric(FIRST, lambda ranks, _: ranks[:, 0] < k, k),
    "precision": _precision_at,
    "mp": _mean_precision_at,
}
WITHOUT_K: dict[str, Metric] = {
    "mrr": Metric(FIRST, lambda ranks, _: 1 / (ranks[:, 0] + 1.0)),
    "map": Metric(ALL, _average_precision),
    "map@r": Metric(np.max, _average_precision_at_r),
    "r_precision": Metric(np.max, _precision_at_r),
}


def metric_names(metrics: Sequence[str], ks: Sequence[int]) -> list[str]:
    """Full names of metrics: one name per K for those that take a K, the plain name for others."""
    return [
        full
        for name in metrics
        for full in ([f"{name}@{k}" for k in ks] if name in AT_K else [name])
    ]


def metric(name: str) -> Metric:
    """The metric of a full name.

    Raises:
        UserError: There is none.
    """
    kind, _, number = name.partition("@")
    if name in WITHOUT_K:
        return WITHOUT_K[name]
    if kind in AT_K and number.isdecimal() and int(number):
        return AT_K[kind](int(number))
    raise UserError(
        f"unknown metric {name!r}; choose among {', '.join(f'{kind}@K' for kind in AT_K)} (with a "
        f"number for K), {', '.join(WITHOUT_K)}"
    )
