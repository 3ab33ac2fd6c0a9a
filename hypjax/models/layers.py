"""Components shared by encoders: pixel scaling, precision of products, layers, token pooling."""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped, UInt8

Images = Shaped[Array, "batch height width channels"]
FeatureMap: TypeAlias = Float[Array, "batch h w channels"]
Affine: TypeAlias = tuple[Float[Array, " dim"], Float[Array, " dim"]]  # Scale and shift.
KERNEL_INIT = nn.initializers.truncated_normal(0.02)


def normalize(
    images: UInt8[Array, "batch height width channels"], mean: Sequence[float], std: Sequence[float]
) -> Float[Array, "batch height width channels"]:
    """Scales pixels to [0, 1], and normalises them by each channel's mean and deviation."""
    scaled = images.astype(jnp.float32) / 255
    return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def mirror(images: Images, flips: Bool[Array, " batch"]) -> Images:
    """Mirrors the selected images left to right."""
    return jnp.where(flips[:, None, None, None], images[:, :, ::-1], images)


def cuda_capability(device: jax.Device | None = None) -> float:
    """Compute capability of an NVIDIA GPU, by default JAX's first device; 0 for other devices."""
    capability = getattr(device or jax.local_devices()[0], "compute_capability", "")
    return float(capability) if re.match(r"\d", capability) else 0.0  # AMD reports a name.


def compute_dtype(precision: str, device: jax.Device | None = None) -> jnp.dtype:
    """Dtype of the encoder's matrix products on a device, by default JAX's first device.

    The precision is "float32", "bfloat16" or "auto", which is float32 on CPUs and bfloat16
    elsewhere. GPUs older than Ampere get float32, with a warning.
    """
    device = device or jax.local_devices()[0]
    if precision != "float32" and 0 < cuda_capability(device) < 8:  # Before Ampere.
        message = f"{device.device_kind} cannot multiply bfloat16; using float32 instead"
        warnings.warn(message, stacklevel=2)
        precision = "float32"
    elif precision == "auto":
        precision = "float32" if device.platform == "cpu" else "bfloat16"
    return jnp.dtype(precision)


def residual_dtype(residual: str, dtype: DTypeLike) -> jnp.dtype:
    """Dtype of a residual stream: "float32", or that of "products"."""
    return jnp.dtype(dtype if residual == "products" else jnp.float32)


def on_tensor_cores(dtype: DTypeLike, device: jax.Device | None = None) -> bool:
    """Whether products of a dtype run on NVIDIA tensor cores: half precision on such a GPU."""
    return jnp.dtype(dtype).itemsize == 2 and cuda_capability(device) > 0


def full_products_in(dtype: DTypeLike) -> contextlib.AbstractContextManager:
    """Context in which float32 products are true float32 on every device."""
    # By default, GPUs and TPUs round the factors.
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


class Dense(nn.Module):
    """Linear layer, whose weights absorb affine maps before and after the layer."""

    features: int
    dtype: DTypeLike
    biased: bool = True
    std: float | None = None  # Standard deviation of the initial kernel; None for `KERNEL_INIT`.

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... dim"],
        affine: Affine | None = None,
        part: int = 0,
        parts: int = 1,
        factor: Float[Array, " features"] | None = None,
    ) -> Float[Array, "... features"]:
        """Applies the layer to x · scale + shift, where `affine` is (scale, shift).

        Computes only part number `part`, from 0, of `parts` equal parts of the outputs. `factor`
        multiplies the outputs: a LayerScale (Touvron et al., ICCV 2021, Eq. 3).
        """
        init = KERNEL_INIT if self.std is None else nn.initializers.normal(self.std)
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        if self.biased:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
        else:
            bias = jnp.zeros(self.features)
        kernel, bias = (jnp.split(array, parts, axis=-1)[part] for array in (kernel, bias))
        if affine is not None:
            scale, shift = affine
            bias = bias + jnp.matmul(shift, kernel, precision="highest")
            kernel = scale[:, None] * kernel
        if factor is not None:
            kernel, bias = factor * kernel, factor * bias
        x, kernel, bias = (array.astype(self.dtype) for array in (x, kernel, bias))
        precision = "highest" if x.dtype == jnp.float32 else None
        return _product(x, kernel, precision) + bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(
    x: Float[Array, "... dim"], kernel: Float[Array, "dim dim2"], precision: str | None
) -> Float[Array, "... dim2"]:
    return jnp.matmul(x, kernel, precision=precision)


def _product_forward(x: Array, kernel: Array, precision: str | None) -> tuple:
    return _product(x, kernel, precision), (x, kernel)


def _product_backward(precision: str | None, residuals: tuple, grad: Array) -> tuple[Array, Array]:
    # JAX would derive the kernel's gradient transposed, for which XLA copies a factor on CPUs.
    x, kernel = residuals
    x_grad = jnp.matmul(grad, kernel.T, precision=precision)
    x, grad = (rearrange(array, "... dim -> (...) dim") for array in (x, grad))
    return x_grad, jnp.matmul(x.T, grad, precision=precision)


_product.defvjp(_product_forward, _product_backward)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    # x·Φ(x) by erf, as in timm; JAX's GELU uses erfc, which is slow on CPUs.
    "gelu": lambda x: 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5))),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),  # CLIP (Radford et al., ICML 2021).
    "silu": nn.silu,
}


def activate(x: Float[Array, "..."], name: str = "gelu") -> Float[Array, "..."]:
    """Applies "gelu" (exact), "gelu_tanh", "quick_gelu" or "silu", in float32."""

    @jax.checkpoint  # Nothing inside is stored for the backward pass.
    def activated(x: Array) -> Array:
        return _ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)

    return activated(x)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis (Ba et al., 2016), in float32.

    Returns the normalised input in `dtype`, and the (scale, shift), which the next `Dense` folds
    into its weights: gradients of scale and shift are then sums over weights instead of tokens.
    """

    dtype: DTypeLike
    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "... dim"]) -> tuple[Float[Array, "... dim"], Affine]:
        """Applies the layer."""
        scale = jnp.asarray(self.param("scale", nn.initializers.ones, (x.shape[-1],)))
        shift = jnp.asarray(self.param("bias", nn.initializers.zeros, (x.shape[-1],)))
        return _normalized(x, jnp.dtype(self.dtype), self.eps), (scale, shift)


def normed(x: Float[Array, "... dim"], name: str, eps: float = 1e-6) -> Float[Array, "... dim"]:
    """Applies a LayerNorm that no linear layer follows, in float32, as part of the caller."""
    x, (scale, shift) = LayerNorm(jnp.float32, eps, name=name)(x)
    return x * scale + shift


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _normalized(
    x: Float[Array, "... dim"], dtype: jnp.dtype, eps: float
) -> Float[Array, "... dim"]:
    return _normalized_forward(x, dtype, eps)[0]


def _normalized_forward(x: Array, dtype: jnp.dtype, eps: float) -> tuple:
    """The normalised x, and what the backward pass needs: x as it is stored, perhaps in half."""
    stored, x = x, x.astype(jnp.float32)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    # E[x²] − E[x]² is faster, but loses digits for tokens whose mean exceeds their deviation.
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(variance + eps)
    return ((x - mean) * factor).astype(dtype), (stored, mean, factor)


def _normalized_backward(_: jnp.dtype, eps: float, saved: tuple, grad: Array) -> tuple[Array]:
    # JAX's derivative would store several arrays of the size of x; this derivative stores only x.
    x, mean, factor = saved
    grad = grad.astype(jnp.float32)
    normalized = (x.astype(jnp.float32) - mean) * factor
    product_mean = jnp.mean(grad * normalized, axis=-1, keepdims=True)
    grad_mean = jnp.mean(grad, axis=-1, keepdims=True)
    return ((factor * (grad - grad_mean - normalized * product_mean)).astype(x.dtype),)


_normalized.defvjp(_normalized_forward, _normalized_backward)


def _maximum(patches: Float[Array, "batch patches dim"]) -> Float[Array, "batch dim"]:
    """Maximum of each dimension over patches, whose gradient goes to the first such patch."""
    # jnp.max sends the gradient to patches that equal the maximum. In compiled programs, perhaps
    # no patch is equal: XLA computes the patches a second time and rounds differently.
    first = jnp.argmax(jax.lax.stop_gradient(patches), axis=1, keepdims=True)
    return jnp.take_along_axis(patches, first, axis=1)[:, 0]


GEM_EXPONENT = 3.0  # The usual value (Radenović et al., TPAMI 2019).
_GEM_MIN = 1e-6
_RMAC_SCALES = 3


def _gem(
    patches: Float[Array, "batch patches dim"], exponent: float | Float[Array, ""]
) -> Float[Array, "batch dim"]:
    """Generalised mean (GeM) of the values, which are clipped to a small positive minimum."""
    powers = jnp.maximum(patches, _GEM_MIN) ** exponent
    return jnp.mean(powers, axis=1) ** (1 / exponent)


def _rmac(patches: Float[Array, "batch patches dim"]) -> Float[Array, "batch dim"]:
    """Sum of the maxima of `rmac_regions`, each normalised to length 1 (R-MAC)."""
    side = math.isqrt(patches.shape[1])
    grid = rearrange(patches, "b (h w) c -> b h w c", h=side)
    maxima = [
        _maximum(rearrange(grid[:, y : y + length, x : x + length], "b h w c -> b (h w) c"))
        for y, x, length in rmac_regions(side)
    ]
    # The added constant keeps the gradient finite where a region is all zeros.
    squares = [jnp.sum(v * v, axis=-1, keepdims=True) + _GEM_MIN**2 for v in maxima]
    return cast(Array, sum(v / jnp.sqrt(x) for v, x in zip(maxima, squares, strict=True)))


def rmac_regions(side: int) -> list[tuple[int, int, int]]:
    """Regions of R-MAC in a square grid: (row, column, side) of each.

    Scale l has l × l equally spaced regions, whose side is 2/(l + 1) of the grid's; sides and
    positions are rounded down (Tolias et al., ICLR 2016, Section 3.2). The full grid counts twice,
    as in the released code.
    """
    regions = [(0, 0, side)]
    for scale in range(1, _RMAC_SCALES + 1):
        length = 2 * side // (scale + 1)
        starts = [(side - length) * i // max(scale - 1, 1) for i in range(scale)]
        regions += [(y, x, length) for y in starts for x in starts if length]
    return regions


_PATCH_POOLINGS: dict[str, Callable[..., Array]] = {
    "avg": lambda patches: jnp.mean(patches, axis=1),
    "max": _maximum,
    "avg_max": lambda patches: jnp.mean(patches, axis=1) + _maximum(patches),
    "gem": _gem,
    "rmac": _rmac,
}
_PREFIX_POOLINGS = {"cls": 1, "cls_dist_mean": 2}  # Number of leading tokens that are averaged.


def poolings(class_tokens: int) -> list[str]:
    """Names of the poolings of an encoder with 0, 1 or 2 class and distillation tokens.

    "cls" is the class token, and "cls_dist_mean" the mean of the class and distillation tokens
    (DeiT). The poolings of patch tokens, which El-Nouby et al. (IRT, 2021) compare, are "avg",
    "max", their sum "avg_max", "gem" (generalised mean) and "rmac" (regional maxima).
    """
    return [*(name for name, n in _PREFIX_POOLINGS.items() if n <= class_tokens), *_PATCH_POOLINGS]


def num_pooled_tokens(pooling: str, num_tokens: int) -> int:
    """Number of leading tokens that a pooling reads, out of `num_tokens`."""
    return _PREFIX_POOLINGS.get(pooling, num_tokens)


def pool_tokens(
    tokens: Float[Array, "batch tokens dim"],
    num_prefix_tokens: int,
    pooling: str,
    exponent: float | Float[Array, ""] = GEM_EXPONENT,
) -> Float[Array, "batch dim"]:
    """Pools tokens, prefix tokens first, by one of the `poolings`; `exponent` is for "gem"."""
    if pooling in _PREFIX_POOLINGS:
        return jnp.mean(tokens[:, : _PREFIX_POOLINGS[pooling]], axis=1)
    patches = tokens[:, num_prefix_tokens:]
    return _gem(patches, exponent) if pooling == "gem" else _PATCH_POOLINGS[pooling](patches)
