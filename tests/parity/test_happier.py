"""HAPPIER's loss against its formulas, transcribed in PyTorch pair by pair, with gradients."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.losses import configured, loss_of, objective_of
from tests.objectives.test_happier import SPEC

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")


def smooth_step(t):
    if t <= 0.05:
        return torch.sigmoid(t / 0.01) + (0.5 if t > 0 else 0)
    return 100 * (t - 0.05) + 1.44


def average_precision(s, rel):
    """Smooth H-AP of a query with similarities s; relevances are fractions, so ties are exact."""
    items, total = range(len(rel)), 0
    for k in (k for k in items if rel[k]):
        not_after = [j for j in items if s[j] >= s[k]]
        hrank = float(sum(min(rel[j], rel[k]) for j in not_after))
        at_least = sum(rel[j] >= rel[k] for j in not_after)
        less = sum(smooth_step(s[j] - s[k]) for j in items if rel[j] < rel[k])
        total = total + hrank / (at_least + less)
    return total / float(sum(rel))


def transcribed(features, proxies, labels, coarse):
    """0.9 · (1 − mean smooth H-AP) + 0.1 · the normalised softmax."""
    z, weights = (torch.nn.functional.normalize(x, dim=-1) for x in (features, proxies))
    columns = np.stack([labels, *coarse[:, labels]])
    levels = (columns[:, :, None] == columns[:, None]).sum(axis=0).tolist()
    rel = [[Fraction(each, row.count(each) * len(columns)) for each in row] for row in levels]
    hap = sum(average_precision(*row) for row in zip(z @ z.T, rel, strict=True)) / len(z)
    softmax = torch.nn.functional.cross_entropy(z @ weights.T / 0.05, torch.tensor(labels))
    return 0.9 * (1 - hap) + 0.1 * softmax


PAIRS = np.repeat(np.arange(6), 2)
CASES = {
    "SOP": (PAIRS, [np.arange(6) // 3]),
    "groceries": (PAIRS, [np.arange(6) // 2, np.arange(6) // 4]),
    # For the first class, 3/3 · 1/3 = 2/3 · 1/2.
    "equal relevances": (np.array([0, 0, 0, 1, 1, 2, 3]), [[0, 0, 1, 2], [0, 0, 0, 0]]),
    # For the first class, 2/2 · 1/3 < 1/2 · 1/1.
    "coarse first": (np.array([0, 0, 0, 1, 2, 2, 3]), [[0, 0, 1, 1]]),
}


@pytest.mark.parametrize(("labels", "coarse"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_value_and_gradients_are_those_of_the_transcription(float64, labels, coarse, spread):
    rng, coarse = np.random.default_rng(3), np.array(coarse)
    config = configured("happier", space="sphere")
    config.train.sampling = "shuffled"  # Classes differ in size.
    built = objective_of(config)
    features = rng.normal(size=(6,)) + spread * rng.normal(size=(len(labels), 6))
    sizes = SPEC._replace(classes=coarse.shape[1], head_dim=6, coarse_labels=coarse.tolist())
    params, state = built.init(jax.random.key(0), sizes)
    proxies = np.array(params["base"]["proxies"], float)
    given = [torch.tensor(x, requires_grad=True) for x in (features, proxies)]
    expected = transcribed(*given, labels, coarse)
    expected.backward()

    def loss(features, proxies):
        started = {"base": {"proxies": proxies}}, state
        return loss_of(built, started, features, jnp.asarray(labels))[0]

    actual, slopes = jax.jit(jax.value_and_grad(loss, (0, 1)))(features, proxies)
    np.testing.assert_allclose(actual, expected.item(), rtol=1e-10)
    for slope, each in zip(slopes, given, strict=True):
        np.testing.assert_allclose(slope, each.grad.numpy(), rtol=1e-7, atol=1e-10)
        assert np.abs(slope).max() > 1e-3
