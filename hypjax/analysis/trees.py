"""Trees over points, by proxies as ancestors or by average linkage, and scores of any tree.

Sources: Kim et al., "HIER" (CVPR 2023), for proxies as ancestors; Heller and Ghahramani, "Bayesian
Hierarchical Clustering" (ICML 2005), for dendrogram purity.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

# Radii that differ by less, relatively, are equal: clipped features' radii differ by roundings.
_TOLERANCE = 1e-5

Labels = Int[ArrayLike, " leaves"]
Radii = Float[ArrayLike, "*#b"]  # Distances from the origin.
Distances = Float[np.ndarray, "n n"]
Heights = Float[np.ndarray, " nodes"]  # Mean distances at which clusters merge; 0 for leaves.


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """A rooted tree whose inner nodes have any number of children, at least one."""

    parents: Int[np.ndarray, " nodes"]  # −1 for the one root.
    leaves: int  # Their number; they are the first nodes.

    @functools.cached_property
    def depths(self) -> Int[np.ndarray, " nodes"]:
        """Number of edges between each node and the root."""
        depths, above = np.zeros(len(self.parents), int), self.parents
        while (inside := above >= 0).any():
            depths += inside
            above = np.where(inside, self.parents[above], -1)
        return depths

    @functools.cached_property
    def _levels(self) -> list[Int[np.ndarray, " level"]]:
        """Nodes of each depth, the root first."""
        order = np.argsort(self.depths, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.depths))[:-1])

    @functools.cached_property
    def sizes(self) -> Int[np.ndarray, " nodes"]:
        """Number of leaves of each node: those beneath it, or itself."""
        return self.sums(np.arange(len(self.parents)) < self.leaves).astype(int)

    def sums(self, values: Float[ArrayLike, "nodes ..."]) -> Float[np.ndarray, "nodes ..."]:
        """Sum of the values of each node and of all nodes beneath it."""
        sums = np.array(values, np.float64)
        for level in self._levels[:0:-1]:
            np.add.at(sums, self.parents[level], sums[level])
        return sums

    def starts(self, order: Float[ArrayLike, " nodes"] | None = None) -> Int[np.ndarray, " nodes"]:
        """Number of leaves left of each node's, in a row; siblings by order, then by index."""
        parents, sizes = self.parents, self.sizes
        order = np.zeros(len(parents)) if order is None else np.asarray(order)
        starts = np.zeros(len(parents), int)
        for level in self._levels[1:]:
            level = level[np.lexsort((level, order[level], parents[level]))]
            before = np.cumsum(sizes[level]) - sizes[level]
            _, eldest, family = np.unique(parents[level], return_index=True, return_inverse=True)
            starts[level] = starts[parents[level]] + before - before[eldest[family]]
        return starts

    def sorted_starts(self, values: Float[ArrayLike, " leaves"]) -> Int[np.ndarray, " nodes"]:
        """The `starts` with siblings in the order of their leaves' mean values."""
        of_leaves = np.pad(values, (0, len(self.parents) - self.leaves))
        return self.starts(self.sums(of_leaves) / self.sizes)

    def counts(self, labels: Labels) -> Iterator[Int[np.ndarray, " nodes"]]:
        """Yields, for each label in order, how many leaves of each node have it."""
        labels, starts = np.asarray(labels), self.starts()
        ends = starts + self.sizes
        for label in np.unique(labels):
            positions = np.sort(starts[: self.leaves][labels == label])
            yield np.searchsorted(positions, ends) - np.searchsorted(positions, starts)

    def met(self, counts: Int[np.ndarray, " nodes"]) -> Float[np.ndarray, " nodes"]:
        """Number of pairs of counted leaves whose lowest common ancestor is each node."""
        pairs = counts * (counts - 1) / 2
        child = self.parents >= 0
        of_children = np.bincount(self.parents[child], pairs[child], len(pairs))
        return np.where(np.arange(len(pairs)) < self.leaves, 0, pairs - of_children)


def purity(tree: Tree, labels: Labels) -> float:
    """Dendrogram purity (Heller and Ghahramani, 2005), exact for any number of children.

    Mean over all pairs of leaves with equal labels: the share of leaves beneath the pair's lowest
    common ancestor that have this label. It is 1 if each label is a subtree, NaN if all differ.
    """
    pairs = shares = 0.0
    for counts in tree.counts(labels):
        met = tree.met(counts)
        pairs += np.sum(met)
        shares += np.sum(met * counts / tree.sizes)
    return float(shares / pairs) if pairs else np.nan


def chance_purity(tree: Tree, labels: Labels) -> float:
    """Mean purity of the tree over all permutations of its leaves' labels.

    A pair of one label, of n_c leaves, is then any pair of the n leaves; of the other s − 2 leaves
    beneath its ancestor, the share (n_c − 2)/(n − 2) is expected to have that label. NaN if all
    labels differ.
    """
    n, sizes = tree.leaves, tree.sizes
    _, numbers = np.unique(labels, return_counts=True)
    weights = numbers * (numbers - 1) / 2
    if not weights.any():
        return np.nan
    others = np.average((numbers - 2) / max(n - 2, 1), weights=weights)
    met = tree.met(sizes)
    return float(np.sum(met * (2 + (sizes - 2) * others) / sizes) / np.sum(met))


def separation(tree: Tree, labels: Labels, groups: Labels) -> tuple[float, float]:
    """Compares distances in the tree with groups, over all pairs of leaves with different labels.

    The distance of two leaves is the number of leaves of their lowest common ancestor: it needs no
    lengths of edges, so it suits trees of any kind.

    Returns:
        The probability that two leaves of one group are nearer to each other than two leaves of
        different groups, where equal distances count half: 0.5 by chance. And Spearman's
        correlation of the distance of two leaves and whether their groups differ: 0 by chance; its
        largest possible value is small where few pairs are of one group. Both are NaN if all pairs
        are of one group, or none is; the correlation also if all distances are equal.
    """
    together = np.unique(np.stack([labels, groups]), axis=1, return_inverse=True)[1].reshape(-1)
    all_pairs, of_label, of_group, of_both = (
        sum(map(tree.met, tree.counts(partition)))
        for partition in (np.zeros(tree.leaves, int), labels, groups, together)
    )
    distances, rank = np.unique(tree.sizes, return_inverse=True)
    near, far = (
        np.bincount(rank, pairs, len(distances))
        for pairs in (of_group - of_both, all_pairs - of_label - of_group + of_both)
    )
    if not near.any() or not far.any():
        return np.nan, np.nan
    pairs, share = near + far, far.sum() / (near.sum() + far.sum())
    nearer = np.sum(far * (np.cumsum(near) - near / 2)) / (near.sum() * far.sum())
    ranks = np.cumsum(pairs) - pairs / 2
    ranks -= np.average(ranks, weights=pairs)
    variance = np.average(ranks**2, weights=pairs) * share * (1 - share)
    correlation = np.sum(far * ranks) / pairs.sum() / variance**0.5 if variance else np.nan
    return float(nearer), float(correlation)


def farther_in(radii: Radii, others: Radii) -> Bool[np.ndarray, "*b"]:
    """Whether radii are smaller than others, by more than a relative 1e-5; elementwise."""
    return np.asarray(radii) < (1 - _TOLERANCE) * np.asarray(others)


def ancestors(
    distances: Float[ArrayLike, "n p"], radii: Radii, proxy_radii: Radii
) -> Int[np.ndarray, " n"]:
    """Index of each point's nearest proxy `farther_in`, the first of equals; −1 without any."""
    closer = farther_in(proxy_radii, np.asarray(radii)[:, None])
    nearest = np.argmin(np.where(closer, distances, np.inf), axis=1)
    return np.where(closer.any(axis=1), nearest, -1)


def ancestor_tree(
    of_samples: Int[np.ndarray, " n"], of_proxies: Int[np.ndarray, " p"]
) -> tuple[Tree, Int[np.ndarray, " used"]]:
    """The tree of samples, the proxies above any of them (also returned), and the origin as root.

    Arguments are the proxy above each sample and above each proxy, −1 for the origin.
    """
    in_tree, above, n = np.zeros(len(of_proxies), bool), of_samples, len(of_samples)
    while not in_tree[above := np.unique(above[above >= 0])].all():
        in_tree[above] = True
        above = of_proxies[above]
    used = np.flatnonzero(in_tree)
    nodes = np.full(len(of_proxies) + 1, n + len(used))  # −1 indexes the last, the origin.
    nodes[used] = n + np.arange(len(used))
    return Tree(np.concatenate([nodes[of_samples], nodes[of_proxies[used]], [-1]]), n), used


def average_linkage(distances: Distances) -> tuple[Tree, Heights]:
    """The binary tree that repeatedly merges the two clusters of least mean distance."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    merges = linkage(squareform(distances, checks=False), method="average")
    n = len(distances)
    parents = np.full(2 * n - 1, -1)
    parents[merges[:, :2].astype(int)] = np.arange(n, 2 * n - 1)[:, None]
    return Tree(parents, n), np.concatenate([np.zeros(n), merges[:, 2]])
