"""Entailment cones against MERU's formulas, transcribed in PyTorch, with their gradients."""

import jax
import numpy as np
import pytest

from hypjax.objectives import entailment

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")

K = 0.1


def transcribed(x, y, c):
    """Mean of max(0, ext(x, y) − aper(x)) (Desai et al., ICML 2023, Section 3)."""
    x_time, y_time = (torch.sqrt(1 / c + torch.sum(z**2, dim=-1)) for z in (x, y))
    inner = c * (torch.sum(x * y, dim=-1) - x_time * y_time)
    length = torch.linalg.norm(x, dim=-1)
    angle = torch.acos((y_time + x_time * inner) / (length * torch.sqrt(inner**2 - 1)))
    aperture = torch.asin(2 * K / (c**0.5 * length))
    return torch.mean(torch.relu(angle - aperture))


@pytest.mark.parametrize("c", [0.1, 2.0])
def test_the_loss_and_its_gradients_are_those_of_the_transcription(float64, c):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(40, 6)) / np.sqrt(c)
    x = 0.3 * y + 0.2 * rng.normal(size=(40, 6)) / np.sqrt(c)
    given = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (x, y, c)]
    expected = transcribed(*given)
    expected.backward()

    def loss(x, y, c):
        return entailment(y, np.arange(len(y)), x, c=c, radius=K)

    actual, slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, y, c)
    np.testing.assert_allclose(actual, expected.item(), rtol=1e-10)
    for slope, each in zip(slopes, given, strict=True):
        np.testing.assert_allclose(slope, each.grad.numpy(), rtol=1e-8, atol=1e-12)
