"""ConvNeXt (Liu et al., CVPR 2022), also DINOv3's (Siméoni et al., 2025), with timm's numerics."""

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hypjax.models.depthwise import DepthwiseConv
from hypjax.models.encoder import ConvNet
from hypjax.models.layers import KERNEL_INIT, Dense, FeatureMap, LayerNorm, activate, normed

_STEM = 4  # Side of the patches of the images; later stages begin with patches of 2 × 2 positions.
_KERNEL = 7
_LAYER_SCALE = 1e-6


class ConvNeXt(ConvNet):
    """Maps images to the pooled features of the last stage, after a LayerNorm.

    The LayerNorm follows the pooling, so tokens are not normalised. As in timm, rows and columns
    that do not fill a patch are ignored. The residual stream is float32.
    """

    depths: tuple[int, ...] = (3, 3, 27, 3)  # Blocks of each stage, which halves the side.
    widths: tuple[int, ...] = (96, 192, 384, 768)  # Channels of each stage.
    classifiers = ("head.fc",)
    names = (
        ("^stem_conv", "stem.0"),
        ("^stem_norm", "stem.1"),
        (r"(_block_\d+)\.bias", r"\1.depthwise.bias"),
        (r"^stage_(\d)_", r"stages.\1."),
        (r"downsample\.norm", "downsample.0"),
        (r"downsample\.conv", "downsample.1"),
        (r"block_(\d+)", r"blocks.\1"),
        (r"\.depthwise", ".conv_dw"),
        (r"\.fc_", ".mlp.fc"),
        ("layer_scale", "gamma"),
        ("^norm", "head.norm"),
    )
    patches = {"stem_conv": _STEM, "conv": 2}

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return self.widths[-1]

    @property
    def min_side(self) -> int:
        """Side of the smallest images, which have one position in the last stage."""
        return _STEM * 2 ** (len(self.depths) - 1)

    def _stem(self, x: FeatureMap) -> Array:
        x = Dense(self.widths[0], self.dtype, name="stem_conv")(_patches(x, _STEM))
        return normed(x, "stem_norm")

    def _block(self, x: FeatureMap, stage: int, i: int) -> Array:
        if stage > 0 and i == 0:
            x = Downsample(self.widths[stage], self.dtype, name=f"stage_{stage}_downsample")(x)
        block = nn.remat(Block) if self.remat else Block
        return block(self.dtype, name=f"stage_{stage}_block_{i}")(x)

    def _pooled(self, tokens: Float[Array, "batch positions dim"]) -> Float[Array, "batch dim"]:
        return normed(self.pool(tokens), "norm")


class Downsample(nn.Module):
    """A LayerNorm and a linear layer on patches of 2 × 2 positions; the result is float32."""

    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: FeatureMap) -> Float[Array, "batch h//2 w//2 width"]:
        """Applies the layers."""
        x, (scale, shift) = LayerNorm(self.dtype, name="norm")(x)
        affine = jnp.tile(scale, 4), jnp.tile(shift, 4)  # Repeated for a patch's positions.
        x = Dense(self.width, self.dtype, name="conv")(_patches(x, 2), affine)
        return x.astype(jnp.float32)


class Block(nn.Module):
    """A residual branch: depthwise convolution, LayerNorm, two-layer perceptron and LayerScale."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: FeatureMap) -> FeatureMap:
        """Applies the block to the float32 residual stream."""
        width = x.shape[-1]
        bias = self.param("bias", nn.initializers.zeros, (width,))
        scale = self.param("layer_scale", nn.initializers.constant(_LAYER_SCALE), (width,))
        mixed = DepthwiseConv(_KERNEL, self.dtype, KERNEL_INIT, name="depthwise")(x)
        mixed, affine = LayerNorm(self.dtype, name="norm")(mixed.astype(jnp.float32) + bias)
        hidden = activate(Dense(4 * width, self.dtype, name="fc_1")(mixed, affine), "gelu")
        return x + Dense(width, self.dtype, name="fc_2")(hidden, factor=scale)


def _patches(
    x: Float[Array, "batch h w c"], side: int
) -> Float[Array, "batch h//{side} w//{side} {side}*{side}*c"]:
    """Splits images into patches, and drops incomplete patches at the bottom and on the right."""
    height, width = (n // side * side for n in x.shape[1:3])
    return rearrange(x[:, :height, :width], "b (h p) (w q) c -> b h w (p q c)", p=side, q=side)
