"""EfficientNet-Lite (Tan and Le, ICML 2019; Google, 2020) with timm's numerics.

Lite models are EfficientNets with ReLU6 and without squeeze-and-excitation. Padding and BatchNorm's
ε are TensorFlow's. The scale of the frozen BatchNorm is folded into the preceding convolution,
which saves a pass over the images.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hypjax.models.depthwise import DepthwiseConv
from hypjax.models.encoder import ConvNet
from hypjax.models.layers import Dense, FeatureMap
from hypjax.models.resnet import CONV_INIT, Conv, FrozenBatchNorm

_STEM_WIDTH, _HEAD_WIDTH = 32, 1280  # `width_factor` does not scale these in the Lite models.
_EPS = 1e-3

# Blocks, kernel, stride of the first block, expansion and width of each stage of EfficientNet-B0
# (Tan and Le, Table 1).
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class EfficientNetLite(ConvNet):
    """Maps images to the pooled features of the last layer; the residual stream is float32."""

    width_factor: float = 1.0  # Factor of the number of channels, relative to Lite0.
    depth_factor: float = 1.0  # Factor of the number of blocks, relative to Lite0.
    classifiers = ("classifier",)
    names = (
        ("^stem_conv", "conv_stem"),
        ("^stem_norm", "bn1"),
        ("^head_conv", "conv_head"),
        ("^head_norm", "bn2"),
        # timm numbers a block's layers; blocks of the first stage have no expansion.
        (r"^(stage_0.*)\.depthwise_norm", r"\1.bn1"),
        (r"^(stage_0.*)\.project_conv", r"\1.conv_pw"),
        (r"^(stage_0.*)\.project_norm", r"\1.bn2"),
        (r"^stage_(\d)_block_", r"blocks.\1."),
        ("expand_conv", "conv_pw"),
        ("expand_norm", "bn1"),
        ("depthwise_conv", "conv_dw"),
        ("depthwise_norm", "bn2"),
        ("project_conv", "conv_pwl"),
        ("project_norm", "bn3"),
    )
    patches = {"expand_conv": 1, "project_conv": 1, "head_conv": 1}
    dim = _HEAD_WIDTH

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of blocks in each stage; the first and the last stage are not scaled."""
        first, *inner, last = (num_blocks for num_blocks, *_ in _STAGES)
        return (first, *(math.ceil(self.depth_factor * blocks) for blocks in inner), last)

    def _stem(self, x: FeatureMap) -> Array:
        x = Conv(_STEM_WIDTH, (3, 3), strides=2, dtype=self.dtype, name="stem_conv")(x)
        return _relu6(FrozenBatchNorm(jnp.float32, _EPS, name="stem_norm")(x), self.dtype)

    def _block(self, x: FeatureMap, stage: int, i: int) -> Array:
        _, kernel, first_stride, expansion, width = _STAGES[stage]
        block = nn.remat(InvertedBottleneck) if self.remat else InvertedBottleneck
        stride = first_stride if i == 0 else 1
        width, name = _divisible(self.width_factor * width), f"stage_{stage}_block_{i}"
        return block(kernel, stride, expansion, width, self.dtype, name=name)(x)

    def _top(self, x: FeatureMap) -> Array:
        return _relu6(_pointwise(x, _HEAD_WIDTH, self.dtype, "head"), jnp.float32)


def _divisible(width: float) -> int:
    """The nearest multiple of 8 that is at least 90% of the width, as in the authors' code."""
    nearest = max(8, int(width + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * width else nearest + 8


class InvertedBottleneck(nn.Module):
    """Expansion of channels, depthwise convolution, projection (Sandler et al., CVPR 2018)."""

    kernel: int
    stride: int
    expansion: int
    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: FeatureMap) -> Float[Array, "batch h2 w2 width"]:
        """Applies the block, and adds the input if the shape stays; the result is float32."""
        y = x
        if self.expansion > 1:
            y = _pointwise(y, self.expansion * x.shape[-1], self.dtype, "expand")
            y = _relu6(y, self.dtype)
        scale, shift = FrozenBatchNorm(jnp.float32, _EPS, name="depthwise_norm").affine(y.shape[-1])
        conv = DepthwiseConv(self.kernel, self.dtype, CONV_INIT, self.stride, name="depthwise_conv")
        y = _relu6(conv(y, scale).astype(jnp.float32) + shift, self.dtype)
        y = _pointwise(y, self.width, self.dtype, "project")
        return x + y if x.shape == y.shape else y


def _pointwise(x: FeatureMap, features: int, dtype: DTypeLike, name: str) -> Array:
    """A 1×1 convolution and its BatchNorm; the result is float32."""
    scale, shift = FrozenBatchNorm(jnp.float32, _EPS, name=f"{name}_norm").affine(features)
    dense = Dense(features, dtype, biased=False, name=f"{name}_conv")
    return dense(x, factor=scale).astype(jnp.float32) + shift


def _relu6(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """min(max(x, 0), 6) of float32, cast to a dtype; the gradient at both ends is 0."""
    return jax.lax.clamp(jnp.float32(0), x, jnp.float32(6)).astype(dtype)
