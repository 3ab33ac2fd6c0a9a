"""Losses of pairs and proxies against pytorch-metric-learning, on the sphere in float64."""

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

CLASSES, DIM = 9, 7
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
    value, gradients = jax.value_and_grad(loss, argnums=arguments)(features, proxies)
    return value, gradients


def theirs(loss, features, parameter=None, miner=None, transposed=False):
    """The same of a loss of pytorch-metric-learning."""
    x = torch.tensor(features, requires_grad=True)
    labels = torch.tensor(LABELS)
    value = loss(x, labels, miner(x, labels) if callable(miner) else miner)
    value.backward()
    if parameter is None:
        return value.item(), (x.grad.numpy(),)
    slope = parameter.grad.numpy()
    return value.item(), (x.grad.numpy(), slope.T if transposed else slope)


def assert_equal(ours, theirs):
    value, gradients = theirs
    np.testing.assert_allclose(ours[0], value, rtol=1e-9, atol=1e-12)
    for own, other in zip(ours[1], gradients, strict=True):
        other = other.reshape(own.shape)
        np.testing.assert_allclose(own, other, rtol=1e-7, atol=1e-9 * (np.abs(other).max() + 1))


def assert_finite(result):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result))


PAIRS = {
    "contrastive": (
        objectives.contrastive,
        {"margin": 0.5},
        lambda: losses.ContrastiveLoss(1, 0.5, distance=COSINE, reducer=Sum()),
    ),
    "multi_similarity": (
        objectives.multi_similarity,
        {"mining": False},
        lambda: losses.MultiSimilarityLoss(2, 50, 0.5),
    ),
    "supcon": (objectives.supcon, {"temperature": 0.1}, lambda: losses.SupConLoss(0.1)),
    "scalable_nca": (
        objectives.scalable_nca,
        {"temperature": 0.05},
        lambda: losses.NCALoss(softmax_scale=20, distance=COSINE),
    ),
}


@pytest.mark.parametrize("features", [FEATURES, IDENTICAL], ids=["random", "identical"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_of_pairs(name, features):
    function, settings, theirs_of = PAIRS[name]
    found = ours(function, features, **settings)
    assert_finite(found)
    assert_equal(found, theirs(theirs_of(), features))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.3])
def test_multi_similarity_with_its_miner(epsilon):
    """An image that has lost all pairs counts as 0 in both."""
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
    assert_finite(ours(objectives.triplet, IDENTICAL))


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
    assert_finite(ours(objectives.triplet, IDENTICAL, mining="semihard"))


PROXIES = {
    "proxy_anchor": (objectives.proxy_anchor, {}, losses.ProxyAnchorLoss, {}, "proxies"),
    "proxy_nca": (
        objectives.proxy_nca,
        {"temperature": 1 / 9},
        losses.ProxyNCALoss,
        {"softmax_scale": 9},
        "proxies",
    ),
    "normalized_softmax": (
        objectives.normalized_softmax,
        {},
        losses.NormalizedSoftmaxLoss,
        {"temperature": 0.05},
        "W",
    ),
    "soft_triple": (
        objectives.soft_triple,
        {"regularization": 0},
        losses.SoftTripleLoss,
        {"centers_per_class": 4},
        "fc",
    ),
}


@pytest.mark.parametrize("features", [FEATURES, IDENTICAL], ids=["random", "identical"])
@pytest.mark.parametrize("name", PROXIES)
def test_a_loss_of_proxies(name, features):
    function, settings, kind, arguments, parameter = PROXIES[name]
    loss = kind(CLASSES, DIM, **arguments)
    held = getattr(loss, parameter)
    transposed = parameter != "proxies"
    proxies = held.detach().numpy().T if transposed else held.detach().numpy()
    centres = arguments.get("centers_per_class")
    shape = (CLASSES, DIM) if centres is None else (CLASSES, centres, DIM)
    found = ours(function, features, proxies.reshape(shape), **settings)
    assert_finite(found)
    assert_equal(found, theirs(loss, features, held, transposed=transposed))
