"""Losses of pairs and proxies against loops over images, and on degenerate batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import objectives
from hypjax.geometry import PoincareBall, Sphere
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES

SPHERE, BALL = Sphere(), PoincareBall(0.1, 2.3)
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


PAIRS = {
    "contrastive": (objectives.contrastive, loop_contrastive, {"margin": 0.3}),
    "multi_similarity": (objectives.multi_similarity, loop_multi_similarity, {"epsilon": 0.05}),
    "multi_similarity, all": (
        objectives.multi_similarity,
        loop_multi_similarity,
        {"mining": False},
    ),
    "scalable_nca": (objectives.scalable_nca, loop_scalable_nca, {"temperature": 0.3}),
    "supcon": (objectives.supcon, loop_supcon, {"temperature": 0.3}),
    "triplet": (objectives.triplet, loop_hard, {"margin": 0.4}),
    "triplet, semihard": (
        functools.partial(objectives.triplet, mining="semihard"),
        loop_semihard,
        {"margin": 0.4},
    ),
}
PROXIES = {
    "normalized_softmax": (objectives.normalized_softmax, loop_softmax, {"temperature": 0.3}),
    "proxy_anchor": (objectives.proxy_anchor, loop_proxy_anchor, {"alpha": 8.0, "margin": 0.2}),
    "proxy_nca": (objectives.proxy_nca, loop_proxy_nca, {"temperature": 0.5}),
    "soft_triple": (objectives.soft_triple, loop_soft_triple, {"scale": 5.0, "gamma": 0.2}),
}
ALL = {**PAIRS, **PROXIES}


def batch(space, seed=0, dtype=np.float64):
    """Points of the batch, and proxies of all classes, one of them near an image."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(len(LABELS), DIM)) + 0.7
    proxies = rng.normal(size=(CLASSES, CENTRES, DIM))
    return [np.asarray(space.embed(x.astype(dtype))) for x in (features, proxies)]


def compute(name, space, points, labels, proxies, **settings):
    """The loss with its settings."""
    function, _, own = ALL[name]
    if name in PAIRS:
        return function(points, labels, space=space, **own, **settings)
    shown = proxies if name == "soft_triple" else proxies[:, 0]
    return function(points, labels, shown, space=space, **own)


# One program for all losses, since these tests spend their time on compilation.
@jax.jit
def all_losses(space, points, labels, proxies):
    return {name: compute(name, space, points, labels, proxies) for name in ALL}


@jax.jit
def all_slopes(space, features, labels, proxies):
    """Value and gradients of each loss, before the space embeds its arguments."""

    def loss(features, proxies, name):
        return compute(name, space, space.embed(features), labels, space.embed(proxies))

    slope = jax.value_and_grad(loss, argnums=(0, 1))
    return {name: slope(features, proxies, name) for name in ALL}


@pytest.mark.parametrize("space", [SPHERE, BALL], ids=["sphere", "ball"])
def test_losses_equal_plain_loops_in_any_order_of_images(float64, space):
    points, proxies = batch(space)
    among = np.asarray(space.distance(points[:, None], points))
    to_proxies = np.array(space.distance(points[:, None, None], proxies))
    alike = LABELS[:, None] == LABELS
    between = lambda k, s, t: space.separation(proxies[k, s], proxies[k, t])  # noqa: E731
    order = np.random.default_rng(1).permutation(len(LABELS))
    found = all_losses(space, points, LABELS, proxies)
    shuffled = all_losses(space, points[order], LABELS[order], proxies)
    for name, (_, loop, settings) in ALL.items():
        if name in PAIRS:
            expected = loop(among, alike & ~np.eye(len(among), dtype=bool), ~alike, **settings)
        elif name == "soft_triple":
            expected = loop(to_proxies, LABELS, between, **settings)
        else:
            expected = loop(to_proxies[..., :1], LABELS, **settings)
        np.testing.assert_allclose(found[name], expected, rtol=1e-10, err_msg=name)
        np.testing.assert_allclose(shuffled[name], expected, rtol=1e-10, err_msg=name)
        assert expected > 0, name


@pytest.mark.parametrize("space", [SPHERE, BALL], ids=["sphere", "ball"])
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
        loss = functools.partial(objectives.triplet, mining="semihard", margin=1.0, space=SPHERE)
        return loss(points, labels), loss(points, labels, samples_per_class=2)

    np.testing.assert_allclose(*both(points[:8]), rtol=1e-10)


@pytest.mark.parametrize("space", [SPHERE, BALL], ids=["sphere", "ball"])
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
    for name in ("multi_similarity", "scalable_nca", "supcon", "triplet", "triplet, semihard"):
        assert lonely[name][0] == 0, name
        assert not np.any(lonely[name][1][0]), name


@pytest.mark.slow
def test_gradients_of_close_images_keep_their_digits():
    """Adjacent images of a class are compared by subtraction, and images with their proxies."""
    space, rng = BALL, np.random.default_rng(0)
    centres = rng.normal(size=(6, 1, 16))
    features = (centres + 1e-4 * rng.normal(size=(6, 3, 16))).reshape(18, 16).astype(np.float32)
    labels, proxies = np.repeat(np.arange(6), 3), centres[:, 0].astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def slopes(samples, features, proxies):
        def contrastive(features):
            points = space.embed(features)
            # Images of different classes are too far apart to repel each other.
            return objectives.contrastive(
                points, labels, space=space, margin=0.99, samples_per_class=samples
            )

        def proxy_nca(features):
            points = space.embed(features)
            return objectives.proxy_nca(
                points, labels, space.embed(proxies), space=space, temperature=1.0
            )

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
    hier = objectives.hier(points, proxies[:, 0], triplets, np.zeros((2, 3, 6)), space=BALL)
    return {
        "tuple_contrastive": objectives.tuple_contrastive(points, size=5, space=space),
        "koleo": objectives.koleo(points, space=space),
        "pairwise": objectives.pairwise_cross_entropy(grouped, space=space, temperature=1),
        "hier": hier,
    }


@pytest.mark.parametrize("space", [SPHERE, BALL], ids=["sphere", "ball"])
def test_a_point_that_is_nan_makes_every_loss_nan(float64, space):
    """The step's check of its loss relies on it. One image is alone in its class."""
    points, proxies = batch(space)
    for row in (0, 6):
        spoilt = points.copy()
        spoilt[row, 1] = np.nan
        found = all_losses(space, spoilt, LABELS, proxies) | other_losses(space, spoilt, proxies)
        assert {*PAIR_LOSSES, *PROXY_LOSSES} <= {*found}
        assert [name for name, loss in found.items() if not np.isnan(loss)] == []


def test_one_image_and_one_class_are_no_error():
    """With labels that are a constant of the compiled function."""
    labels = jnp.zeros(1, int)

    @jax.jit
    def losses(x):
        of_labels = {name: loss for name, loss in PAIR_LOSSES.items() if not loss.by_tuple}
        pairs = {name: loss.function(x, labels) for name, loss in of_labels.items()}
        single = {name: x[None] if loss.centres else x for name, loss in PROXY_LOSSES.items()}
        of_proxies = {n: loss.function(x, labels, single[n]) for n, loss in PROXY_LOSSES.items()}
        return pairs, of_proxies

    pairs, proxies = losses(np.eye(1, DIM))
    assert all(loss == 0 for loss in pairs.values())
    assert all(np.isfinite(loss) for loss in proxies.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: objectives.supcon(np.eye(4), [0, 0]), r"one label for each image, got \(4, 4\)"),
        (
            lambda: objectives.supcon(np.eye(4), [0, 0, 1, 1], samples_per_class=3),
            "samples_per_class is 3, for 4 images",
        ),
        (lambda: objectives.proxy_nca(np.eye(2), [0, 2], np.eye(2)), "2 classes, but labels from"),
        (lambda: objectives.triplet(np.eye(2), [0, 0], mining="easy"), "one of hard, semihard"),
    ],
)
def test_what_does_not_fit_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
