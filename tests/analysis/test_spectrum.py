"""How embeddings spread: components and similarities against brute force, and the report."""

import itertools

import jax
import numpy as np
import pytest

from hypjax.analysis.spectrum import measure_spread
from hypjax.geometry import PoincareBall, Sphere

LABELS = np.array([0, 1, 0, 2, 1, 0, 2, 2, 3])


@pytest.mark.parametrize("space", [Sphere(), PoincareBall(0.1, 2.3)], ids=["sphere", "ball"])
def test_numbers_are_those_of_loops(space):
    features = np.random.default_rng(0).normal(size=(9, 4)).astype("f") + 0.5
    points = np.asarray(space.embed(features))
    spread = measure_spread(points, LABELS, space)
    kept = np.asarray(space.features(points.astype(float)))
    variances = np.linalg.svd(kept - kept.mean(axis=0), compute_uv=False) ** 2
    shares = np.cumsum(variances) / variances.sum()
    np.testing.assert_allclose(spread["cumulative_energy"], shares, rtol=1e-5)
    fewest = {f"{share:.0%}": 1 + sum(shares < share) for share in (0.9, 0.99)}
    assert spread["components"] == fewest
    apart = np.asarray(jax.jit(space.distance)(points[:, None], points), float)
    similar = {True: [], False: []}
    for i, j in itertools.combinations(range(9), 2):
        similar[LABELS[i] == LABELS[j]].append(1 - apart[i, j] / 2)
    told = spread["similarity"]
    edges = told["edges"] + np.linspace(-1e-6, 1e-6, len(told["edges"]))  # Of other roundings.
    shares = []
    for same, pairs in ((True, "of_one_class"), (False, "of_different_classes")):
        counts = np.histogram(similar[same], edges)[0]
        assert told[f"pairs_{pairs}"] == counts.tolist()
        np.testing.assert_allclose(told[f"mean_{pairs}"], np.mean(similar[same]), rtol=1e-5)
        shares.append(counts / len(similar[same]))
    assert told["overlap"] == pytest.approx(sum(map(min, *shares)))
