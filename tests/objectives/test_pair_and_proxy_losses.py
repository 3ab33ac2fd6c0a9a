"""Losses of pairs and proxies: against loops, on degenerate batches, and as objectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import objectives
from hypjax.config import validate
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.objectives import Group, Spec, create_objective
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES
from tests.helpers import losses
from tests.helpers.losses import BALL, SPHERE, both_spaces, loss_of

LABELS = np.array([0, 3, 0, 1, 3, 3, 2, 0, 4, 4])  # Classes of 3, 1, 1, 3 and 2 images.
CLASSES, CENTRES, DIM = 6, 3, 5  # Class 5 is not in the batch.


def loop_contrastive(d, same, other, margin=0.5):
    pull = sum(1 - (1 - d[i, j] / 2) for i, j in np.argwhere(same))
    push = sum(max(1 - d[i, j] / 2 - margin, 0) for i, j in np.argwhere(other))
    return (pull + push) / len(d)


def loop_multi_similarity(d, same, other, mining=True, epsilon=0.1):
    losses = []
    for s, p, n in zip(1 - d / 2, same, other, strict=True):
        positives, negatives = list(s[p]), list(s[n])
        if mining:
            hardest = max(negatives, default=-np.inf), min(positives, default=np.inf)
            positives = [x for x in positives if x < hardest[0] + epsilon]
            negatives = [x for x in negatives if x > hardest[1] - epsilon]
        pull = np.log(1 + sum(np.exp(-2 * (x - 0.5)) for x in positives)) / 2
        losses.append(pull + np.log(1 + sum(np.exp(50 * (x - 0.5)) for x in negatives)) / 50)
    return np.mean(losses)


def loop_supcon(d, same, other, temperature=0.1):
    losses = []
    for i in np.flatnonzero(same.any(axis=1)):
        weights = np.exp((1 - d[i] / 2) / temperature)
        total = weights[same[i] | other[i]].sum()
        losses.append(-np.mean(np.log(weights[same[i]] / total)))
    return np.mean(losses) if losses else 0.0


def loop_scalable_nca(d, same, other, temperature=0.05):
    losses = []
    for i in np.flatnonzero(same.any(axis=1)):
        weights = np.exp((1 - d[i] / 2) / temperature)
        losses.append(-np.log(weights[same[i]].sum() / weights[same[i] | other[i]].sum()))
    return np.mean(losses) if losses else 0.0


def loop_circle(d, same, other, scale=80, margin=0.4):
    losses = []
    for i in [i for i in range(len(d)) if same[i].any() and other[i].any()]:
        s_n, s_p = 1 - d[i][other[i]] / 2, 1 - d[i][same[i]] / 2
        push = np.exp(scale * np.maximum(s_n + margin, 0) * (s_n - margin)).sum()
        pull = np.exp(-scale * np.maximum(1 + margin - s_p, 0) * (s_p - (1 - margin))).sum()
        losses.append(np.log(1 + push * pull))
    return np.mean(losses) if losses else 0.0


def loop_hard(d, same, other, margin=0.2):
    both = [i for i in range(len(d)) if same[i].any() and other[i].any()]
    losses = [max(d[i][same[i]].max() - d[i][other[i]].min() + margin, 0) for i in both]
    return np.mean(losses) if losses else 0.0


def loop_semihard(d, same, other, margin):
    losses = []
    for a, p in np.argwhere(same):
        farther = [x for x in d[a][other[a]] if x > d[a, p]]
        losses.append(max(d[a, p] - min(farther) + margin, 0) if farther else 0)
    return np.mean(losses)


def loop_proxy_anchor(d, labels, margin=0.1, alpha=32):
    s, pulls, pushes = 1 - d[..., 0] / 2, [], []
    for k in range(CLASSES):
        pushes.append(np.log(1 + sum(np.exp(alpha * (s[labels != k, k] + margin)))))
        if k in labels:
            pulls.append(np.log(1 + sum(np.exp(-alpha * (s[labels == k, k] - margin)))))
    return np.mean(pulls) + np.mean(pushes)


def loop_proxy_nca(d, labels, temperature=1.0):
    weights = np.exp(-d[..., 0] / temperature)
    return np.mean(-np.log(weights[np.arange(len(d)), labels] / weights.sum(axis=1)))


def loop_softmax(d, labels, temperature):
    return loop_proxy_nca(d, labels, 2 * temperature)


def loop_arcface(d, labels, scale=64, margin=0.5, cosine_margin=0.0):
    cosines = (1 - d / 2).max(axis=-1)
    for row, label in zip(cosines, labels, strict=True):
        angle = np.arccos(row[label])
        wide = angle + margin > np.pi
        beyond = np.cos(angle) - margin * np.sin(margin) if wide else np.cos(angle + margin)
        row[label] = beyond - cosine_margin
    return loop_softmax(2 - 2 * cosines[..., None], labels, 1 / scale)


def loop_cosface(d, labels, scale=64, margin=0.35):
    s = (1 - d / 2).max(axis=-1)
    s[np.arange(len(d)), labels] -= margin
    return loop_softmax(2 - 2 * s[..., None], labels, 1 / scale)


def loop_soft_triple(d, labels, between, scale=20, gamma=0.1, margin=0.01, tau=0.2):
    s = 1 - d / 2
    shares = np.exp(s / gamma) / np.exp(s / gamma).sum(axis=-1, keepdims=True)
    classes = (shares * s).sum(axis=-1)
    classes[np.arange(len(d)), labels] -= margin
    weights = np.exp(scale * classes)
    loss = np.mean(-np.log(weights[np.arange(len(d)), labels] / weights.sum(axis=1)))
    spread = sum(
        between(k, s, t) ** 0.5 for k in range(CLASSES) for t in range(CENTRES) for s in range(t)
    )
    return loss + tau * spread / (CLASSES * CENTRES * (CENTRES - 1))


semihard = functools.partial(objectives.triplet, mining="semihard")
PAIRS = {
    "contrastive": (objectives.contrastive, loop_contrastive, {"margin": 0.3}),
    "multi_similarity": (objectives.multi_similarity, loop_multi_similarity, {"epsilon": 0.05}),
    "multi_similarity, all": (
        objectives.multi_similarity,
        loop_multi_similarity,
        {"mining": False},
    ),
    "circle": (objectives.circle, loop_circle, {"scale": 8.0, "margin": 0.3}),
    "scalable_nca": (objectives.scalable_nca, loop_scalable_nca, {"temperature": 0.3}),
    "supcon": (objectives.supcon, loop_supcon, {"temperature": 0.3}),
    "triplet": (objectives.triplet, loop_hard, {"margin": 0.4}),
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
    "normalized_softmax": (objectives.normalized_softmax, loop_softmax, {"temperature": 0.3}),
    "proxy_anchor": (objectives.proxy_anchor, loop_proxy_anchor, {"alpha": 8.0, "margin": 0.2}),
    "proxy_nca": (objectives.proxy_nca, loop_proxy_nca, {"temperature": 0.5}),
    "soft_triple": (objectives.soft_triple, loop_soft_triple, {"scale": 5.0, "gamma": 0.2}),
}
ALL = {**PAIRS, **PROXIES}
SEVERAL = [
    name for name, loss in PROXY_LOSSES.items() if "centres" in loss.fields
]  # Proxies for each class.


def of(space):
    """Names of the losses that a space has."""
    angular = {name for name, loss in PROXY_LOSSES.items() if loss.spaces}
    return [name for name in ALL if space == SPHERE or name not in angular]


def batch(space, seed=0, dtype=np.float64):
    """Points of the batch, and proxies of all classes, one of them near an image."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(len(LABELS), DIM)) + 0.7
    proxies = rng.normal(size=(CLASSES, CENTRES, DIM))
    return [np.asarray(space.embed(x.astype(dtype))) for x in (features, proxies)]


def compute(name, space, points, labels, proxies):
    function, _, settings = ALL[name]
    if name in PAIRS:
        return function(points, labels, space=space, **settings)
    shown = proxies if name in SEVERAL else proxies[:, 0]
    return function(points, labels, shown, space=space, **settings)


# One program for all losses, since these tests spend their time on compilation.
@jax.jit
def all_losses(space, points, labels, proxies):
    return {name: compute(name, space, points, labels, proxies) for name in of(space)}


@jax.jit
def all_slopes(space, features, labels, proxies):
    """Value and gradients of each loss, before the space embeds its arguments."""

    def loss(features, proxies, name):
        return compute(name, space, space.embed(features), labels, space.embed(proxies))

    slope = jax.value_and_grad(loss, argnums=(0, 1))
    return {name: slope(features, proxies, name) for name in of(space)}


@both_spaces
def test_losses_equal_plain_loops_in_any_order_of_images(float64, space):
    points, proxies = batch(space)
    among = np.asarray(space.distance(points[:, None], points))
    to_proxies = np.array(space.distance(points[:, None, None], proxies))
    alike = LABELS[:, None] == LABELS
    between = lambda k, s, t: space.separation(proxies[k, s], proxies[k, t])  # noqa: E731
    order = np.random.default_rng(1).permutation(len(LABELS))
    found = all_losses(space, points, LABELS, proxies)
    shuffled = all_losses(space, points[order], LABELS[order], proxies)
    for name in of(space):
        _, loop, settings = ALL[name]
        if name in PAIRS:
            expected = loop(among, alike & ~np.eye(len(among), dtype=bool), ~alike, **settings)
        elif name == "soft_triple":
            expected = loop(to_proxies, LABELS, between, **settings)
        elif name in SEVERAL:
            expected = loop(to_proxies, LABELS, **settings)
        else:
            expected = loop(to_proxies[..., :1], LABELS, **settings)
        np.testing.assert_allclose(found[name], expected, rtol=1e-10, err_msg=name)
        np.testing.assert_allclose(shuffled[name], expected, rtol=1e-10, err_msg=name)
        assert expected > 0, name


def test_slopes_of_circle_take_its_weights_for_constants(float64):
    """Two images of a class and one of another, at angles of which the loss is a closed form."""
    a, b, scale, margin = 0.4, 1.3, 3.0, 0.25

    def loss(angles):
        points = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        return objectives.circle(points, [0, 0, 1], scale=scale, margin=margin)

    # d/dθ of the images' losses by that of the other class alone.
    slope = 0.0
    for angle in (b, b - a):
        s_p, s_n = np.cos(a), np.cos(angle)
        push = np.exp(scale * (s_n + margin) * (s_n - margin))
        pull = np.exp(-scale * (1 + margin - s_p) * (s_p - 1 + margin))
        share = push * pull / (1 + push * pull)
        slope += share * scale * (s_n + margin) * -np.sin(angle) / 2
    found = jax.jit(jax.grad(loss))(jnp.array([0.0, a, b]))
    np.testing.assert_allclose(found[2], slope, rtol=1e-12)
    np.testing.assert_allclose(jnp.sum(found), 0, atol=1e-12)


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


@both_spaces
def test_slopes_stay_bounded_while_centres_of_a_class_meet(float64, space):
    """With one class, the loss is the regularisation alone."""

    @jax.jit
    @jax.grad
    def slope(moved):
        proxies = space.embed(jnp.stack([jnp.array([1.0, 0, 0]), moved])[None])
        points = space.embed(jnp.array([[0.0, 1, 0]]))
        return objectives.soft_triple(points, [0], proxies, space=space, regularization=1.0)

    for apart in (1e-2, 1e-4, 1e-6):
        assert 0.1 < np.linalg.norm(slope(jnp.array([1.0, apart, 0]))) < 1


def test_semihard_triplets_count_all_images_of_a_class(float64):
    """Twice two adjacent images of one class, and two of each other class."""
    points, _ = batch(SPHERE)
    labels = np.array([0, 0, 0, 0, 1, 1, 2, 2])

    @jax.jit
    def both(points):
        loss = functools.partial(semihard, points, labels, margin=1.0, space=SPHERE)
        return loss(), loss(samples_per_class=2)

    np.testing.assert_allclose(*both(points[:8]), rtol=1e-10)


@both_spaces
def test_degenerate_batches_have_finite_losses_and_gradients(space):
    rng = np.random.default_rng(0)
    different = rng.normal(size=(6, DIM)).astype(np.float32)
    alike = np.repeat(different[:1], 6, axis=0)
    proxies = rng.normal(size=(6, CENTRES, DIM)).astype(np.float32)
    no_positives, no_negatives, some = np.arange(6), np.zeros(6, int), np.array([0, 0, 1, 1, 1, 2])
    for features in (different, alike, 0 * alike):
        for labels in (no_positives, no_negatives, some):
            for shown in (proxies, np.broadcast_to(features[0], proxies.shape)):
                for name, (value, slopes) in all_slopes(space, features, labels, shown).items():
                    assert np.isfinite(value) and value > -1e-5, name
                    assert all(np.isfinite(slope).all() for slope in slopes), name
    lonely = all_slopes(space, different, no_positives, proxies)
    for name in (
        "circle",
        "multi_similarity",
        "scalable_nca",
        "supcon",
        "triplet",
        "triplet, semihard",
    ):
        assert lonely[name][0] == 0, name
        assert not np.any(lonely[name][1][0]), name


@pytest.mark.slow
def test_gradients_of_close_images_keep_their_digits():
    """Adjacent images of a class are compared by subtraction, and images with their proxies."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(6, 1, 16))
    features = (centres + 1e-4 * rng.normal(size=(6, 3, 16))).reshape(18, 16).astype(np.float32)
    labels, proxies = np.repeat(np.arange(6), 3), centres[:, 0].astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def slopes(samples, features, proxies):
        def contrastive(features):
            # Images of different classes are too far apart to repel each other.
            settings = {"space": BALL, "margin": 0.99, "samples_per_class": samples}
            return objectives.contrastive(BALL.embed(features), labels, **settings)

        def proxy_nca(features):
            points, others = BALL.embed(features), BALL.embed(proxies)
            return objectives.proxy_nca(points, labels, others, space=BALL, temperature=1.0)

        return jax.grad(contrastive)(features), jax.grad(proxy_nca)(features)

    found, by_products = slopes(3, features, proxies), slopes(None, features, proxies)
    with jax.enable_x64(True):
        exact = slopes(None, features.astype(np.float64), proxies.astype(np.float64))
        exact = jax.tree.map(np.asarray, exact)

    def error(found, exact):
        return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)

    assert error(found[0], exact[0]) < 0.01 < error(by_products[0], exact[0])
    assert error(found[1], exact[1]) < 0.01


@jax.jit
def other_losses(space, points, proxies):
    """Those that take no labels."""
    grouped, triplets = points.reshape(5, 2, DIM), np.arange(9).reshape(3, 3)
    return {
        "tuple_contrastive": objectives.tuple_contrastive(points, size=5, space=space),
        "koleo": objectives.koleo(points, space=space),
        "pairwise": objectives.pairwise_cross_entropy(grouped, space=space, temperature=1),
        "hier": objectives.hier(points, proxies[:, 0], triplets, np.zeros((2, 3, 6)), space=BALL),
    }


@both_spaces
def test_a_point_that_is_nan_makes_every_loss_nan(float64, space):
    """The step's check of its loss relies on it. One image is alone in its class."""
    points, proxies = batch(space)
    for row in (0, 6):
        spoilt = points.copy()
        spoilt[row, 1] = np.nan
        found = all_losses(space, spoilt, LABELS, proxies) | other_losses(space, spoilt, proxies)
        assert {*PAIR_LOSSES, *PROXY_LOSSES} & {*of(space), "tuple_contrastive"} <= {*found}
        assert [name for name, loss in found.items() if not np.isnan(loss)] == []


def test_one_image_and_one_class_are_no_error():
    """With labels that are a constant of the compiled function."""
    labels = jnp.zeros(1, int)

    @jax.jit
    def values(x):
        of_labels = {name: loss for name, loss in PAIR_LOSSES.items() if not loss.by_tuple}
        pairs = {name: loss.function(x, labels) for name, loss in of_labels.items()}
        single = {n: x[None] if "centres" in own.fields else x for n, own in PROXY_LOSSES.items()}
        of_proxies = {n: loss.function(x, labels, single[n]) for n, loss in PROXY_LOSSES.items()}
        return pairs, of_proxies

    pairs, proxies = values(np.eye(1, DIM))
    assert all(loss == 0 for loss in pairs.values())
    assert all(np.isfinite(loss) for loss in proxies.values())


def test_what_does_not_fit_is_an_error():
    eye = np.eye(4)
    for call, message in [
        (lambda: objectives.supcon(eye, [0, 0]), "one label for each image"),
        (lambda: objectives.supcon(eye, [0] * 4, samples_per_class=3), "samples_per_class is 3"),
        (lambda: objectives.proxy_nca(eye, [0, 1, 2, 4], eye), "4 classes, but labels"),
        (lambda: objectives.triplet(eye, [0] * 4, mining="easy"), "hard, semihard"),
        (lambda: objectives.arcface(eye, range(4), eye[:, None], space=BALL), "the sphere"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# Losses of the labels of a batch; that of tuples, whose order matters, has tests of its own.
NAMES = [*(name for name, loss in PAIR_LOSSES.items() if not loss.by_tuple), *PROXY_LOSSES]
DOUBLES = np.repeat(np.arange(6), 2)
SPEC = Spec(8, 2, 16, 5, 100, 12)
FEW = PoincareBall(0.1, 1.5)  # With a radius that clips some of the features.


def configured(name, **fields):
    if PROXY_LOSSES.get(name, PROXY_LOSSES["cosface"]).spaces:
        fields = {"space": "sphere", **fields}
    return losses.configured(name, **{"clip_radius": 1.5, **fields})


def call(config, features):
    objective = create_objective(config)
    started = objective.init(jax.random.key(0), SPEC)
    return jax.jit(functools.partial(loss_of, objective))(started, features, DOUBLES)


@pytest.fixture
def features():
    return np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)


@pytest.mark.parametrize("name", ["supcon", "proxy_anchor"])
def test_metrics_are_those_of_the_batch(name, features):
    loss, (state, told) = call(configured(name), features)
    points = np.asarray(FEW.embed(features))
    distances = np.asarray(FEW.distance(points[:, None], points)) + np.diag([np.inf] * 12)
    recall = np.mean(DOUBLES[np.argmin(distances, axis=1)] == DOUBLES)
    norms = np.linalg.norm(features, axis=1)
    wanted = {
        "feature_norm": norms.mean(),
        "embedding_norm": np.linalg.norm(points, axis=1).mean(),
        "clipped_share": np.mean(norms > 1.5),
        "batch_recall@1": recall,
    }
    assert np.isfinite(loss) and state == {}
    assert told.keys() == wanted.keys() and 0 < recall < 1 and 0 < wanted["clipped_share"] < 1
    for metric, value in wanted.items():
        np.testing.assert_allclose(told[metric], value, rtol=1e-5, err_msg=metric)


def test_an_angular_margin_needs_the_sphere_or_hier(features):
    with pytest.raises(UserError, match="space is poincare; it must be sphere for arcface"):
        create_objective(configured("arcface", space="poincare"))
    config = configured("hier+arcface", centres=2, hier_proxies=16, hier_neighbors=4)
    assert create_objective(config).base.space == SPHERE
    objective = create_objective(config)
    started = objective.init(jax.random.key(0), SPEC)
    proxies = started[0]["base"]["proxies"]
    assert proxies.shape == (8, 2, 5)

    @jax.jit
    def both(features):
        key = jax.random.key(1)
        found, (_, told) = loss_of(objective, started, features, DOUBLES, key=key)
        points, shown = SPHERE.embed(features), SPHERE.embed(proxies)
        expected = objectives.arcface(points, DOUBLES, shown) + 0.5 * told["hier_loss"]
        return (found, expected), told

    losses, told = both(features)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    ancestors = np.linalg.norm(objective.ball.embed(started[0]["hierarchy"]), axis=1)
    np.testing.assert_allclose(told["hier_proxy_norm"], np.mean(ancestors), rtol=1e-5)
    assert told["hier_loss"] > 0
    assert 0 < told["hier_anchors"] <= 1 and 0 < told["hier_proxy_anchors"] <= 1


def test_fields_reach_the_loss(features):
    fields = {"gamma": 0.3, "regularization": 0.5}
    objective = create_objective(configured("soft_triple", centres=3, **fields))
    params, _ = objective.init(jax.random.key(0), SPEC)

    @jax.jit
    def both(params, features):
        found, _ = loss_of(objective, (params, {}), features, DOUBLES)
        points, proxies = FEW.embed(features), FEW.embed(params["proxies"])
        return found, objectives.soft_triple(points, DOUBLES, proxies, space=FEW, **fields)

    found, expected = both(params, features)
    assert found == expected
    for name in NAMES:
        config = configured(name)
        settings = create_objective(config).function.keywords
        assert settings.items() <= dict(config.objective).items() and settings


def test_proxies_are_drawn_as_published_and_have_a_rate_of_their_own():
    for name, shape in (("proxy_anchor", (500, 64)), ("soft_triple", (500, 4, 64))):
        fields = {"centres": 4} if name == "soft_triple" else {}
        objective = create_objective(configured(name, proxy_rate=50.0, **fields))
        params, state = objective.init(jax.random.key(0), Spec(500, 2, 16, 64, 1000, 12))
        assert params["proxies"].shape == shape and state == {}
        count = np.prod(shape[:-1])
        np.testing.assert_allclose(np.std(params["proxies"]), (2 / count) ** 0.5, rtol=0.02)
        assert objective.groups == (Group(("proxies",), rate=50.0),)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_classes_are_for_losses_that_need_no_pairs(name, features):
    config = configured(name)
    validate(config)
    # Of tuples, too, no loss may take the order for classes.
    for sampling in ("tuples", "shuffled"):
        config.train.sampling = sampling
        assert create_objective(config).samples_per_class is None
    if name in PROXY_LOSSES or name == "contrastive":
        validate(config)
        _, (_, told) = call(config, features)
        assert "batch_recall@1" not in told
    else:
        with pytest.raises(UserError, match="this objective compares images of one class"):
            validate(config)


PUBLISHED = {
    "pairwise_cross_entropy": {"temperature": 0.2},
    "hypmix": {"sphere_temperature": 0.05, "ball_temperature": 0.2, "ball_weight": 3.0},
    "tuple_contrastive": {"margin": 0.85},
    "contrastive": {"margin": 0.5},
    "multi_similarity": {"alpha": 2.0, "beta": 50.0, "base": 0.5, "epsilon": 0.1},
    "circle": {"scale": 80.0, "margin": 0.4},
    "scalable_nca": {"temperature": 0.05},
    "supcon": {"temperature": 0.1},
    "triplet": {"margin": 0.2},
    "arcface": {"scale": 64.0, "margin": 0.5, "cosine_margin": 0.0, "centres": 1},
    "cosface": {"scale": 64.0, "margin": 0.35, "centres": 1},
    "proxy_anchor": {"margin": 0.1, "alpha": 32.0, "proxy_rate": 100.0},
    "proxy_nca": {"temperature": 1.0},
    "normalized_softmax": {"temperature": 0.05},
    "soft_triple": {"scale": 20.0, "gamma": 0.1, "margin": 0.01, "regularization": 0.2},
    "hier+supcon": {"hier_weight": 0.5, "hier_neighbors": 20, "hier_triplets": 50}
    | {"hier_margin": 0.1, "hier_temperature": 0.1, "hier_proxies": 512, "hier_rate": 50.0},
    "cones+supcon": {"cone_weight": 0.2, "cone_negatives": 1.0, "cone_margin": 0.01}
    | {"cone_radius": 0.1, "cone_rate": 1.0},
    "matryoshka+supcon": {"dims": (8, 16, 32, 64)},
}


def test_numbers_are_by_default_those_of_the_papers():
    for name, numbers in PUBLISHED.items():
        fields = objectives.OBJECTIVES[name].fields
        assert {field: fields[field].default for field in numbers} == numbers, name


def test_proxies_may_be_points_of_a_ball_that_stays_as_it_is():
    objective = create_objective(configured("proxy_anchor", proxy_optimizer="riemannian"))
    assert objective.groups == (Group(("proxies",), rate=100.0, ball_c=0.1),)
    features, points = (
        each.init(jax.random.key(0), Spec(8, 2, 16, 5, 100, 12))[0]["proxies"]
        for each in (create_objective(configured("proxy_anchor")), objective)
    )
    np.testing.assert_array_equal(points, FEW.embed(features))
    for fields in ({"space": "sphere"}, {"space": "lorentz"}, {"learn_c": True}):
        with pytest.raises(UserError, match="proxy_optimizer is riemannian"):
            create_objective(configured("proxy_anchor", proxy_optimizer="riemannian", **fields))
