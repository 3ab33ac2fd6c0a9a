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
from pytorch_metric_learning import distances, losses, reducers  # noqa: E402

CLASSES, CENTRES, DIM = 9, 4, 7
LABELS = np.array([0, 4, 0, 1, 7, 7, 2, 0, 4, 3, 7, 8])  # 1, 2, 3 and 8 have one image.
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(len(LABELS), DIM)) + 1.5  # Not all far apart.
IDENTICAL = np.repeat(FEATURES[:1], len(LABELS), axis=0)
COSINE = distances.CosineSimilarity()


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


def theirs(loss, features):
    """The same of a loss of pytorch-metric-learning."""
    x = torch.tensor(features, requires_grad=True)
    value = loss(x, torch.tensor(LABELS))
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
