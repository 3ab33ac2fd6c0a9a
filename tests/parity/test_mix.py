"""HypMix against a transcription of its paper, in float64 and term by term."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import default_config
from hypjax.objectives import create_objective
from hypjax.types import Batch, Outputs

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")

C, RADIUS, TAU_E, TAU_H = 0.1, 2.3, 0.05, 0.2
CLASSES, SAMPLES, DIM = 5, 3, 16
FEATURES = np.random.default_rng(0).normal(size=(CLASSES, SAMPLES, DIM))


def into_ball(x):
    """Clipping (Hyp-ViT, Eq. 6) and the exponential map at the origin (Eq. 3)."""
    x = x * torch.clamp(RADIUS / torch.linalg.norm(x), max=1.0)
    norm = torch.linalg.norm(x)
    return torch.tanh(C**0.5 * norm) * x / (C**0.5 * norm)


def hyperbolic_distance(x, y):
    """2/√c · artanh(√c ‖−x ⊕ y‖), by Möbius addition (Hyp-ViT, Eq. 1 and 2)."""
    x = -x
    xy, xx, yy = torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)
    added = (1 + 2 * C * xy + C * yy) * x + (1 - C * xx) * y
    added = added / (1 + 2 * C * xy + C**2 * xx * yy)
    return 2 / C**0.5 * torch.atanh(C**0.5 * torch.linalg.norm(added))


def transcribed(features, weight):
    """Eq. 9 and 10 with a temperature for each distance, summed over ordered pairs of subsets."""
    unit = [[u / torch.linalg.norm(u) for u in of_class] for of_class in features]

    def similarity(a, b):
        cosine_distance = 2 - 2 * torch.dot(a, b)
        distance = hyperbolic_distance(into_ball(a), into_ball(b))
        return -cosine_distance / (2 * TAU_E) - weight * distance / TAU_H

    total = 0.0
    for i, j in itertools.permutations(range(SAMPLES), 2):
        for k in range(CLASSES):
            anchor = unit[k][i]
            positive = similarity(anchor, unit[k][j])
            others = [
                similarity(anchor, unit[other][subset])
                for other in range(CLASSES)
                for subset in (i, j)
                if other != k
            ]
            terms = torch.stack([positive, *others])
            total = total - (positive - torch.logsumexp(terms, 0)) / CLASSES
    return total


@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_value_and_gradient_are_those_of_the_paper(float64, weight):
    config = default_config("hypmix")
    config.objective.update(
        c=C, clip_radius=RADIUS, sphere_temperature=TAU_E, ball_temperature=TAU_H
    )
    config.objective.ball_weight = weight
    config.train.samples_per_class = SAMPLES
    objective = create_objective(config)
    labels = jnp.repeat(jnp.arange(CLASSES), SAMPLES)
    batch = Batch(None, labels, labels, None)

    @jax.jit
    @jax.value_and_grad
    def ours(features):
        outputs = Outputs(pooled=None, projected=features.reshape(-1, DIM))
        return objective.loss({}, {}, outputs, None, batch, jax.random.key(0))[0]

    x = torch.tensor(FEATURES, requires_grad=True)
    expected = transcribed(x, weight)
    expected.backward()
    value, gradient = ours(FEATURES)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-10)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-7, atol=1e-9)
