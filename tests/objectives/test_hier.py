"""HIER: triplets of mutual neighbours, ancestors among proxies, and the objective of both."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.objectives import Group, Spec, hier, reciprocal_triplets
from tests.helpers.losses import BALL, SPHERE, loss_of, objective

NAME = "hier+proxy_anchor"
KEY = jax.random.key(0)
# Compiled as one: op by op, these take most of the tests' time.
LOSS = jax.jit(functools.partial(hier, space=BALL))
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


TRIPLETS = np.array([[0, 1, 2], [1, 0, 3]])


def test_without_an_anchor_or_different_ancestors_the_loss_is_zero():
    """With one proxy, both ancestors of a triplet are that."""
    points = BALL.embed(np.random.default_rng(0).normal(size=(4, 3)))
    noise = np.zeros((2, 2, 5), np.float32)
    assert LOSS(points, jnp.zeros((1, 3)), TRIPLETS, noise[..., :1]) == 0

    noise[[0, 1], :, [0, 1]] = 99  # Else the ancestors are different.

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def loss(points, proxies, valid):
        return hier(points, proxies, TRIPLETS, noise, space=BALL, valid=valid)

    proxies = BALL.embed(np.random.default_rng(1).normal(size=(5, 3)))
    assert loss(points, proxies, np.ones(2, bool))[0] > 0
    value, slopes = loss(points, proxies, np.zeros(2, bool))
    assert value == 0 and all(np.all(slope == 0) for slope in slopes)


@pytest.mark.parametrize(("of_two", "of_three"), [(0, 1), (1, 0)])
def test_the_first_noise_chooses_the_ancestor_of_two_and_the_second_that_of_three(of_two, of_three):
    """d(i, ρ_ij) − d(i, ρ_ijk) + δ + d(j, ρ_ij) − d(j, ρ_ijk) + δ + d(k, ρ_ijk) − d(k, ρ_ij) + δ.

    Each term is at least 0. In the second case i and j are far from their own ancestor.
    """
    points = jnp.array([[0.1, 0], [0.2, 0], [0.9, 0]])
    proxies = jnp.array([[0.0, 0], [1.5, 0]])
    noise = 99.0 * np.eye(2, dtype=np.float32)[[of_two, of_three]][:, None]
    d = np.asarray(BALL.distance_matrix(points, proxies))
    signs = ((0, 1), (1, 1), (2, -1))
    terms = [sign * (d[row, of_two] - d[row, of_three]) for row, sign in signs]
    expected = sum(max(0, term + 1.0) for term in terms)
    value = jax.jit(functools.partial(hier, space=BALL, margin=1.0))(
        points, proxies, TRIPLETS[:1], noise
    )
    assert expected > 0.1
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_each_ancestor_has_noise_of_its_own(monkeypatch):
    drawn, module = [], importlib.import_module("hypjax.objectives.hier")
    monkeypatch.setattr(module, "hier", lambda *points, **_: drawn.append(points[3]) or 0.0)
    built = objective("hier+supcon", hier_neighbors=4, hier_triplets=2, hier_proxies=3)
    started = built.init(KEY, Spec(3, 2, 5, 5, 6, 6))
    loss_of(built, started, np.eye(6, 5, dtype="f"), np.arange(6) // 2, key=KEY)
    assert [noise.shape for noise in drawn] == [(2, 12, 3), (2, 6, 3)]
    assert all(len(np.unique(noise)) == noise.size for noise in drawn)


def test_a_learned_curvature_is_that_of_the_ball():
    moved = objective("hier+supcon").with_scalars({"c": 0.5, "temperature": 0.3})
    assert moved.space.c == moved.score_space.c == 0.5 and moved.base.space == SPHERE
    assert moved.base.function.keywords["temperature"] == 0.3 != moved.temperature


@pytest.mark.slow
def test_it_adds_the_other_loss_on_the_sphere_whose_gradients_the_inverse_metric_scales():
    built = objective(NAME, hier_proxies=16, hier_neighbors=4)
    assert built.base.space == SPHERE and built.score_space == BALL and built.space.riemannian
    params, state = built.init(KEY, Spec(6, 2, 8, 8, 12, 12))
    features = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    labels = jnp.arange(12) // 2

    def loss(features, of, params):
        found, (_, metrics) = loss_of(of, (params, state), features, labels, key=KEY)
        return found, metrics

    @jax.jit
    def compute(features, params):
        total, metrics = loss(features, built, params)
        slope = jax.value_and_grad(loss, has_aux=True)
        weightless = dataclasses.replace(built, weight=0.0)
        _, scaled = slope(features, weightless, params)
        (base, _), alone = slope(features, built.base, params["base"])
        return total, metrics, base, scaled, alone

    total, metrics, base, scaled, alone = compute(features, params)
    assert total == pytest.approx(float(base + 0.5 * metrics["hier_loss"]))
    told = metrics["feature_norm"], metrics["clipped_share"]
    lengths = np.linalg.norm(features, axis=1)
    np.testing.assert_allclose(told, (np.mean(lengths), np.mean(lengths > 2.3)), rtol=1e-5)
    assert metrics["hier_loss"] > 0 and 0 < metrics["hier_anchors"] <= 1
    norms = np.linalg.norm(BALL.embed(features), axis=1, keepdims=True)
    np.testing.assert_allclose(scaled, alone * (1 - 0.1 * norms**2) ** 2 / 4, rtol=1e-3, atol=1e-6)


def test_proxies_have_groups_of_their_own_and_start_at_nine_tenths_of_the_clip_radius():
    built = objective(NAME, proxy_rate=1e4)
    assert built.groups == (Group(("base", "proxies"), rate=1e4), Group(("hierarchy",), rate=50.0))
    params, _ = built.init(KEY, Spec(6, 2, 8, 128, 12, 12))
    lengths = np.linalg.norm(params["hierarchy"], axis=1)
    assert params["hierarchy"].shape == (512, 128)
    assert np.mean(lengths) == pytest.approx(0.9 * 2.3, rel=0.01)


def test_the_space_must_be_the_ball():
    with pytest.raises(UserError, match="it must be poincare for hier\\+proxy_anchor"):
        objective(NAME, space="sphere")


def test_gradients_pass_through_the_choice_of_ancestors_as_through_a_softmax(float64):
    """One-hot vectors of the chosen ancestors have the gradient of the softmax."""
    rng, margin, tau = np.random.default_rng(0), 0.5, 0.3
    points, proxies = (BALL.embed(rng.normal(size=(n, 3))) for n in (6, 5))
    triplets, noise = np.array([[0, 1, 2], [3, 4, 5], [2, 5, 0]]), rng.gumbel(size=(2, 3, 5))

    def straight_through(logits):
        soft = jax.nn.softmax(logits)
        return jax.nn.one_hot(jnp.argmax(logits, axis=1), 5) + soft - jax.lax.stop_gradient(soft)

    def transcription(points, proxies):
        i, j, k = (BALL.distance(points[members][:, None], proxies) for members in triplets.T)
        of_two = straight_through(-jnp.maximum(i, j) / tau + noise[0])
        of_three = straight_through(-jnp.maximum(jnp.maximum(i, j), k) / tau + noise[1])
        nearer = jnp.array([[1.0], [1.0], [-1.0]]) * jnp.stack(
            [jnp.sum(d * (of_two - of_three), axis=1) for d in (i, j, k)]
        )
        apart = jnp.argmax(of_two, axis=1) != jnp.argmax(of_three, axis=1)
        return jnp.mean(jnp.sum(jax.nn.relu(nearer + margin), axis=0) * apart)

    def loss(points, proxies):
        settings = {"space": BALL, "margin": margin, "temperature": tau}
        return hier(points, proxies, triplets, noise, **settings)

    (value, slopes), (expected, exact) = (
        jax.jit(jax.value_and_grad(function, (0, 1)))(points, proxies)
        for function in (loss, transcription)
    )
    assert value > 0
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    for slope, right in zip(slopes, exact, strict=True):
        np.testing.assert_allclose(slope, right, rtol=1e-7, atol=1e-9)
