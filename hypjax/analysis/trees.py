"""Trees over points, from proxies as ancestors or from average linkage, and scores of trees.

Sources: Kim et al., "HIER" (CVPR 2023), for proxies as ancestors; Heller and Ghahramani, "Bayesian
Hierarchical Clustering" (ICML 2005), for dendrogram purity.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

# Radii with a smaller relative difference are equal: radii of clipped features differ by roundings.
_TOLERANCE = 1e-5

Labels = Int[ArrayLike, " leaves"]
Radii = Float[np.ndarray, "*#b"]  # Distances from the origin.
Distances = Float[np.ndarray, "n n"]
Heights = Float[np.ndarray, " nodes"]  # Mean distances at which clusters merge; 0 for leaves.


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """A rooted tree whose inner nodes have any number of children, at least one."""

    parents: Int[np.ndarray, " nodes"]  # −1 for the one root.
    leaves: int  # Number of leaves, which are the first nodes.

    @functools.cached_property
    def depths(self) -> Int[np.ndarray, " nodes"]:
        """Number of edges between each node and the root."""
        depths, ancestors = np.zeros(len(self.parents), int), self.parents
        while (ancestors >= 0).any():
            depths += ancestors >= 0
            ancestors = np.where(ancestors >= 0, self.parents[ancestors], -1)
        return depths

    @functools.cached_property
    def _levels(self) -> list[Int[np.ndarray, " level"]]:
        """Nodes of each depth, the root first."""
        order = np.argsort(self.depths, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.depths))[:-1])

    @functools.cached_property
    def sizes(self) -> Int[np.ndarray, " nodes"]:
        """Number of leaves beneath each node; 1 for a leaf."""
        return self.sums(np.arange(len(self.parents)) < self.leaves).astype(int)

    def sums(self, values: Float[ArrayLike, "nodes ..."]) -> Float[np.ndarray, "nodes ..."]:
        """Sum of the values of each node and of all nodes beneath it."""
        sums = np.array(values, np.float64)
        for level in self._levels[:0:-1]:  # The deepest first, without the root.
            np.add.at(sums, self.parents[level], sums[level])
        return sums

    def starts(self, order: Float[ArrayLike, " leaves"] | None = None) -> Int[np.ndarray, " nodes"]:
        """Position of each node's first leaf when all leaves stand in a row.

        Siblings are sorted by the mean `order` of their leaves, if given, then by index.
        """
        parents, sizes = self.parents, self.sizes
        order = np.zeros(self.leaves) if order is None else order
        means = self.sums(np.pad(order, (0, len(parents) - self.leaves))) / sizes
        starts = np.zeros(len(parents), int)
        for level in self._levels[1:]:
            level = level[np.lexsort((level, means[level], parents[level]))]
            before = np.cumsum(sizes[level]) - sizes[level]
            _, eldest, family = np.unique(parents[level], return_index=True, return_inverse=True)
            starts[level] = starts[parents[level]] + before - before[eldest[family]]
        return starts

    def counts(self, labels: Labels) -> Iterator[Int[np.ndarray, " nodes"]]:
        """Yields, for each label in order, the number of its leaves beneath each node."""
        labels, starts = np.asarray(labels), self.starts()
        ends = starts + self.sizes
        for label in np.unique(labels):
            positions = np.sort(starts[: self.leaves][labels == label])
            yield np.searchsorted(positions, ends) - np.searchsorted(positions, starts)

    def pairs_below(self, counts: Int[np.ndarray, " nodes"]) -> Float[np.ndarray, " nodes"]:
        """Number of pairs of counted leaves that have each node as lowest common ancestor.

        `counts` holds the number of counted leaves beneath each node.
        """
        pairs = counts * (counts - 1) / 2
        child = self.parents >= 0
        in_one_child = np.bincount(self.parents[child], pairs[child], len(pairs))
        return np.where(np.arange(len(pairs)) < self.leaves, 0, pairs - in_one_child)


def purity(tree: Tree, labels: Labels) -> float:
    """Dendrogram purity (Heller and Ghahramani, 2005), exact for any number of children.

    The purity is a mean over all pairs of leaves with one label: the share of this label among the
    leaves beneath the pair's lowest common ancestor. The purity is 1 if each label is a subtree,
    and NaN if no two leaves have one label.
    """
    num_pairs = shares = 0.0
    for counts in tree.counts(labels):
        pairs = tree.pairs_below(counts)
        num_pairs += np.sum(pairs)
        shares += np.sum(pairs * counts / tree.sizes)
    return float(shares / num_pairs) if num_pairs else np.nan


def chance_purity(tree: Tree, labels: Labels) -> float:
    """Mean purity of the tree over all permutations of its leaves' labels.

    A permutation moves two leaves with the same label to any two of the n leaves. Let n_c leaves
    have this label, and s leaves lie beneath the ancestor of the two. Of the other s − 2, the
    expected share (n_c − 2)/(n − 2) has the label. NaN if no two leaves have the same label.
    """
    n, sizes = tree.leaves, tree.sizes
    _, label_counts = np.unique(labels, return_counts=True)
    weights = label_counts * (label_counts - 1) / 2
    if not weights.any():
        return np.nan
    share_of_others = np.average((label_counts - 2) / max(n - 2, 1), weights=weights)
    pairs = tree.pairs_below(sizes)
    return float(np.sum(pairs * (2 + (sizes - 2) * share_of_others) / sizes) / np.sum(pairs))


def separation(tree: Tree, labels: Labels, groups: Labels) -> tuple[float, float]:
    """Compares distances in a tree with groups, over all pairs of leaves with different labels.

    The distance of two leaves is the number of leaves beneath their lowest common ancestor. This
    distance needs no lengths of edges, so any kinds of trees are comparable.

    Returns:
        First, the probability that two leaves of one group are nearer to each other than two leaves
        of different groups, where equal distances count half: 0.5 by chance. Second, Spearman's
        correlation of the distance of two leaves with whether their groups differ: 0 by chance, and
        never large where few pairs are of one group. Both are NaN if all pairs are of one group, or
        none is; the correlation also if all distances are equal.
    """
    # Pairs by lowest common ancestor: all, of one label, of one group, and of one label and group.
    joint = np.unique(np.stack([labels, groups]), axis=1, return_inverse=True)[1].reshape(-1)
    all_pairs, same_label, same_group, same_both = (
        sum(map(tree.pairs_below, tree.counts(partition)))
        for partition in (np.zeros(tree.leaves, int), labels, groups, joint)
    )
    # Histograms of the pairs' distances, within groups and between groups.
    distances, rank = np.unique(tree.sizes, return_inverse=True)
    within = np.bincount(rank, same_group - same_both, len(distances))
    between = np.bincount(rank, all_pairs - same_label - same_group + same_both, len(distances))
    if not within.any() or not between.any():
        return np.nan, np.nan
    nearer = np.sum(between * (np.cumsum(within) - within / 2)) / (within.sum() * between.sum())
    pairs, share = within + between, between.sum() / (within.sum() + between.sum())
    ranks = np.cumsum(pairs) - pairs / 2
    ranks -= np.average(ranks, weights=pairs)
    variance = np.average(ranks**2, weights=pairs) * share * (1 - share)
    correlation = np.sum(between * ranks) / pairs.sum() / variance**0.5 if variance else np.nan
    return float(nearer), float(correlation)


def farther_in(radii: Radii, others: Radii) -> Bool[np.ndarray, "*b"]:
    """Whether radii are smaller than other radii by more than a relative 1e-5; elementwise."""
    return radii < (1 - _TOLERANCE) * others


def ancestors(
    distances: Float[ArrayLike, "n p"], radii: Radii, proxy_radii: Radii
) -> Int[np.ndarray, " n"]:
    """Finds each point's parent: the nearest proxy that is closer to the origin than the point.

    Returns indices of proxies, the first of equally near proxies; −1 if no proxy is closer.
    """
    closer = farther_in(proxy_radii, radii[:, None])
    return np.where(closer.any(axis=1), np.argmin(np.where(closer, distances, np.inf), axis=1), -1)


def ancestor_tree(
    sample_parents: Int[np.ndarray, " n"], proxy_parents: Int[np.ndarray, " p"]
) -> tuple[Tree, Int[np.ndarray, " used"]]:
    """Builds the tree of samples beneath proxies, with the origin as root.

    Arguments hold the proxy above each sample and above each proxy, −1 for the origin. Also returns
    the indices of the proxies in the tree, the ancestors of samples.
    """
    n = len(sample_parents)
    in_tree = np.zeros(len(proxy_parents), bool)
    level = np.unique(sample_parents[sample_parents >= 0])
    while not in_tree[level].all():
        in_tree[level] = True
        parents = proxy_parents[level]
        level = np.unique(parents[parents >= 0])
    used = np.flatnonzero(in_tree)
    nodes = np.full(len(proxy_parents) + 1, n + len(used))  # −1 indexes the last, the origin.
    nodes[used] = n + np.arange(len(used))
    return Tree(np.concatenate([nodes[sample_parents], nodes[proxy_parents[used]], [-1]]), n), used


def average_linkage(distances: Distances) -> tuple[Tree, Heights]:
    """Builds the binary tree that repeatedly merges the two clusters of least mean distance."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    merges = linkage(squareform(distances, checks=False), method="average")
    n = len(distances)
    parents = np.full(2 * n - 1, -1)
    parents[merges[:, :2].astype(int)] = np.arange(n, 2 * n - 1)[:, None]
    return Tree(parents, n), np.concatenate([np.zeros(n), merges[:, 2]])
