"""EfficientNet-Lite (Tan and Le, ICML 2019; Google, 2020) with timm's numerics.

The models for mobile devices: EfficientNet without squeeze-and-excitation, and with ReLU6. Padding
and the ε of BatchNorm are TensorFlow's. BatchNorm keeps the statistics of the weights. Its scale
passes into the weights of the convolution before it, so that images are read less often.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from hypjax.models import tensors
from hypjax.models.depthwise import DepthwiseConv
from hypjax.models.encoder import Encoder
from hypjax.models.layers import Dense, full_products_in, pool_tokens
from hypjax.models.resnet import CONV_INIT, FrozenBatchNorm
from hypjax.models.tensors import Tensor

_STEM_WIDTH, _HEAD_WIDTH = 32, 1280  # Not scaled in the Lite models.
_EPS = 1e-3


class _Stage(NamedTuple):
    """Blocks with the same kernel and width; the first one has the stride."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    width: int


_STAGES = (  # EfficientNet-B0 (Tan and Le, Table 1).
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)


class EfficientNetLite(Encoder):
    """Maps images to the pooled features of the last layer.

    Attributes:
        image_size: Side of the images in pixels.
        width_factor: Factor of the number of channels, relative to Lite0.
        depth_factor: Factor of the number of blocks.
        pooling: Pooling of the features: see `hypjax.models.layers.poolings`.
        dtype: Dtype of convolutions and of the activations within blocks. Convolutions in float32
            are true float32 on every device. Parameters, the residual stream and the result are
            always float32.
        remat: Whether to recompute the activations of blocks in the backward pass.
    """

    image_size: int
    width_factor: float = 1
    depth_factor: float = 1
    pooling: str = "avg"
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    classifiers = ("classifier",)

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return _HEAD_WIDTH

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Names of the parameters of each layer, as in timm: the stem, then the blocks."""
        blocks = [
            (f"stage_{stage}_block_{i}",)
            for stage, design in enumerate(self._stages())
            for i in range(design.blocks)
        ]
        blocks[-1] += ("head_conv", "head_norm")
        return [("stem_conv", "stem_norm"), *blocks]

    @nn.compact
    def __call__(
        self, images: Float[ArrayLike, "batch height width channels"], return_tokens: bool = False
    ) -> Float[Array, "batch dim"] | Float[Array, "batch positions dim"]:
        """Embeds normalised pixels, in float32.

        With `return_tokens` it returns all features of the last layer, row by row.
        """
        block = nn.remat(InvertedBottleneck) if self.remat else InvertedBottleneck
        with full_products_in(self.dtype):
            x = nn.Conv(
                *(_STEM_WIDTH, (3, 3), 2, "SAME"),
                use_bias=False,
                dtype=self.dtype,
                kernel_init=CONV_INIT,
                name="stem_conv",
            )(jnp.asarray(images))
            x = _relu6(FrozenBatchNorm(jnp.float32, _EPS, name="stem_norm")(x), self.dtype)
            for stage, design in enumerate(self._stages()):
                for i in range(design.blocks):
                    x = block(
                        *(design.kernel, 1 if i else design.stride),
                        *(design.expansion, design.width, self.dtype),
                        name=f"stage_{stage}_block_{i}",
                    )(x)
            x = _relu6(_pointwise(x, _HEAD_WIDTH, self.dtype, "head"), jnp.float32)
        tokens = rearrange(x, "b h w c -> b (h w) c")
        return tokens if return_tokens else pool_tokens(tokens, 0, self.pooling)

    def _stages(self) -> Iterator[_Stage]:
        """The stages, with scaled width and depth; the depth of the outermost ones is not."""
        for i, stage in enumerate(_STAGES):
            width, blocks = _divisible(self.width_factor * stage.width), stage.blocks
            if 0 < i < len(_STAGES) - 1:
                blocks = math.ceil(self.depth_factor * blocks)
            yield stage._replace(width=width, blocks=blocks)

    def tensors(self) -> Iterator[Tensor]:
        """The parameters, by timm's names."""
        yield tensors.conv("conv_stem", "stem_conv")
        yield from tensors.batch_norm("bn1", "stem_norm")
        for stage, design in enumerate(self._stages()):
            for i in range(design.blocks):
                timm, path = f"blocks.{stage}.{i}", f"stage_{stage}_block_{i}"
                # timm counts the layers that a block has.
                first = 1 if design.expansion > 1 else 0
                if first:
                    yield tensors.pointwise(f"{timm}.conv_pw", path, "expand_conv")
                    yield from tensors.batch_norm(f"{timm}.bn1", path, "expand_norm")
                yield tensors.conv(f"{timm}.conv_dw", path, "depthwise_conv")
                yield from tensors.batch_norm(f"{timm}.bn{first + 1}", path, "depthwise_norm")
                last = "conv_pwl" if first else "conv_pw"
                yield tensors.pointwise(f"{timm}.{last}", path, "project_conv")
                yield from tensors.batch_norm(f"{timm}.bn{first + 2}", path, "project_norm")
        yield tensors.pointwise("conv_head", "head_conv")
        yield from tensors.batch_norm("bn2", "head_norm")


def _divisible(width: float) -> int:
    """The multiple of 8 nearest to a width, but at least 90% of it, as in the authors' code."""
    nearest = max(8, int(width + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * width else nearest + 8


class InvertedBottleneck(nn.Module):
    """Expansion of channels, depthwise convolution, projection (Sandler et al., CVPR 2018).

    What comes in is added if the shape stays the same. Without expansion, the first part is left
    out.
    """

    kernel: int
    stride: int
    expansion: int
    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 width"]:
        """Applies the block; the result is float32."""
        y = x
        if self.expansion > 1:
            y = _pointwise(y, self.expansion * x.shape[-1], self.dtype, "expand")
            y = _relu6(y, self.dtype)
        norm = FrozenBatchNorm(jnp.float32, _EPS, name="depthwise_norm")
        scale, shift = norm.affine(y.shape[-1])
        conv = DepthwiseConv(self.kernel, self.dtype, CONV_INIT, self.stride, name="depthwise_conv")
        y = _relu6(conv(y, scale).astype(jnp.float32) + shift, self.dtype)
        y = _pointwise(y, self.width, self.dtype, "project")
        return x + y if x.shape == y.shape else y


def _pointwise(
    x: Float[Array, "batch h w c"], features: int, dtype: DTypeLike, name: str
) -> Float[Array, "batch h w features"]:
    """A 1×1 convolution and its BatchNorm; the result is float32."""
    scale, shift = FrozenBatchNorm(jnp.float32, _EPS, name=f"{name}_norm").affine(features)
    dense = Dense(features, dtype, biased=False, name=f"{name}_conv")
    return dense(x, factor=scale).astype(jnp.float32) + shift


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _relu6(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """min(max(x, 0), 6) of float32, rounded to a dtype.

    Its gradient is computed from the result, which the next layer keeps anyway.
    """
    return jnp.clip(x, 0, 6).astype(dtype)


def _relu6_forward(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    y = _relu6(x, dtype)
    return y, y


def _relu6_backward(dtype: DTypeLike, y: Array, slope: Array) -> tuple[Array]:
    del dtype
    return (jnp.where((y > 0) & (y < 6), slope.astype(jnp.float32), 0),)


_relu6.defvjp(_relu6_forward, _relu6_backward)
