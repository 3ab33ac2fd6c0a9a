"""Selection of the items with the highest scores by NumPy, for CPUs.

NumPy compares many numbers at once to partition a row, where XLA keeps a heap for each.
"""

import numpy as np
from jaxtyping import Float, Int

_CACHED_ROWS = 64  # Queries selected for at once, so that candidates fit into a CPU's cache.

# Scores and ids of k items for each query. The last one has the lowest score; the others are in any
# order.
Items = tuple[Float[np.ndarray, "b k"], Int[np.ndarray, "b k"]]


def select(
    scores: Float[np.ndarray, "b r"], maxima: Float[np.ndarray, "b groups"], first: int, k: int
) -> Items:
    """The k best items of a chunk, or all if it has fewer.

    Args:
        scores: Scores of queries and items.
        maxima: The highest score of each group of consecutive items.
        first: Id of the first item.
        k: Number of items to find.
    """
    k = min(k, scores.shape[1])
    starts = range(0, len(scores), _CACHED_ROWS)
    parts = (np.s_[start : start + _CACHED_ROWS] for start in starts)
    found = [_select(scores[part], maxima[part], k) for part in parts]
    best, items = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return best, items + np.int32(first)


def merge(best: Items, found: Items, k: int) -> Items:
    """The k best of two sets of items for each query, or all if there are fewer."""
    scores, ids = (np.concatenate(arrays, axis=1) for arrays in zip(best, found, strict=True))
    return _highest(scores, ids, min(k, scores.shape[1]))


def _select(
    scores: Float[np.ndarray, "b r"], maxima: Float[np.ndarray, "b groups"], k: int
) -> Items:
    num_groups = maxima.shape[1]
    size = scores.shape[1] // num_groups
    least = np.full((len(scores), 1), -np.inf, scores.dtype)
    if k <= num_groups:  # At least k items reach the k-th largest maximum.
        least = np.partition(maxima, num_groups - k, axis=1)[:, num_groups - k, None]
    # A score that is not a number is kept: another chunk may hold the invalid point to report.
    groups = np.flatnonzero(~(maxima < least))
    rows, own_groups = np.divmod(groups, num_groups)
    grouped = scores.reshape(-1, size).take(groups, axis=0)
    chosen = np.flatnonzero(~(grouped < least[rows]))
    group, place = np.divmod(chosen, size)
    items = own_groups[group] * size + place
    return _highest(*_rectangular(rows[group], grouped.reshape(-1)[chosen], items), k)


def _rectangular(
    rows: Int[np.ndarray, " n"], scores: Float[np.ndarray, " n"], items: Int[np.ndarray, " n"]
) -> Items:
    """Scores and items of each row in an array, padded by scores of −∞.

    Args:
        rows: Ascending numbers, in which none is missing.
        scores: Scores of items.
        items: The items.
    """
    numbers = np.bincount(rows)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    shape = len(numbers), numbers.max()
    padded = np.full(shape, -np.inf, scores.dtype), np.zeros(shape, np.int32)
    for array, values in zip(padded, (scores, items), strict=True):
        array[rows, columns] = values
    return padded


def _highest(scores: Float[np.ndarray, "b n"], ids: Int[np.ndarray, "b n"], k: int) -> Items:
    order = np.argpartition(scores, scores.shape[1] - k, axis=1)[:, ::-1][:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)
