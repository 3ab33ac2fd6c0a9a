"""Depthwise convolutions, ConvNeXt and EfficientNet-Lite, and weights in packages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models import ConvNeXt
from hypjax.models.architectures import encoder_shapes
from hypjax.models.depthwise import depthwise_conv


def correlated(x, kernel, stride, padding):
    """Depthwise correlation in float64, and its windows [b, h, w, c, k, k]."""
    x = np.pad(np.asarray(x, np.float64), ((0, 0), *padding, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], (1, 2))
    windows = windows[:, ::stride, ::stride]
    return np.einsum("bhwcij,ijc->bhwc", windows, np.asarray(kernel, np.float64)), windows


def drawn(encoder):
    """Random parameters of an encoder."""
    rng, shapes = np.random.default_rng(0), encoder_shapes(encoder)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


@pytest.mark.parametrize(
    ("side", "stride", "padding"),
    [
        (7, 1, ((3, 3), (3, 3))),
        (5, 2, ((1, 2), (2, 2))),
        (3, 2, ((0, 1), (1, 1))),
        (3, 3, ((0, 0), (2, 0))),
    ],
)
def test_depthwise_convolution_and_its_gradients_are_those_of_the_definition(side, stride, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 9, 3)).astype(np.float32)
    kernel = rng.normal(size=(side, side, 3)).astype(np.float32)
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


def test_convnext_ignores_what_does_not_fill_a_patch_and_normalises_after_any_pooling():
    encoder = ConvNeXt(image_size=24, depths=(1,), widths=(6,))
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, 27, 30, 3)).astype(np.float32)
    params = drawn(encoder)

    @jax.jit
    def values(params, images):
        run = functools.partial(encoder.apply, {"params": params}, return_tokens=True)
        largest = encoder.clone(pooling="max", dtype=jnp.bfloat16).apply({"params": params}, images)
        return run(images), run(images[:, :24, :28]), largest

    tokens, cropped, largest = values(params, images)
    assert tokens.shape == (2, 6 * 7, 6) and largest.dtype == jnp.float32
    np.testing.assert_allclose(tokens, cropped, atol=1e-5)
    expected = np.max(tokens, axis=1)
    expected = (expected - expected.mean(-1, keepdims=True)) / expected.std(-1, keepdims=True)
    expected = expected * params["norm"]["scale"] + params["norm"]["bias"]
    np.testing.assert_allclose(largest, expected, atol=0.1)
