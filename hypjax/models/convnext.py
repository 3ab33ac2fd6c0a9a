"""ConvNeXt (Liu et al., CVPR 2022) with timm's numerics; DINOv3's (Siméoni et al., 2025) are these.

A depthwise 7×7 convolution mixes positions, and a perceptron mixes channels. GELU is exact, and
LayerNorm has ε = 1e-6.
"""

from collections.abc import Iterator

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from hypjax.models import tensors
from hypjax.models.depthwise import DepthwiseConv
from hypjax.models.encoder import Encoder
from hypjax.models.layers import (
    KERNEL_INIT,
    Dense,
    LayerNorm,
    activate,
    full_products_in,
    pool_tokens,
)
from hypjax.models.tensors import Tensor

_STEM = 4  # Side of the patches of the images; later stages begin with patches of 2 × 2 positions.
_KERNEL = 7
_LAYER_SCALE = 1e-6


class ConvNeXt(Encoder):
    """Maps images to the pooled features of the last stage, after a LayerNorm.

    Attributes:
        image_size: Side of the images in pixels. Rows and columns that do not fill a patch are
            ignored, as in timm.
        depths: Number of blocks in each stage. Each stage has half the side of the one before.
        widths: Number of channels in each stage.
        pooling: Pooling of the last stage's features: see `hypjax.models.layers.poolings`. The
            LayerNorm follows whichever it is; in timm it follows the average.
        dtype: Dtype of convolutions and matrix products. In float32 they are true float32 on every
            device. Parameters, the residual stream, LayerNorm statistics and the result are always
            float32.
        remat: Whether to recompute the activations of blocks in the backward pass.
    """

    image_size: int
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    pooling: str = "avg"
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    classifiers = ("head.fc",)

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return self.widths[-1]

    @property
    def min_side(self) -> int:
        """Side of the smallest images, of which the last stage has one position."""
        return _STEM * 2 ** (len(self.depths) - 1)

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Names of the parameters of each layer, as in timm: the stem, then the blocks."""
        blocks = []
        for stage, depth in enumerate(self.depths):
            first = (f"stage_{stage}_downsample", f"stage_{stage}_block_0")
            blocks += [first, *((f"stage_{stage}_block_{i}",) for i in range(1, depth))]
        return [("stem_conv", "stem_norm"), *blocks]

    @nn.compact
    def __call__(
        self, images: Float[ArrayLike, "batch height width channels"], return_tokens: bool = False
    ) -> Float[Array, "batch dim"] | Float[Array, "batch positions dim"]:
        """Embeds normalised pixels, in float32.

        With `return_tokens` it returns all features of the last stage, row by row, which no
        LayerNorm has normalised, as timm's `forward_features` does.
        """
        block = nn.remat(Block) if self.remat else Block
        with full_products_in(self.dtype):
            x = Dense(self.widths[0], self.dtype, name="stem_conv")(_patches(images, _STEM))
            x = _normalised(x, "stem_norm")
            for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
                if stage > 0:
                    x = Downsample(width, self.dtype, name=f"stage_{stage}_downsample")(x)
                for i in range(depth):
                    x = block(self.dtype, name=f"stage_{stage}_block_{i}")(x)
        tokens = rearrange(x, "b h w c -> b (h w) c")
        if return_tokens:
            return tokens
        return _normalised(pool_tokens(tokens, 0, self.pooling), "norm")

    def tensors(self) -> Iterator[Tensor]:
        """The parameters, by timm's names."""
        yield from tensors.patches("stem.0", _STEM, "stem_conv")
        yield from tensors.norm("stem.1", "stem_norm")
        for stage, depth in enumerate(self.depths):
            timm, path = f"stages.{stage}", f"stage_{stage}"
            if stage > 0:
                yield from tensors.norm(f"{timm}.downsample.0", f"{path}_downsample", "norm")
                yield from tensors.patches(f"{timm}.downsample.1", 2, f"{path}_downsample", "conv")
            for i in range(depth):
                yield from _block_tensors(f"{timm}.blocks.{i}", f"{path}_block_{i}")
        yield from tensors.norm("head.norm", "norm")


def _block_tensors(timm: str, path: str) -> Iterator[Tensor]:
    yield tensors.conv(f"{timm}.conv_dw", path, "depthwise")
    yield Tensor(f"{timm}.conv_dw.bias", (path, "bias"))
    yield from tensors.norm(f"{timm}.norm", path, "norm")
    yield from tensors.dense(f"{timm}.mlp.fc1", path, "fc_1")
    yield from tensors.dense(f"{timm}.mlp.fc2", path, "fc_2")
    yield Tensor(f"{timm}.gamma", (path, "layer_scale"))


class Downsample(nn.Module):
    """A LayerNorm and a linear layer on patches of 2 × 2 positions."""

    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h//2 w//2 width"]:
        """Applies the layers; the result is float32."""
        x, affine = LayerNorm(self.dtype, name="norm")(x)
        affine = tuple(jnp.tile(each, 4) for each in affine)  # For each position of a patch.
        x = Dense(self.width, self.dtype, name="conv")(_patches(x, 2), affine)
        return x.astype(jnp.float32)


class Block(nn.Module):
    """A residual branch: depthwise convolution, LayerNorm, two-layer perceptron and LayerScale."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h w c"]:
        """Applies the block to the float32 residual stream."""
        width = x.shape[-1]
        bias = self.param("bias", nn.initializers.zeros, (width,))
        scale = self.param("layer_scale", nn.initializers.constant(_LAYER_SCALE), (width,))
        mixed = DepthwiseConv(_KERNEL, self.dtype, KERNEL_INIT, name="depthwise")(x)
        normed = LayerNorm(self.dtype, name="norm")(mixed.astype(jnp.float32) + bias)
        hidden = activate(Dense(4 * width, self.dtype, name="fc_1")(*normed), "gelu")
        return x + Dense(width, self.dtype, name="fc_2")(hidden, factor=scale)


def _patches(
    x: Float[ArrayLike, "batch h w c"], side: int
) -> Float[ArrayLike, "batch h//side w//side side*side*c"]:
    """Cuts images into patches, without what is left over at the bottom and on the right."""
    height, width = (n // side * side for n in x.shape[1:3])
    return rearrange(x[:, :height, :width], "b (h p) (w q) c -> b h w (p q c)", p=side, q=side)


def _normalised(x: Float[Array, "... dim"], name: str) -> Float[Array, "... dim"]:
    """Applies a LayerNorm that no linear layer follows, in float32."""
    x, (scale, shift) = LayerNorm(jnp.float32, name=name)(x.astype(jnp.float32))
    return x * scale + shift
