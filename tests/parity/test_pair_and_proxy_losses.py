"""Losses of pairs and proxies against pytorch-metric-learning, on the sphere in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import objectives
from hypjax.geometry import Sphere

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
pml = pytest.importorskip(
    "pytorch_metric_learning", reason="needs the parity extra: pytorch-metric-learning"
)
from pytorch_metric_learning import distances, losses, miners, reducers  # noqa: E402

CLASSES, CENTRES, DIM = 9, 4, 7
LABELS = np.array([0, 4, 0, 1, 7, 7, 2, 0, 4, 3, 7, 8])  # 1, 2, 3 and 8 have one image.
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(len(LABELS), DIM)) + 1.5  # Not all far apart.
IDENTICAL = np.repeat(FEATURES[:1], len(LABELS), axis=0)
COSINE = distances.CosineSimilarity()
CHORD = distances.LpDistance(normalize_embeddings=True, p=2, power=2)


class Sum(reducers.MeanReducer):
    """The sum of all losses, divided by the number of images."""

    def element_reduction(self, losses, *_):
        return torch.sum(losses) / len(LABELS)


@pytest.fixture(autouse=True)
def double(float64):
    """Computes in float64 in both libraries."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ours(function, features, proxies=None, **settings):
    """Value of a loss, and its gradients by the features and by the proxies, before embedding."""
    space = Sphere()

    @jax.jit
    def loss(features, proxies):
        shown = () if proxies is None else (space.embed(proxies),)
        return function(space.embed(features), jnp.asarray(LABELS), *shown, **settings)

    arguments = (0,) if proxies is None else (0, 1)
    found = jax.value_and_grad(loss, argnums=arguments)(features, proxies)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    return found


def theirs(loss, features, miner=None):
    """The same of a loss of pytorch-metric-learning."""
    x = torch.tensor(features, requires_grad=True)
    labels = torch.tensor(LABELS)
    value = loss(x, labels, miner(x, labels) if callable(miner) else miner)
    value.backward()
    return value.item(), (x.grad.numpy(), *(rows(p.grad) for p in loss.parameters()))


def rows(parameter):
    """Proxies, which some losses hold as columns."""
    values = parameter.detach().numpy()
    return values if values.shape[1] == DIM else values.T


def assert_equal(ours, theirs):
    value, gradients = theirs
    np.testing.assert_allclose(ours[0], value, rtol=1e-9, atol=1e-12)
    for own, other in zip(ours[1], gradients, strict=True):
        other = other.reshape(own.shape)
        np.testing.assert_allclose(own, other, rtol=1e-7, atol=1e-9 * (np.abs(other).max() + 1))


DEGREES = 28.6  # The other library's margin of ArcFace.
arcface = functools.partial(objectives.arcface, margin=np.radians(DEGREES))
CASES = {
    "arcface": (arcface, lambda: losses.ArcFaceLoss(CLASSES, DIM)),
    "arcface of a wide margin": (  # θ + m exceeds π for some images.
        functools.partial(objectives.arcface, margin=np.radians(85), scale=10),
        lambda: losses.ArcFaceLoss(CLASSES, DIM, margin=85, scale=10),
    ),
    "arcface of sub-centres": (
        arcface,
        lambda: losses.SubCenterArcFaceLoss(
            num_classes=CLASSES, embedding_size=DIM, sub_centers=CENTRES
        ),
    ),
    "circle": (objectives.circle, losses.CircleLoss),
    "cosface": (objectives.cosface, lambda: losses.CosFaceLoss(CLASSES, DIM)),
    "contrastive": (
        functools.partial(objectives.contrastive, margin=0.5),
        lambda: losses.ContrastiveLoss(1, 0.5, distance=COSINE, reducer=Sum()),
    ),
    "multi_similarity": (
        functools.partial(objectives.multi_similarity, mining=False),
        lambda: losses.MultiSimilarityLoss(2, 50, 0.5),
    ),
    "supcon": (objectives.supcon, lambda: losses.SupConLoss(0.1)),
    "scalable_nca": (
        objectives.scalable_nca,
        lambda: losses.NCALoss(softmax_scale=20, distance=COSINE),
    ),
    "proxy_anchor": (objectives.proxy_anchor, lambda: losses.ProxyAnchorLoss(CLASSES, DIM)),
    "proxy_nca": (
        functools.partial(objectives.proxy_nca, temperature=1 / 9),
        lambda: losses.ProxyNCALoss(CLASSES, DIM, softmax_scale=9),
    ),
    "normalized_softmax": (
        objectives.normalized_softmax,
        lambda: losses.NormalizedSoftmaxLoss(CLASSES, DIM, temperature=0.05),
    ),
    "soft_triple": (
        functools.partial(objectives.soft_triple, regularization=0),
        lambda: losses.SoftTripleLoss(CLASSES, DIM, centers_per_class=CENTRES),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name):
    function, theirs_of = CASES[name]
    loss = theirs_of()
    proxies = [rows(parameter).copy() for parameter in loss.parameters()]
    if name.startswith(("arcface", "cosface", "soft_triple")):
        proxies = [proxies[0].reshape(CLASSES, -1, DIM)]
    for features in (FEATURES, IDENTICAL):
        loss.zero_grad()
        assert_equal(ours(function, features, *proxies), theirs(loss, features))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.3])
def test_multi_similarity_with_its_miner(epsilon):
    found = ours(objectives.multi_similarity, FEATURES, epsilon=epsilon)
    miner = miners.MultiSimilarityMiner(epsilon)
    assert_equal(found, theirs(losses.MultiSimilarityLoss(2, 50, 0.5), FEATURES, miner=miner))
    everything = ours(objectives.multi_similarity, FEATURES, mining=False)
    assert abs(found[0] - everything[0]) > 1e-3


def test_hard_triplets():
    loss = losses.TripletMarginLoss(0.2, distance=CHORD, reducer=reducers.MeanReducer())
    expected = theirs(loss, FEATURES, miner=miners.BatchHardMiner(distance=CHORD))
    assert expected[0] > 0.1
    assert_equal(ours(objectives.triplet, FEATURES, margin=0.2), expected)
    ours(objectives.triplet, IDENTICAL)


def test_semihard_triplets():
    """Of the miner's triplets, the nearest negative of each pair; the mean is over all pairs."""
    x, labels = torch.tensor(FEATURES), torch.tensor(LABELS)
    margin, d = 1.0, CHORD(x).numpy()
    mined = miners.TripletMarginMiner(margin, "semihard", distance=CHORD)(x, labels)
    nearest = {}
    for a, p, n in np.stack(mined).T:
        if (a, p) not in nearest or d[a, n] < d[a, nearest[a, p]]:
            nearest[a, p] = n
    chosen = torch.tensor([(a, p, n) for (a, p), n in nearest.items()]).T
    pairs = int(np.sum(LABELS[:, None] == LABELS) - len(LABELS))
    assert 2 < len(nearest) < pairs
    loss = losses.TripletMarginLoss(margin, distance=CHORD, reducer=reducers.MeanReducer())
    value, (slope,) = theirs(loss, FEATURES, miner=tuple(chosen))
    share = len(nearest) / pairs
    found = ours(objectives.triplet, FEATURES, margin=margin, mining="semihard")
    assert_equal(found, (share * value, (share * slope,)))
    ours(objectives.triplet, IDENTICAL, mining="semihard")


def test_weights_of_negatives_are_the_gradient_of_the_loss():
    """HypMix's p(x⁻) for a positive and 11 negatives, by the loss of its Eq. 5."""
    apart = torch.tensor(RANDOM.uniform(1, 3, size=12), requires_grad=True)
    terms = torch.exp(-apart / 0.2)
    (-0.2 * torch.log(terms[0] / terms.sum())).backward()
    positives = np.arange(12)[None] == 0
    weights = objectives.negative_weights(
        apart.detach().numpy()[None], positives, ~positives, temperature=0.2
    )
    np.testing.assert_allclose(weights[0, 1:], -apart.grad[1:], rtol=1e-6)
    np.testing.assert_allclose(weights.sum(), apart.grad[0], rtol=1e-6)
