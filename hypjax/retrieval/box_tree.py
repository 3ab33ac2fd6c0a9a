"""Exact search in a tree of boxes and gaps, for points near the boundary of a ball.

Near the boundary, matrix products resolve no distances, and searches without a tree subtract the
whole gallery. The triangle inequality excludes next to nothing there. The gap 1 − c‖x‖² does: it
varies by orders of magnitude, and the separation of a query x from any point of a box is at least

    distance(x, box)² / ((1 − c‖x‖²) · largest gap of a point in the box).

So a k-d tree of the ball's points, whose nodes hold a box and a gap, answers a query after a few
hundred separations. They are computed by subtraction in float64. Each bound is computed by the same
operations in the same order as separations are, and rounding is monotonic: no bound exceeds the
computed separation of a point in its box, and the results are those of measuring all points.
"""

import dataclasses
import functools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int

from hypjax.geometry import Space
from hypjax.retrieval import euclidean, inputs
from hypjax.retrieval.inputs import Nearest, Points
from hypjax.system.machine import usable_cores

LARGEST = 2**24  # Coordinates in a tree, whose construction takes up to 24 bytes for each.
_ROUNDING = 2.0**-52
_LEAF = 32  # Largest number of points in a leaf, whose separations are computed together.
_BLOCK = 512  # Queries of a thread at once; fewer take less time than threads do to start.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BoxTree:
    """A complete binary tree of points in a ball: node i has the children 2·i + 1 and 2·i + 2.

    Attributes:
        space: The space of the points: a ball, or isometric to one.
        rows: Row in the gallery of each point of a leaf; padding repeats rows.
        points: Points in the ball, as columns: one subtraction serves a whole leaf.
        factors: 1 / gap of each point; ∞ for padding.
        low: Smallest coordinates in each node.
        high: Largest coordinates in each node.
        least: Smallest factor in each node.
    """

    space: Space
    rows: Int[np.ndarray, "leaves size"]
    points: Float[np.ndarray, "leaves d size"]
    factors: Float64[np.ndarray, "leaves size"]
    low: Float64[np.ndarray, "nodes d"]
    high: Float64[np.ndarray, "nodes d"]
    least: Float64[np.ndarray, " nodes"]

    @classmethod
    def build(cls, points: Points, space: Space) -> "BoxTree":
        """Builds the tree of at least one point, in O(n·log n) time."""
        in_ball = euclidean.in_ball(np.asarray(points, np.float32), space)
        num_leaves = 1 << max((-(-len(in_ball) // _LEAF) - 1).bit_length(), 0)
        padding = -len(in_ball) % num_leaves
        # Copies of points, so that boxes stay as they are; from everywhere, so that no leaf fills.
        rows = np.arange(len(in_ball))
        rows = np.append(rows, np.linspace(0, len(in_ball) - 1, padding).astype(int))
        factors = euclidean.separation_factors(in_ball, space)
        order = _order(in_ball[rows], factors[rows], num_leaves)
        leaf_points = np.ascontiguousarray(in_ball[rows[order]].swapaxes(1, 2))
        # Each sum has the same order, so that copies of a point have equal factors.
        norms = np.square(leaf_points, dtype=np.float64).sum(axis=1)
        # Points of other spaces may be rounded to the boundary.
        factors = 1 / np.maximum(1 - euclidean.curvature(space) * norms, _ROUNDING)
        factors[order >= len(in_ball)] = np.inf
        return cls(
            space,
            rows[order],
            leaf_points,
            factors,
            _of_nodes(np.minimum, leaf_points.min(axis=2)),
            _of_nodes(np.maximum, leaf_points.max(axis=2)),
            _of_nodes(np.minimum, factors.min(axis=1)),
        )

    def search(self, queries: Points, k: int) -> tuple[Nearest, Int[np.ndarray, " n"]]:
        """Finds the k nearest points of each query, at most as many as there are points.

        Returns separations in the ball, float64, and rows, both [n, k], nearest first and ties by
        row; and the number of separations that each query took.
        """
        from hypjax.retrieval import box_search  # Numba may be missing, and takes long to import.

        in_ball = euclidean.in_ball(np.asarray(queries, np.float32), self.space)
        in_ball = in_ball.astype(np.float64)
        factors = euclidean.separation_factors(in_ball, self.space)
        separations = np.empty((len(queries), k))
        rows, counts = np.empty((len(queries), k), int), np.empty(len(queries), int)
        tree = self.points, self.factors, self.rows, self.low, self.high, self.least

        def search_block(block: slice) -> None:
            results = separations[block], rows[block], counts[block]
            try:
                box_search.search(in_ball[block], factors[block], *tree, *results)
            except (OSError, EOFError, pickle.UnpicklingError):  # No folder for programs works.
                box_search.keep_none()
                box_search.search(in_ball[block], factors[block], *tree, *results)

        blocks = inputs.blocks(len(queries), _BLOCK)
        with ThreadPoolExecutor(usable_cores()) as pool:
            # For a single block, a thread would take longer to start.
            list((pool.map if len(blocks) > 1 else map)(search_block, blocks))
        return (separations, rows), counts

    def cost(self, queries: Points, k: int) -> float:
        """Mean number of separations that a search takes."""
        return float(self.search(queries, k)[1].mean())

    def least_separations(
        self, queries: Points, separations: Float64[np.ndarray, " n"]
    ) -> Float64[np.ndarray, " n"]:
        """Lower bounds in the space itself for points with these separations from queries or more.

        Points that were mapped into the ball are off by some roundings of their lengths, and their
        gaps by as much: near the boundary, this is much.
        """
        in_ball = euclidean.in_ball(np.asarray(queries, np.float32), self.space)
        factors = np.maximum(euclidean.separation_factors(in_ball, self.space), 1)
        largest = self.factors[np.isfinite(self.factors)].max()
        reach = np.linalg.norm(np.maximum(np.abs(self.low[0]), np.abs(self.high[0])))
        lengths = np.maximum(reach, np.linalg.norm(in_ball, axis=1))
        rounding = 2 * (16 + in_ball.shape[1]) * _ROUNDING
        roots = np.sqrt(separations) * (1 - rounding * (factors + largest))
        return np.square(np.maximum(roots - rounding * lengths * np.sqrt(factors * largest), 0))


@functools.cache
def can_search() -> bool:
    """Whether Numba, which compiles searches, can be imported."""
    try:
        from hypjax.retrieval import box_search  # noqa: F401
    except ImportError:  # It is missing, or does not fit NumPy's version.
        return False
    return True


def _order(
    points: Points, factors: Float64[np.ndarray, " n"], num_leaves: int
) -> Int[np.ndarray, "leaves size"]:
    """The points of each leaf: all are halved again and again, across their longest side."""
    # A side is as long as the hyperbolic distance along it, in the middle of its gaps.
    coordinates = np.concatenate([points, np.log(factors)[:, None]], axis=1, dtype=np.float64)
    order = np.arange(len(points)).reshape(1, -1)
    while len(order) < num_leaves:
        nodes = coordinates[order]
        low, high = nodes.min(axis=1), nodes.max(axis=1)
        sides = high - low
        sides[:, :-1] *= np.exp((low[:, -1:] + high[:, -1:]) / 2)
        longest = sides.argmax(axis=1)[:, None, None]
        keys = np.take_along_axis(nodes, longest, axis=2)[:, :, 0]
        halves = np.argpartition(keys, keys.shape[1] // 2 - 1, axis=1)
        order = np.take_along_axis(order, halves, axis=1).reshape(2 * len(order), -1)
    return order


def _of_nodes(merge: Callable[..., Any], leaves: np.ndarray) -> np.ndarray:
    """What holds for each node, from what holds for leaves and how it is merged; root first."""
    levels = [leaves.astype(np.float64)]
    while len(levels[0]) > 1:
        levels.insert(0, merge(levels[0][::2], levels[0][1::2]))
    return np.concatenate(levels)
