"""How embeddings agree with a known hierarchy: loops over all pairs."""

import itertools

import numpy as np
import pytest
from scipy.stats import spearmanr

from hypjax.analysis import hierarchy
from hypjax.data.groupings import CLASS, Grouping
from hypjax.geometry import Sphere

# Two images of each product, two products of each coarse class, two of these in two departments.
CLASSES = np.arange(16) // 2
LEVELS = {CLASS: CLASSES, "coarse class": CLASSES // 2, "department": CLASSES // 4}


def grouping(labels):
    return Grouping(labels, [f"group {i}" for i in range(labels.max() + 1)])


GROUPINGS = {name: grouping(labels) for name, labels in LEVELS.items()}


def test_levels_are_nested():
    crossing, constant = np.arange(16) // 2 % 2, np.zeros(16, int)
    shown = {**GROUPINGS, "crossing": grouping(crossing), "constant": grouping(constant)}
    assert list(hierarchy.nested_levels(shown)) == list(LEVELS)


def test_rank_correlations_agree_with_a_loop_over_all_pairs():
    rng = np.random.default_rng(0)
    order = rng.permutation(16)
    levels = [labels[order] for labels in LEVELS.values()]
    tree = sum(level[:, None] != level for level in levels)
    perfect = hierarchy.rank_correlations(np.exp(tree), levels)
    assert [*perfect.values()] == pytest.approx([1, 1])
    points = rng.normal(size=(16, 3))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    pairs = [(distances[i, j], tree[i, j]) for i, j in itertools.combinations(range(16), 2)]
    correlations = hierarchy.rank_correlations(distances, levels)
    for name, least in (("all_pairs", 0), ("different_classes", 1)):
        chosen = [(distance, apart) for distance, apart in pairs if apart >= least]
        expected = spearmanr(*zip(*chosen, strict=True)).statistic
        assert correlations[name] == pytest.approx(expected, abs=1e-12)
    equal = hierarchy.rank_correlations(np.ones((16, 16)), levels)
    assert np.isnan([*equal.values()]).all()


def test_wrong_first_hits_agree_with_a_loop():
    rng = np.random.default_rng(1)
    points = np.asarray(Sphere().embed(rng.normal(size=(17, 3))))
    of_class = np.append(CLASSES, 8)  # A class of one image is not queried.
    coarse = np.append(LEVELS["coarse class"], 0)
    groupings = {CLASS: grouping(of_class), "coarse class": grouping(coarse)}
    actual = hierarchy.wrong_first_hits(points, Sphere(), groupings)
    shares, chances = [], []
    for i in range(16):
        others = [j for j in range(17) if j != i]
        hit = max(others, key=lambda j: points[i] @ points[j])
        if of_class[hit] != of_class[i]:
            wrong = [j for j in others if of_class[j] != of_class[i]]
            shares.append(coarse[hit] == coarse[i])
            chances.append(np.mean([coarse[j] == coarse[i] for j in wrong]))
    means = {"share": np.mean(shares), "chance": np.mean(chances)}
    assert actual == {"queries": 16, "wrong": len(shares), "coarse class": pytest.approx(means)}
