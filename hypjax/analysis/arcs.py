"""Trees in the Poincaré disk: angles for their nodes, and geodesics for their edges."""

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Complex, Float

from hypjax.analysis.trees import Tree


def sectors(
    tree: Tree, features: Float[np.ndarray, "leaves d"] | None = None
) -> Float[np.ndarray, "nodes 2"]:
    """Angles between which each node's subtree lies.

    A subtree has an angle in proportion to its leaves, within that of its parent. Sectors of
    siblings are disjoint.

    Args:
        tree: The tree.
        features: Coordinates of the leaves, by which the children of each node are ordered: those
            with similar means are neighbours. By default, children are ordered by index.

    Returns:
        First and last angle of each node, in radians from 0 to 2π.
    """
    starts = tree.starts(None if features is None else _places(tree, features))
    return np.stack([starts, starts + tree.sizes], axis=1) * (2 * np.pi / tree.leaves)


def _places(tree: Tree, features: Float[np.ndarray, "leaves d"]) -> Float[np.ndarray, " nodes"]:
    """Places of nodes among their siblings, by average linkage of the siblings' means."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    padded = np.zeros((len(tree.parents), features.shape[1]))
    padded[: tree.leaves] = features
    means = tree.sums(padded) / tree.sizes[:, None]
    places = np.zeros(len(means))
    for node in range(tree.leaves, len(means)):
        children = np.flatnonzero(tree.parents == node)
        if len(children) > 2:
            order = leaves_list(linkage(means[children], method="average"))
            places[children[order]] = np.arange(len(children))
    return places


def geodesics(
    start: Complex[ArrayLike, " edges"], end: Complex[ArrayLike, " edges"], points: int = 33
) -> Complex[np.ndarray, "edges points"]:
    """Points of the geodesics of the Poincaré disk, arcs orthogonal to the unit circle.

    The isometry z ↦ (z − p)/(1 − p̄z) takes a geodesic's start p to the origin, and the geodesic to
    a line.

    Args:
        start: One end of each, as complex numbers inside the unit circle.
        end: The other end.
        points: Number of points on each, its ends included.
    """
    start, end = np.asarray(start)[..., None], np.asarray(end)[..., None]
    moved = (end - start) / (1 - start.conj() * end) * np.linspace(0, 1, points)
    return (moved + start) / (1 + start.conj() * moved)
