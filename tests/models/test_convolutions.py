"""Depthwise convolutions against their definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models.depthwise import depthwise_conv


def correlated(x, kernel, stride, padding):
    """Depthwise correlation in float64, and its windows [b, h, w, c, k, k]."""
    x = np.pad(np.asarray(x, np.float64), ((0, 0), *padding, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], (1, 2))
    windows = windows[:, ::stride, ::stride]
    return np.einsum("bhwcij,ijc->bhwc", windows, np.asarray(kernel, np.float64)), windows


@pytest.mark.parametrize(
    ("side", "stride", "padding", "channels"),
    [
        (7, 1, ((3, 3), (3, 3)), 700),  # On CPUs, more totals than are summed at once.
        (5, 2, ((1, 2), (2, 2)), 3),
        (3, 2, ((0, 1), (1, 1)), 3),
        (3, 3, ((0, 0), (2, 0)), 3),
    ],
)
def test_depthwise_convolution_and_its_gradients_are_those_of_the_definition(
    side, stride, padding, channels
):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 9, channels)).astype(np.float32)
    kernel = rng.normal(size=(side, side, channels)).astype(np.float32)
    expected, windows = correlated(x, kernel, stride, padding)
    slope = rng.normal(size=expected.shape).astype(np.float32)

    @jax.jit
    def values(x, kernel, slope):
        run = functools.partial(depthwise_conv, stride=stride, padding=padding)
        value, pull = jax.vjp(run, x, kernel)
        return value, *pull(slope)

    value, by_x, by_kernel = values(x, kernel, slope)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    np.testing.assert_allclose(by_kernel, np.einsum("bhwcij,bhwc->ijc", windows, slope), atol=1e-4)
    # The map is linear: its gradient by x is the adjoint.
    other = rng.normal(size=x.shape)
    image, _ = correlated(other, kernel, stride, padding)
    np.testing.assert_allclose(np.sum(by_x * other), np.sum(slope * image), rtol=1e-5)
    half = [each.astype(jnp.bfloat16) for each in (x, kernel, slope)]
    for rough, exact in zip(values(*half), (value, by_x, by_kernel), strict=True):
        assert rough.dtype == jnp.bfloat16
        np.testing.assert_allclose(rough, exact, atol=0.02 * np.abs(exact).max())
