"""HIER: triplets of mutual neighbours, ancestors among proxies, and the objective of both."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.objectives import Group, ProblemSizes, reciprocal_triplets
from tests.helpers.losses import loss_of, objective

NAME = "hier+proxy_anchor"
KEY = jax.random.key(0)
draw = jax.jit(reciprocal_triplets, static_argnames=("neighbors", "per_anchor"))


def brute_force(similarity, k):
    """The other mutual neighbours of each point."""
    n = len(similarity)
    similarity = np.where(np.eye(n, dtype=bool), np.inf, similarity)
    lists = [set(np.argsort(-row, kind="stable")[:k]) for row in similarity]
    return [{j for j in lists[i] if i in lists[j] and j != i} for i in range(n)]


@pytest.mark.parametrize(("n", "k"), [(30, 5), (12, 20), (3, 3)])
def test_triplets_are_of_mutual_neighbours_and_others(n, k):
    similarity = np.random.default_rng(n).normal(size=(n, n))
    similarity += similarity.T
    similarity[2] -= 100  # A point that is nobody's neighbour.
    indices, valid = draw(similarity, KEY, neighbors=k, per_anchor=40)
    mutual = brute_force(similarity, k)
    for anchor in range(n):
        rows = slice(anchor * 40, (anchor + 1) * 40)
        rest = set(range(n)) - mutual[anchor] - {anchor}
        assert np.all(valid[rows] == (len(mutual[anchor]) >= 2 and bool(rest)))
        if valid[rows][0]:
            i, j, c = np.asarray(indices[rows]).T
            assert set(i) == {anchor} and set(j) <= mutual[anchor] and set(c) <= rest


def test_all_mutual_neighbours_are_equally_likely():
    similarity = -np.abs(np.subtract.outer(np.arange(9.0), np.arange(9.0)))
    indices, valid = draw(similarity, KEY, neighbors=5, per_anchor=20_000)
    _, j, k = np.asarray(indices).reshape(9, 20_000, 3)[4].T
    assert valid.reshape(9, -1)[4].all()
    assert np.bincount(j, minlength=9)[[2, 3, 5, 6]] == pytest.approx(5_000, rel=0.05)
    assert np.bincount(k, minlength=9)[[0, 1, 7, 8]] == pytest.approx(5_000, rel=0.05)


def test_each_ancestor_has_noise_of_its_own(monkeypatch):
    drawn, module = [], importlib.import_module("hypjax.objectives.hier")
    monkeypatch.setattr(
        module, "hier", lambda *points, **_: drawn.append(points[3]) or jnp.zeros(())
    )
    built = objective("hier+supcon", hier_neighbors=4, hier_triplets=2, hier_proxies=3)

    @jax.jit  # Without the loss, it compiles faster.
    def noises():
        started = built.init(KEY, ProblemSizes(3, 2, 5, 5, 6, 6))
        loss_of(built, started, np.eye(6, 5, dtype="f"), np.arange(6) // 2, key=KEY)
        return drawn

    actual = noises()
    assert [noise.shape for noise in actual] == [(2, 12, 3), (2, 6, 3)]
    assert all(len(np.unique(noise)) == noise.size for noise in actual)


def test_proxies_have_groups_of_their_own_and_start_at_nine_tenths_of_the_clip_radius():
    built = objective(NAME, proxy_rate=1e4)
    assert built.groups == (Group(("base", "proxies"), rate=1e4), Group(("hierarchy",), rate=50.0))
    params, _ = built.init(KEY, ProblemSizes(6, 2, 8, 128, 12, 12))
    lengths = np.linalg.norm(params["hierarchy"], axis=1)
    assert params["hierarchy"].shape == (512, 128)
    assert np.mean(lengths) == pytest.approx(0.9 * 2.3, rel=0.01)
