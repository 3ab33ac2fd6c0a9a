"""Losses of pairs and proxies: against loops, on degenerate batches, and as objectives."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from hypjax import objectives
from hypjax.config import validate
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.objectives import Group, ProblemSizes
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES
from tests.helpers import losses
from tests.helpers.losses import (
    BALL,
    SPHERE,
    both_spaces,
    embedded,
    loss_of,
    mostly_sphere,
    objective_of,
)

LABELS = np.array([0, 3, 0, 1, 3, 3, 2, 0, 4, 4])  # Classes of 3, 1, 1, 3 and 2 images.
CLASSES, CENTRES, DIM = 6, 3, 5  # Class 5 is not in the batch.


def anchors(needed, term):
    """Mean of a term over anchors that have positives (1), and negatives (2), or any (0)."""

    def loop(d, same, other, **settings):
        rows = [(1 - x[p] / 2, 1 - x[n] / 2) for x, p, n in zip(d, same, other, strict=True)]
        rows = [row for row in rows if all(map(len, row[:needed]))]
        return np.mean([term(*row, **settings) for row in rows]) if rows else 0.0

    return loop


def contrastive(p, n, margin):
    return np.sum(1 - p) + np.sum(np.maximum(n - margin, 0))


def multi_similarity(p, n, mining=True, epsilon=0.1):
    if mining:
        least, largest = min(p, default=np.inf), max(n, default=-np.inf)
        p, n = p[p < largest + epsilon], n[n > least - epsilon]
    pull = np.log(1 + np.sum(np.exp(-2 * (p - 0.5)))) / 2
    return pull + np.log(1 + np.sum(np.exp(50 * (n - 0.5)))) / 50


def supcon(p, n, temperature):
    total = np.sum(np.exp(p / temperature)) + np.sum(np.exp(n / temperature))
    return -np.mean(np.log(np.exp(p / temperature) / total))


def scalable_nca(p, n, temperature):
    p, n = (np.sum(np.exp(s / temperature)) for s in (p, n))
    return -np.log(p / (p + n))


def circle(p, n, scale, margin):
    push = np.exp(scale * np.maximum(n + margin, 0) * (n - margin)).sum()
    pull = np.exp(-scale * np.maximum(1 + margin - p, 0) * (p - (1 - margin))).sum()
    return np.log(1 + push * pull)


def hard_triplet(p, n, margin):
    return max(2 * (n.max() - p.min()) + margin, 0)


def loop_semihard(d, same, other, margin):
    losses = []
    for a, p in np.argwhere(same):
        farther = [x for x in d[a][other[a]] if x > d[a, p]]
        losses.append(max(d[a, p] - min(farther) + margin, 0) if farther else 0)
    return np.mean(losses)


def loop_proxy_anchor(d, labels, margin, alpha):
    s, pulls, pushes = 1 - d[..., 0] / 2, [], []
    for k in range(CLASSES):
        pushes.append(np.log(1 + sum(np.exp(alpha * (s[labels != k, k] + margin)))))
        if k in labels:
            pulls.append(np.log(1 + sum(np.exp(-alpha * (s[labels == k, k] - margin)))))
    return np.mean(pulls) + np.mean(pushes)


def cross_entropy(logits, labels):
    weights = np.exp(logits)
    return np.mean(-np.log(weights[np.arange(len(labels)), labels] / weights.sum(axis=1)))


def loop_arcface(d, labels, scale, margin, cosine_margin):
    cosines = (1 - d / 2).max(axis=-1)
    for row, label in zip(cosines, labels, strict=True):
        angle = np.arccos(row[label])
        wide = angle + margin > np.pi
        beyond = np.cos(angle) - margin * np.sin(margin) if wide else np.cos(angle + margin)
        row[label] = beyond - cosine_margin
    return cross_entropy(scale * cosines, labels)


def loop_cosface(d, labels, scale, margin):
    s = (1 - d / 2).max(axis=-1)
    s[np.arange(len(d)), labels] -= margin
    return cross_entropy(scale * s, labels)


def loop_soft_triple(d, labels, between, scale, gamma, margin=0.01, tau=0.2):
    s = 1 - d / 2
    shares = np.exp(s / gamma) / np.exp(s / gamma).sum(axis=-1, keepdims=True)
    classes = (shares * s).sum(axis=-1)
    classes[np.arange(len(d)), labels] -= margin
    apart = sum(np.sqrt(row[t, u]) for row in between for t in range(CENTRES) for u in range(t))
    spread = apart / (CLASSES * CENTRES * (CENTRES - 1))
    return cross_entropy(scale * classes, labels) + tau * spread


def loop_tuples(d, squared, margin):
    """The second half of the batch is another tuple."""
    d, half = np.sqrt(d) if squared else d, len(d) // 2
    rows = np.stack([d[0, 1:half], d[half, half + 1 :]])
    pull, push = rows[:, 0] ** 2, np.maximum(margin - rows[:, 1:], 0) ** 2
    return np.mean(pull + push.sum(axis=1)) / 2


def loop_koleo(d, squared):
    nearest = (d + np.diag([np.inf] * len(d))).min(axis=1)
    return -np.mean(np.log(np.sqrt(nearest) if squared else nearest))


semihard = functools.partial(objectives.triplet, mining="semihard")
similarity, similarity_loop = objectives.multi_similarity, anchors(0, multi_similarity)
PAIRS = {
    "contrastive": (objectives.contrastive, anchors(0, contrastive), {"margin": 0.3}),
    "multi_similarity": (similarity, similarity_loop, {"epsilon": 0.05}),
    "multi_similarity, all": (similarity, similarity_loop, {"mining": False}),
    "circle": (objectives.circle, anchors(2, circle), {"scale": 8.0, "margin": 0.3}),
    "scalable_nca": (objectives.scalable_nca, anchors(1, scalable_nca), {"temperature": 0.3}),
    "supcon": (objectives.supcon, anchors(1, supcon), {"temperature": 0.3}),
    "triplet": (objectives.triplet, anchors(2, hard_triplet), {"margin": 0.4}),
    "triplet, semihard": (semihard, loop_semihard, {"margin": 0.4}),
}
PROXIES = {
    "arcface": (
        objectives.arcface,
        loop_arcface,
        # θ + m is above π for 7 of the images.
        {"scale": 8.0, "margin": 2.3, "cosine_margin": 0.1},
    ),
    "cosface": (objectives.cosface, loop_cosface, {"scale": 8.0, "margin": 0.2}),
    "normalized_softmax": (
        objectives.normalized_softmax,
        lambda d, labels, temperature: cross_entropy(-d[..., 0] / 2 / temperature, labels),
        {"temperature": 0.3},
    ),
    "proxy_anchor": (objectives.proxy_anchor, loop_proxy_anchor, {"alpha": 8.0, "margin": 0.2}),
    "proxy_nca": (
        objectives.proxy_nca,
        lambda d, labels, temperature: cross_entropy(-d[..., 0] / temperature, labels),
        {"temperature": 0.5},
    ),
    "soft_triple": (objectives.soft_triple, loop_soft_triple, {"scale": 5.0, "gamma": 0.2}),
}
UNLABELLED = {
    "tuple_contrastive": (
        lambda x, margin, space: objectives.tuple_contrastive(
            x, size=len(x) // 2, space=space, margin=margin
        ),
        loop_tuples,
        {"margin": 3.0},
    ),
    "koleo": (objectives.koleo, loop_koleo, {}),
}
ALL = {**PAIRS, **PROXIES, **UNLABELLED}
# Losses with several proxies for each class.
SEVERAL = [name for name, loss in PROXY_LOSSES.items() if "centres" in loss.fields]


def of(space):
    """Names of the losses that a space has."""
    angular = {name for name, loss in PROXY_LOSSES.items() if loss.spaces}
    return [name for name in ALL if space == SPHERE or name not in angular]


def batch(seed=0):
    """Features of the batch, and of proxies of all classes."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(len(LABELS), DIM)) + 0.7, rng.normal(size=(CLASSES, CENTRES, DIM))


def compute(name, space, points, labels, proxies):
    function, _, settings = ALL[name]
    if name in UNLABELLED:
        return function(points, space=space, **settings)
    if name in PAIRS:
        return function(points, labels, space=space, **settings)
    shown = proxies if name in SEVERAL else proxies[:, 0]
    return function(points, labels, shown, space=space, **settings)


# One program for all losses, since these tests spend their time on compilation.
@functools.partial(jax.jit, static_argnames="gradients")
def all_losses(space, features, labels, proxies, gradients=True):
    """Value of each loss, and its gradients before the space embeds its arguments."""

    def loss(features, proxies, name):
        return compute(name, space, space.embed(features), labels, space.embed(proxies))

    slope = jax.value_and_grad(loss, argnums=(0, 1))
    evaluate = slope if gradients else lambda *args: (loss(*args), ())
    return {name: evaluate(features, proxies, name) for name in of(space)}


@jax.jit
def distances(space, features, proxies):
    """Those among images and from images to proxies, and separations between proxies."""
    points, proxies = space.embed(features), space.embed(proxies)
    among = space.distance(points[:, None], points)
    to_proxies = space.distance(points[:, None, None], proxies)
    return among, to_proxies, space.separation(proxies[:, :, None], proxies[:, None])


# Gradients in the ball take seconds to compile.
CASES = [(SPHERE, True), (BALL, False), pytest.param(BALL, True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("space", "gradients"), CASES, ids=["sphere", "poincare", "gradients"])
def test_losses_equal_plain_loops_in_any_order_and_gradients_are_differences(
    float64, space, gradients
):
    evaluate = functools.partial(all_losses, gradients=gradients)
    features, of_proxies = batch()
    among, to_proxies, between = map(np.array, distances(space, features, of_proxies))
    alike = LABELS[:, None] == LABELS
    rng, order = np.random.default_rng(1), np.random.default_rng(1).permutation(len(LABELS))
    moves = rng.normal(size=features.shape), rng.normal(size=of_proxies.shape)
    actual = evaluate(space, features, LABELS, of_proxies)
    shuffled = evaluate(space, features[order], LABELS[order], of_proxies)
    below, above = (
        evaluate(space, features + step * moves[0], LABELS, of_proxies + step * moves[1])
        for step in (-1e-6, 1e-6)
    )
    for name in of(space):
        _, loop, settings = ALL[name]
        if name in PAIRS:
            expected = loop(among, alike & ~np.eye(len(among), dtype=bool), ~alike, **settings)
        elif name in UNLABELLED:
            expected = loop(among, space == SPHERE, **settings)
        elif name == "soft_triple":
            expected = loop(to_proxies, LABELS, between, **settings)
        else:
            shown = to_proxies if name in SEVERAL else to_proxies[..., :1]
            expected = loop(shown, LABELS, **settings)
        assert expected > 0 or name == "koleo", name
        value, slopes = actual[name]
        np.testing.assert_allclose(value, expected, rtol=1e-10, err_msg=name)
        if name != "tuple_contrastive":
            np.testing.assert_allclose(shuffled[name][0], expected, rtol=1e-10, err_msg=name)
        if gradients and name != "circle":  # Its weights are constants for the gradient.
            slope = sum(np.sum(s * move) for s, move in zip(slopes, moves, strict=True))
            numeric = (above[name][0] - below[name][0]) / 2e-6
            np.testing.assert_allclose(slope, numeric, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_arcface_has_its_closed_form_and_slope_at_every_angle(margin):
    """Also in float32 at angles that its cosine cannot tell from 0 or π."""
    scale = 2.0

    @jax.jit
    @jax.value_and_grad
    def both(angle):
        points = jnp.stack([jnp.cos(angle), jnp.sin(angle)])[None]
        proxies = jnp.array([[[1.0, 0, 0]], [[0, 0, 1.0]]])  # The other is at a right angle.
        points = jnp.concatenate([points, jnp.zeros((1, 1))], axis=1)
        return objectives.arcface(points, [0], proxies, scale=scale, margin=margin)

    for angle in (1e-6, 1e-4, 0.3, 1.5, 2.6, 2.7, 3.1):
        wide = angle + margin > np.pi
        target = np.cos(angle) - margin * np.sin(margin) if wide else np.cos(angle + margin)
        rate = -np.sin(angle) if wide else -np.sin(angle + margin)
        value, slope = both(angle)
        np.testing.assert_allclose(value, np.log1p(np.exp(-scale * target)), rtol=1e-6)
        np.testing.assert_allclose(slope, -scale * rate / (1 + np.exp(scale * target)), rtol=1e-4)
    assert np.isfinite([both(0.0), both(np.pi)]).all()


def test_semihard_triplets_count_all_images_of_a_class(float64):
    """Twice two adjacent images of one class, and two of each other class."""
    points = SPHERE.embed(batch()[0])
    labels = np.array([0, 0, 0, 0, 1, 1, 2, 2])

    @jax.jit
    def both(points):
        loss = functools.partial(semihard, points, labels, margin=1.0, space=SPHERE)
        return loss(), loss(samples_per_class=2)

    np.testing.assert_allclose(*both(points[:8]), rtol=1e-10)


@mostly_sphere
def test_degenerate_batches_have_finite_losses_and_gradients(space):
    rng = np.random.default_rng(0)
    different = rng.normal(size=(6, DIM)).astype(np.float32)
    alike = np.repeat(different[:1], 6, axis=0)
    proxies = rng.normal(size=(6, CENTRES, DIM)).astype(np.float32)
    no_positives, no_negatives, some = np.arange(6), np.zeros(6, int), np.array([0, 0, 1, 1, 1, 2])
    for features in (different, alike, 0 * alike):
        for labels in (no_positives, no_negatives, some):
            for shown in (proxies, np.broadcast_to(features[0], proxies.shape)):
                for name, (value, slopes) in all_losses(space, features, labels, shown).items():
                    assert np.isfinite(value) and (value > -1e-5 or name == "koleo"), name
                    assert all(np.isfinite(slope).all() for slope in slopes), name
    lonely = all_losses(space, different, no_positives, proxies)
    for name in PAIRS.keys() - {"contrastive", "multi_similarity, all"}:
        assert lonely[name][0] == 0, name
        assert not np.any(lonely[name][1][0]), name


def test_gradients_of_close_images_keep_their_digits():
    """Adjacent images of a class are compared by subtraction, and images with their proxies."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(6), 3)
    proxies = rng.normal(size=(6, 16)).astype(np.float32)
    features = (proxies[labels] + 1e-4 * rng.normal(size=(18, 16))).astype(np.float32)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def slopes(features, again, proxies):
        points, others = BALL.embed(again), BALL.embed(proxies)
        # Images of different classes are too far apart to repel each other.
        settings = {"space": BALL, "margin": 0.99, "samples_per_class": 3}
        pairs = objectives.contrastive(BALL.embed(features), labels, **settings)
        return pairs + objectives.proxy_nca(points, labels, others, space=BALL, temperature=1.0)

    actual = slopes(features, features, proxies)
    with jax.enable_x64(True):
        exact = slopes(features.astype(float), features.astype(float), proxies.astype(float))
    for slope, right in zip(map(np.asarray, actual), map(np.asarray, exact), strict=True):
        assert np.linalg.norm(slope - right) < 0.01 * np.linalg.norm(right)


@both_spaces
def test_a_point_that_is_nan_makes_every_loss_nan(float64, space):
    """The step's check of its loss relies on it. One image is alone in its class."""
    assert {*PAIR_LOSSES, *PROXY_LOSSES} <= {*ALL}
    features, proxies = batch()
    evaluate = functools.partial(all_losses, gradients=space == SPHERE)

    @jax.jit
    def others(spoilt):
        grouped, triplets = space.embed(spoilt).reshape(5, 2, DIM), np.arange(9).reshape(3, 3)
        pairwise, noise = objectives.pairwise_cross_entropy, np.zeros((2, 3, CLASSES))
        points = BALL.embed(spoilt), BALL.embed(proxies[:, 0])
        hier = objectives.hier(*points, triplets, noise, space=BALL)
        return {"hier": hier, "pairwise": pairwise(grouped, space=space, temperature=1.0)}

    for row in (0, 6):
        spoilt = features.copy()
        spoilt[row, 1] = np.nan
        actual = {n: loss for n, (loss, _) in evaluate(space, spoilt, LABELS, proxies).items()}
        actual |= others(spoilt)
        assert [name for name, loss in actual.items() if not np.isnan(loss)] == []


def test_what_does_not_fit_is_an_error(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # No annotation fits, either.
    eye = np.eye(4)
    for call, message in [
        (lambda: objectives.supcon(eye, [0, 0]), "a label per embedding"),
        (lambda: objectives.supcon(eye, [0] * 4, samples_per_class=3), "samples_per_class is 3"),
        (lambda: objectives.proxy_nca(eye, [0, 1, 2, 4], eye), "but a label is 4"),
        (lambda: objectives.supcon(eye, ["a", "b", "a", "b"]), "dtype <U1; .* integers"),
        (lambda: jax.jit(objectives.contrastive)(eye, np.ones(4)), "dtype float32; .* integers"),
        (lambda: objectives.arcface(eye, range(4), eye[:, None], space=BALL), "the sphere"),
        (lambda: objectives.tuple_contrastive(eye[:3], size=4), "tuples of 4"),
        (lambda: objectives.supcon(eye[:0], []), "one or more, got .0,"),
        (lambda: objectives.proxy_nca(eye, [[0], [1], [2], [3]], eye), "got .4, 1"),
        (lambda: objectives.entailment(eye, eye[:, :1].astype(int), eye, c=1.0), "got .4, 1"),
        (lambda: objectives.koleo(eye, ids=[[0], [1], [2], [3]]), "got .4, 1"),
        (lambda: objectives.smooth_hap(eye[:0, :0], eye[:0, :0]), "one image or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# Losses of the labels of a batch; that of tuples, whose order matters, has tests of its own.
NAMES = [*(name for name, loss in PAIR_LOSSES.items() if not loss.by_tuple), *PROXY_LOSSES]
DOUBLES = np.repeat(np.arange(6), 2)
SPEC = ProblemSizes(8, 2, 16, 5, 100, 12)
FEW = PoincareBall(0.1, 1.5)  # With a radius that clips some of the features.


def configured(name, **fields):
    if PROXY_LOSSES.get(name, PROXY_LOSSES["cosface"]).spaces:
        fields = {"space": "sphere", **fields}
    return losses.configured(name, **{"clip_radius": 1.5, **fields})


def call(config, features):
    objective = objective_of(config)

    def started_loss(features):
        return loss_of(objective, objective.init(jax.random.key(0), SPEC), features, DOUBLES)

    return jax.jit(started_loss)(features)


@pytest.fixture
def features():
    return np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)


@pytest.mark.parametrize("name", ["supcon", "proxy_anchor", "pairwise_cross_entropy"])
def test_metrics_are_those_of_the_batch(name, features):
    _, (state, actual) = call(configured(name), features)
    points, apart = map(np.asarray, embedded(FEW, features))
    norms, others = np.linalg.norm(features, axis=1), apart + np.diag([np.inf] * 12)
    wanted = {
        "feature_norm": norms.mean(),
        "embedding_norm": np.linalg.norm(points, axis=1).mean(),
        "clipped_share": np.mean(norms > 1.5),
        "batch_recall@1": np.mean(DOUBLES[np.argmin(others, axis=1)] == DOUBLES),
    }
    assert 0 < wanted["batch_recall@1"] < 1 and 0 < wanted["clipped_share"] < 1 and state == {}
    if name == "pairwise_cross_entropy":
        wanted |= {"logit_min": -apart.max() / 0.2, "logit_max": -others.min() / 0.2}
        wanted["chance_loss"] = 2 * np.log(2 * 6 - 1)
    assert actual.keys() == wanted.keys()
    for metric, value in wanted.items():
        np.testing.assert_allclose(actual[metric], value, rtol=1e-5, err_msg=metric)


def test_hier_adds_the_loss_of_triplets_to_that_on_the_sphere(features):
    objective = objective_of(configured("hier+arcface", hier_proxies=16, hier_neighbors=4))
    assert objective.base.space == SPHERE and objective.score_space == FEW
    assert objective.space.riemannian and not objective.score_space.riemannian
    params, state = jax.jit(lambda: objective.init(jax.random.key(0), SPEC))()

    @jax.jit
    def both(features):
        key, shown = jax.random.key(1), SPHERE.embed(params["base"]["proxies"])
        actual, (_, metrics) = loss_of(objective, (params, state), features, DOUBLES, key=key)
        expected = objectives.arcface(SPHERE.embed(features), DOUBLES, shown)
        return actual, expected + 0.5 * metrics["hier_loss"], metrics

    actual, expected, metrics = both(features)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert metrics["hier_loss"] > 0
    assert 0 < metrics["hier_anchors"] <= 1 and 0 < metrics["hier_proxy_anchors"] <= 1
    with pytest.raises(UserError, match="must be sphere for arcface"):
        objective_of(configured("arcface", space="poincare"))
    with pytest.raises(UserError, match="must be poincare or lorentz for hier\\+proxy"):
        objective_of(configured("hier+proxy_anchor", space="sphere"))


def test_proxies_are_drawn_as_published_and_have_a_rate_of_their_own():
    for name, shape in (("proxy_anchor", (500, 64)), ("soft_triple", (500, 4, 64))):
        fields = {"centres": 4} if name == "soft_triple" else {}
        objective = objective_of(configured(name, proxy_rate=50.0, **fields))
        params, state = objective.init(jax.random.key(0), ProblemSizes(500, 2, 16, 64, 1000, 12))
        assert params["proxies"].shape == shape and state == {}
        count = np.prod(shape[:-1])
        np.testing.assert_allclose(np.std(params["proxies"]), (2 / count) ** 0.5, rtol=0.02)
        assert objective.groups == (Group(("proxies",), rate=50.0),)


def test_batches_of_any_classes_are_for_losses_that_need_no_pairs(features):
    for name in NAMES:
        config = configured(name)
        # Of tuples, too, no loss may take the order for classes.
        for sampling in ("tuples", "shuffled"):
            config.train.sampling = sampling
            assert objective_of(config).samples_per_class is None
        if name in PROXY_LOSSES or name == "contrastive":
            validate(config)
        else:
            with pytest.raises(UserError, match="this objective compares images of one class"):
                validate(config)
    config = configured("contrastive")
    config.train.sampling = "shuffled"
    assert "batch_recall@1" not in call(config, features)[1][1]


def test_proxies_may_be_points_of_a_hyperbolic_space():
    objective = objective_of(configured("proxy_anchor", proxy_optimizer="riemannian"))
    assert objective.groups == (Group(("proxies",), rate=100.0, ball_c=0.1),)
    features, points = (
        each.init(jax.random.key(0), ProblemSizes(8, 2, 16, 5, 100, 12))[0]["proxies"]
        for each in (objective_of(configured("proxy_anchor")), objective)
    )
    np.testing.assert_array_equal(points, FEW.embed(features))
    for fields in ({"space": "sphere"}, {"curvatures": (0.1, 0.2)}):
        with pytest.raises(UserError, match="proxy_optimizer is riemannian; it must be adam"):
            objective_of(configured("proxy_anchor", proxy_optimizer="riemannian", **fields))


@pytest.mark.parametrize("optimizer", ["adam", "riemannian"])
def test_hier_is_the_same_in_the_ball_and_on_the_hyperboloid(optimizer, features):
    """Also the gradients by features, c and proxies, which are vectors at the origin either way."""
    fields = {"hier_proxies": 16, "hier_neighbors": 4, "hier_decay": 0.1, "learn_c": True}
    fields |= {"hier_optimizer": optimizer, "max_distance": 5.0}
    actual = []
    for space in ("poincare", "lorentz"):
        built = objective_of(configured("hier+proxy_anchor", space=space, **fields))
        assert built.groups[-1][2:] == (0.1, 0, "learned" if optimizer == "riemannian" else None)
        params, state = built.init(jax.random.key(0), SPEC)

        @jax.jit
        @jax.value_and_grad
        def loss(of, built=built, state=state):
            features, c, params = of
            moved, key = built.with_scalars({"c": c}), jax.random.key(1)
            return loss_of(moved, (params, state), features, DOUBLES, key=key)[0]

        actual.append(jax.tree.leaves(loss((features, np.float32(0.1), params))))
    for ours, theirs in zip(*actual, strict=True):
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4 * largest)
        assert largest > 0
