"""Trees: scores against loops over all pairs, ancestors against a loop, and geodesics."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis.extra import numpy as hnp
from scipy.stats import spearmanr

from hypjax.analysis.disk import geodesics
from hypjax.analysis.trees import (
    Tree,
    ancestor_tree,
    ancestors,
    average_linkage,
    chance_purity,
    purity,
    separation,
)


@st.composite
def trees(draw, most=9):
    """Random trees with any number of children, also one; inner nodes in any order."""
    count = draw(st.integers(3, 2 * most))
    parents = [draw(st.integers(node + 1, count - 1)) for node in range(count - 1)]
    order = sorted(draw(st.permutations(range(count))), key=lambda node: node in parents)
    leaves = count - len(set(parents))
    assume(2 <= leaves <= most)
    sorted_parents = np.full(count, -1)
    sorted_parents[np.argsort(order)[:-1]] = np.argsort(order)[parents]
    return Tree(sorted_parents, leaves)


LABELS = hnp.arrays(int, 9, elements=st.integers(0, 3))


def leaves_beneath(tree):
    """The leaves beneath each node, from the paths of the leaves to the root."""
    leaves = [set() for _ in tree.parents]
    for leaf in range(tree.leaves):
        node = leaf
        while node >= 0:
            leaves[node].add(leaf)
            node = tree.parents[node]
    return leaves


def common(below, i, j):
    """The leaves of the lowest common ancestor of two leaves."""
    return min((leaves for leaves in below if {i, j} <= leaves), key=len)


@given(trees(), LABELS)
def test_purity_is_the_mean_over_all_pairs(tree, labels):
    below = leaves_beneath(tree)
    shares = [
        np.mean([labels[k] == labels[i] for k in common(below, i, j)])
        for i, j in itertools.combinations(range(tree.leaves), 2)
        if labels[i] == labels[j]
    ]
    mean = np.mean(shares) if shares else np.nan
    np.testing.assert_allclose(purity(tree, labels[: tree.leaves]), mean, rtol=1e-12)


@given(trees(most=5), LABELS)
@settings(max_examples=20)
def test_chance_is_the_mean_over_all_permutations(tree, labels):
    labels = labels[: tree.leaves]
    mean = np.mean([purity(tree, np.array(p)) for p in itertools.permutations(labels)])
    np.testing.assert_allclose(chance_purity(tree, labels), mean, rtol=1e-12)


@given(trees(), LABELS, LABELS)
def test_separation_agrees_with_a_loop_over_all_pairs(tree, labels, groups):
    below = leaves_beneath(tree)
    pairs = [
        (len(common(below, i, j)), groups[i] != groups[j])
        for i, j in itertools.combinations(range(tree.leaves), 2)
        if labels[i] != labels[j]
    ]
    near, far = ([size for size, apart in pairs if apart == wanted] for wanted in (False, True))
    expected = [np.nan, np.nan]
    if near and far:
        expected[0] = np.mean([(a < b) + (a == b) / 2 for a in near for b in far])
        if len({size for size, _ in pairs}) > 1:
            expected[1] = spearmanr(*zip(*pairs, strict=True)).statistic
    actual = separation(tree, labels[: tree.leaves], groups[: tree.leaves])
    np.testing.assert_allclose(actual, expected, atol=1e-12)


@given(hnp.arrays(int, (12, 2), elements=st.integers(-3, 3)))
def test_ancestors_agree_with_a_loop(points):
    """Small integer coordinates give many equal radii, equal distances and duplicates."""
    proxies = points[5:]

    def above(point):
        """Indices of proxies, nearest first, that are closer to the origin."""
        closer = [i for i, p in enumerate(proxies) if p @ p < point @ point]
        return sorted(closer, key=lambda i: (np.sum((proxies[i] - point) ** 2), i))

    distances = np.linalg.norm(points[:, None] - proxies, axis=-1)
    radii = np.linalg.norm(points, axis=1)
    parents = ancestors(distances, radii, radii[5:])
    assert parents.tolist() == [above(point)[0] if above(point) else -1 for point in points]
    tree, used = ancestor_tree(parents[:5], parents[5:])
    covering = set()
    for leaf in range(5):
        node, proxy = tree.parents[leaf], parents[leaf]
        while proxy >= 0:  # The same path, by proxies and by nodes.
            assert used[node - 5] == proxy
            covering.add(proxy)
            node, proxy = tree.parents[node], parents[5 + proxy]
        assert tree.parents[node] == -1 and node == len(tree.parents) - 1
    assert used.tolist() == sorted(covering) and tree.leaves == 5


def test_rounded_radii_count_as_equal():
    distances = np.array([[0.0, 0.1, 0.5], [0.1, 0.0, 0.4], [0.5, 0.4, 0.0]])
    radii = np.array([2.0, 2.000001, 1.0])
    assert ancestors(distances, radii, radii).tolist() == [2, 2, -1]


def test_average_linkage_merges_clusters_at_their_mean_distance():
    points = np.random.default_rng(0).normal(size=(8, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    tree, heights = average_linkage(distances)
    below = [sorted(leaves) for leaves in leaves_beneath(tree)]
    for node in range(8, 15):
        left, right = (below[child] for child in np.flatnonzero(tree.parents == node))
        assert heights[node] == pytest.approx(distances[np.ix_(left, right)].mean())
    assert heights[:8].tolist() == [0] * 8 and heights.tolist() == sorted(heights)


POINT = st.builds(
    lambda r, angle: r * np.exp(1j * angle), st.floats(0, 0.999), st.floats(-math.pi, math.pi)
)


@given(POINT, POINT)
def test_geodesics_are_arcs_orthogonal_to_the_boundary(start, end):
    (arc,) = geodesics(np.array([start]), np.array([end]))
    assert np.all(np.abs(arc) < 1)
    np.testing.assert_allclose(arc[[0, -1]], [start, end], atol=1e-9)
    # A circle |z − m|² = R² that is orthogonal to the unit circle has |m|² = 1 + R², and so
    # |z|² + 1 = 2 Re(m̄z) for its points: for some m, or the line Re(m̄z) = 0, after scaling.
    rows = np.stack([arc.real, arc.imag, -(np.abs(arc) ** 2 + 1) / 2], axis=1)
    assert np.linalg.svd(rows, compute_uv=False)[-1] < 1e-9
