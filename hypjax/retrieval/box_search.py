"""The search of a `BoxTree`, compiled by Numba: a heap of results, and a stack of nodes."""

import typing
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core.caching import NullCache

_FUNCTIONS: list[Any] = []  # All that are compiled.
_NO_ROW = np.iinfo(np.int64).max  # After all rows in the order of ties.


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function at its first call; keeps the program where a folder can be written."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    _FUNCTIONS.append(compiled)
    return compiled


def keep_none() -> None:
    """Compiles in memory only, where the folder of programs is full or damaged."""
    for function in _FUNCTIONS:
        function._cache = NullCache()


@_compiled
@typing.no_type_check
def search(
    queries, factors, points, item_factors, item_rows, low, high, least, separations, rows, counts
) -> None:
    """Fills in the results of all queries; see `BoxTree.search`."""
    num_leaves, _, size = points.shape
    # Of each level, one node waits at most, and two of the last.
    waiting, bounds, measured = np.empty(64, np.int64), np.empty(64), np.empty(size)
    for i in range(len(queries)):
        # A heap with the last result first, by separation and row.
        found, found_rows, factor = separations[i], rows[i], factors[i]
        found[:], found_rows[:] = np.inf, _NO_ROW
        counts[i], waiting[0], bounds[0], num_waiting = 0, 0, 0.0, 1
        while num_waiting:
            num_waiting -= 1
            node = waiting[num_waiting]
            if bounds[num_waiting] > found[0]:
                continue
            if node >= num_leaves - 1:
                leaf = node - (num_leaves - 1)
                _measure(queries[i], factor, points[leaf], item_factors[leaf], measured)
                _merge(measured, item_rows[leaf], found, found_rows)
                counts[i] += size
                continue
            near, far = 2 * node + 1, 2 * node + 2
            near_bound = _bound(queries[i], factor, low[near], high[near], least[near])
            far_bound = _bound(queries[i], factor, low[far], high[far], least[far])
            if far_bound < near_bound:
                near, far, near_bound, far_bound = far, near, far_bound, near_bound
            for child, bound in ((far, far_bound), (near, near_bound)):  # The last one is next.
                if bound <= found[0]:
                    waiting[num_waiting], bounds[num_waiting] = child, bound
                    num_waiting += 1
        _sort(found, found_rows)


@_compiled
@typing.no_type_check
def _bound(query, factor, low, high, least):
    """A lower bound on the separations of a query from the points of a node."""
    total = 0.0
    for i in range(len(query)):
        outside = max(low[i] - query[i], query[i] - high[i], 0.0)
        total += outside * outside
    return total * factor * least


@_compiled
@typing.no_type_check
def _measure(query, factor, points, item_factors, measured) -> None:
    """Computes the separations of a query from the points of a leaf."""
    measured[:] = 0.0
    for i in range(len(query)):
        for item in range(len(measured)):
            difference = query[i] - points[i, item]
            measured[item] += difference * difference
    for item in range(len(measured)):
        measured[item] = measured[item] * factor * item_factors[item]


@_compiled
@typing.no_type_check
def _merge(measured, item_rows, found, found_rows) -> None:
    """Merges the points of a leaf into the results; of padding, separations are ∞ or NaN."""
    for item in range(len(measured)):
        separation, row = measured[item], item_rows[item]
        if separation < found[0] or (separation == found[0] and row < found_rows[0]):
            _replace_first(found, found_rows, len(found), separation, row)


@_compiled
@typing.no_type_check
def _sort(found, found_rows) -> None:
    """Sorts a heap of results: the nearest first."""
    for end in range(len(found) - 1, 0, -1):
        separation, row = found[end], found_rows[end]
        found[end], found_rows[end] = found[0], found_rows[0]
        _replace_first(found, found_rows, end, separation, row)


@_compiled
@typing.no_type_check
def _replace_first(found, found_rows, size, separation, row) -> None:
    """Replaces the first result of a heap of `size` results."""
    place, child = 0, 1
    while child < size:
        other = child + 1
        if other < size and (
            found[other] > found[child]
            or (found[other] == found[child] and found_rows[other] > found_rows[child])
        ):
            child = other
        if found[child] < separation or (found[child] == separation and found_rows[child] < row):
            break
        found[place], found_rows[place] = found[child], found_rows[child]
        place, child = child, 2 * child + 1
    found[place], found_rows[place] = separation, row
