"""Depthwise convolution: one kernel per channel.

XLA's convolutions, and especially their gradients, are slow on CPUs. On CPUs, sums of shifted
images replace them; XLA compiles the sums to a loop over adjacent channels.
"""

import functools
import math
from typing import TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Images: TypeAlias = Float[Array, "batch h w channels"]
Outputs: TypeAlias = Float[Array, "batch h2 w2 channels"]  # Images of another size.
Kernel: TypeAlias = Float[Array, "k k channels"]
Padding: TypeAlias = tuple[tuple[int, int], tuple[int, int]]  # Before and after, by axis.
_TOTALS = 2**16  # Values of float32 that stay in a core's cache, beside images.
_TERMS = 16  # Products to sum at once, at least; each is compiled.


class DepthwiseConv(nn.Module):
    """Depthwise convolution without bias, with TensorFlow's 'SAME' padding."""

    size: int
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer
    stride: int = 1

    @nn.compact
    def __call__(self, x: Images, factor: Float[Array, " channels"] | None = None) -> Outputs:
        """Convolves, and multiplies each channel by an optional factor."""
        shape = (self.size, self.size, 1, x.shape[-1])
        kernel = self.param("kernel", self.kernel_init, shape)[:, :, 0]
        if factor is not None:
            kernel = kernel * factor
        strides = (self.stride, self.stride)
        pads = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, "SAME")
        rows, columns = ((int(before), int(after)) for before, after in pads)
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        return depthwise_conv(x, kernel, self.stride, (rows, columns))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def depthwise_conv(x: Images, kernel: Kernel, stride: int, padding: Padding) -> Outputs:
    """Correlates each channel with its kernel, as usual in neural networks.

    Images, kernels and result have the same dtype. Sums are float32 on CPUs, and for float32 inputs
    on every device.
    """
    return jax.lax.platform_dependent(
        x,
        kernel,
        cpu=lambda x, kernel: _shifted(_padded(x, padding), kernel, stride).astype(x.dtype),
        default=lambda x, kernel: _convolution(x, kernel, stride, padding),
    )


def _forward(x: Images, kernel: Kernel, stride: int, padding: Padding) -> tuple:
    return depthwise_conv(x, kernel, stride, padding), (x, kernel)


def _backward(
    stride: int, padding: Padding, residuals: tuple[Images, Kernel], grad: Outputs
) -> tuple[Images, Kernel]:
    def by_convolution(x: Images, kernel: Kernel, grad: Outputs) -> tuple[Images, Kernel]:
        convolution = functools.partial(_convolution, stride=stride, padding=padding)
        return jax.vjp(convolution, x, kernel)[1](grad)

    def by_shifts(x: Images, kernel: Kernel, grad: Outputs) -> tuple[Images, Kernel]:
        grad = grad.astype(jnp.float32)
        x_grad = _images_grad(grad, kernel, x.shape, stride, padding)
        kernel_grad = _kernel_grad(_padded(x, padding), grad, len(kernel), stride)
        return x_grad.astype(x.dtype), kernel_grad.astype(kernel.dtype)

    return jax.lax.platform_dependent(*residuals, grad, cpu=by_shifts, default=by_convolution)


depthwise_conv.defvjp(_forward, _backward)


def _convolution(x: Images, kernel: Kernel, stride: int, padding: Padding) -> Outputs:
    return jax.lax.conv_general_dilated(
        x,
        kernel[:, :, None],
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
        precision="highest" if x.dtype == jnp.float32 else None,
    )


def _padded(x: Images, padding: Padding) -> Outputs:
    return jnp.pad(x.astype(jnp.float32), ((0, 0), *padding, (0, 0)))


def _shifted(x: Images, kernel: Kernel, stride: int) -> Outputs:
    """Sums, over the kernel's positions, the shifted images times the position's weight."""
    side = len(kernel)
    row_span, column_span = ((n - side) // stride * stride + 1 for n in x.shape[1:3])
    terms = (
        x[:, i : i + row_span : stride, j : j + column_span : stride] * kernel[i, j]
        for i in range(side)
        for j in range(side)
    )
    return cast(Array, sum(terms))


def _images_grad(
    grad: Images, kernel: Kernel, shape: tuple[int, ...], stride: int, padding: Padding
) -> Outputs:
    """Gradient of images of a `shape`: the dilated `grad`, convolved with the flipped kernel."""
    zeros = [(0, 0, 0)]  # Before, after and between the elements of each axis.
    for side, grad_side, (before, _) in zip(shape[1:3], grad.shape[1:3], padding, strict=True):
        dilated_side = (grad_side - 1) * stride + 1
        zeros.append((len(kernel) - 1 - before, side - dilated_side + before, stride - 1))
    grad = jax.lax.pad(grad, jnp.zeros((), grad.dtype), [*zeros, (0, 0, 0)])
    return _shifted(grad, kernel[::-1, ::-1].astype(jnp.float32), 1)


def _kernel_grad(x: Images, grad: Outputs, side: int, stride: int) -> Kernel:
    """Gradient of a side × side kernel: the sum of the padded images' windows times `grad`."""
    batch, height, width, channels = grad.shape
    # Tiles are summed, and added to totals of a few images at once, which stay in the cache.
    images = batch // _divisor(batch, math.ceil(batch * side * side * channels / _TOTALS))
    columns = _divisor(width, _TERMS)
    rows = _divisor(height, math.ceil(_TERMS / columns))
    counts = (batch // images, height // rows, width // columns)

    def add_tile(tile: Array, total: Array) -> Array:
        image, row, column = jnp.unravel_index(tile, counts)
        starts = (image * images, row * rows, column * columns, 0)
        slopes = jax.lax.dynamic_slice(grad, starts, (images, rows, columns, channels))
        starts = (image * images, row * rows * stride, column * columns * stride, 0)
        spans = ((n - 1) * stride + side for n in (rows, columns))
        strip = jax.lax.dynamic_slice(x, starts, (images, *spans, channels))
        windows = (
            strip[:, i * stride : i * stride + side, j * stride : j * stride + side]
            * slopes[:, i : i + 1, j : j + 1]
            for i in range(rows)
            for j in range(columns)
        )
        return total + sum(windows)

    total = jnp.zeros((images, side, side, channels))
    return jnp.sum(jax.lax.fori_loop(0, math.prod(counts), add_tile, total), axis=0)


def _divisor(number: int, least: int) -> int:
    """The smallest divisor of a number that is at least `least`, or the number."""
    return next((n for n in range(1, number) if number % n == 0 and n >= least), number)
