"""HAPPIER's loss against its formulas, transcribed in PyTorch pair by pair, with gradients."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.objectives import relevances, smooth_hap
from hypjax.objectives.comparisons import SPHERE, compare_images, similarity
from tests.helpers.losses import loss_of, objective
from tests.objectives.test_happier import SPEC

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")

TAU, RHO, DELTA = 0.01, 100.0, 0.05


def smooth_step(t):
    if t <= 0:
        return torch.sigmoid(t / TAU)
    return 0.5 + torch.sigmoid(t / TAU) if t <= DELTA else RHO * (t - DELTA) + 1.44


def average_precision(s, rel):
    """Smooth H-AP of a query with similarities s; relevances are fractions, so ties are exact."""
    items = range(len(rel))
    total = 0
    for k in (k for k in items if rel[k]):
        not_after = [j for j in items if s[j] >= s[k]]
        hrank = float(sum(min(rel[j], rel[k]) for j in not_after))
        at_least = sum(rel[j] >= rel[k] for j in not_after)
        less = sum(smooth_step(s[j] - s[k]) for j in items if rel[j] < rel[k])
        total = total + hrank / (at_least + less)
    return total / float(sum(rel))


def exact_relevances(labels):
    levels = (labels[:, :, None] == labels[:, None]).sum(axis=0).tolist()
    return [[Fraction(each, row.count(each) * len(labels)) for each in row] for row in levels]


def transcribed(z, labels):
    z = torch.nn.functional.normalize(z, dim=-1)
    s, rel = z @ z.T, exact_relevances(labels)
    return 1 - sum(average_precision(*row) for row in zip(s, rel, strict=True)) / len(z)


def on_the_sphere(features, labels):
    points = SPHERE.embed(features)
    s = similarity(compare_images(points, labels[0], samples_per_class=1).distances)
    return smooth_hap(s, relevances(labels))


FINE = np.repeat(np.arange(6), 2)
LABELS = {
    "SOP": np.stack([FINE, FINE // 3]),
    "groceries": np.stack([FINE, FINE // 2, FINE // 4]),  # Nine relatives and two, three levels.
    "one level": FINE[None],
    # 1/3·1/1 and 3/3·1/3; then 2/3·1/2: a level may be as relevant as a finer one, or more.
    "equal relevances": np.array([[0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 2], [0] * 7]),
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_value_and_gradient_are_those_of_the_transcription(float64, labels, spread):
    rng = np.random.default_rng(3)
    features = rng.normal(size=(6,)) + spread * rng.normal(size=(labels.shape[1], 6))
    given = torch.tensor(features, requires_grad=True)
    expected = transcribed(given, labels)
    expected.backward()
    loss, slope = jax.jit(jax.value_and_grad(on_the_sphere))(features, jnp.asarray(labels))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-10)
    np.testing.assert_allclose(slope, given.grad.numpy(), rtol=1e-8, atol=1e-10)
    assert np.abs(slope).max() > 1e-3


@pytest.mark.parametrize("space", ["sphere", "poincare"])
def test_the_objective_adds_the_softmax_of_the_classes(space):
    built = objective("happier", space=space, weight=0.7)
    params, state = built.init(jax.random.key(0), SPEC)
    labels = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    features = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    loss, (_, metrics) = loss_of(built, (params, state), features, labels)
    points, proxies = map(built.space.embed, (features, params["base"]["proxies"]))
    near, logits = (
        torch.tensor(np.array(1 - built.space.distance(points[:, None], others) / 2)).double()
        for others in (points, proxies)
    )
    softmax = torch.nn.functional.cross_entropy(logits / 0.05, torch.tensor(labels))
    levels = np.stack([labels, *(np.array(level)[labels] for level in SPEC.coarse_labels)])
    rows = zip(near, exact_relevances(levels), strict=True)
    hap = 1 - sum(average_precision(*row) for row in rows) / len(near)
    np.testing.assert_allclose(metrics["softmax_loss"], softmax, rtol=1e-4)
    np.testing.assert_allclose(metrics["hap_loss"], hap, rtol=1e-4)
    np.testing.assert_allclose(loss, 0.7 * hap + 0.3 * softmax, rtol=1e-4)
