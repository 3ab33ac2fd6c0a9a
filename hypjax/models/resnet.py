"""ResNet-50 and ResNet-101 (He et al., CVPR 2016): timm's numerics, frozen BatchNorm statistics.

The 3×3 convolution of a bottleneck has the stride, as in torchvision and timm ("v1.5").
"""

import functools
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from hypjax.models import tensors
from hypjax.models.encoder import Encoder
from hypjax.models.layers import Affine, full_products_in, pool_tokens
from hypjax.models.tensors import Tensor

CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_Conv = functools.partial(nn.Conv, use_bias=False, kernel_init=CONV_INIT)


class ResNet(Encoder):
    """Maps images to pooled features of the last stage.

    Attributes:
        image_size: Side of the images in pixels.
        stage_sizes: Number of bottlenecks in each stage. Each stage has half the side and twice the
            width of the one before.
        width: Inner channels of a bottleneck in the first stage; its output has four times as many.
        pooling: Pooling of the last stage's features: see `hypjax.models.layers.poolings`.
        dtype: Dtype of convolutions and activations. Convolutions in float32 are true float32 on
            every device. Parameters and the result are float32.
        remat: Whether to recompute the activations of bottlenecks in the backward pass.
    """

    image_size: int
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    pooling: str = "avg"
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    classifiers = ("fc",)

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return 4 * self.width * 2 ** (len(self.stage_sizes) - 1)

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Names of the parameters of each layer, as in timm: the stem, then the bottlenecks."""
        sizes = enumerate(self.stage_sizes)
        blocks = [(f"stage_{s}_block_{b}",) for s, blocks in sizes for b in range(blocks)]
        return [("stem_conv", "stem_norm"), *blocks]

    @nn.compact
    def __call__(
        self, images: Float[ArrayLike, "batch height width channels"], return_tokens: bool = False
    ) -> Float[Array, "batch dim"] | Float[Array, "batch positions dim"]:
        """Embeds normalised pixels, in float32.

        With `return_tokens` it returns all features of the last stage, row by row.
        """
        with full_products_in(self.dtype):
            x = _conv(self.width, 7, self.dtype, "stem_conv", stride=2)(jnp.asarray(images))
            x = nn.relu(FrozenBatchNorm(self.dtype, name="stem_norm")(x))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
            bottleneck = nn.remat(Bottleneck) if self.remat else Bottleneck
            for stage, blocks in enumerate(self.stage_sizes):
                for block in range(blocks):
                    x = bottleneck(
                        self.width * 2**stage,
                        stride=2 if stage > 0 and block == 0 else 1,
                        dtype=self.dtype,
                        name=f"stage_{stage}_block_{block}",
                    )(x)
        tokens = rearrange(x, "b h w c -> b (h w) c").astype(jnp.float32)
        return tokens if return_tokens else pool_tokens(tokens, 0, self.pooling)

    def tensors(self) -> Iterator[Tensor]:
        """The parameters, by timm's names."""
        yield tensors.conv("conv1", "stem_conv")
        yield from tensors.batch_norm("bn1", "stem_norm")
        for stage, blocks in enumerate(self.stage_sizes):
            for block in range(blocks):
                timm, path = f"layer{stage + 1}.{block}", f"stage_{stage}_block_{block}"
                for i in (1, 2, 3):
                    yield tensors.conv(f"{timm}.conv{i}", path, f"conv_{i}")
                    yield from tensors.batch_norm(f"{timm}.bn{i}", path, f"norm_{i}")
                if block == 0:
                    yield tensors.conv(f"{timm}.downsample.0", path, "shortcut_conv")
                    yield from tensors.batch_norm(f"{timm}.downsample.1", path, "shortcut_norm")


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, which is projected if the shape changes."""

    width: int
    stride: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 4*width"]:
        """Applies the block."""
        conv = functools.partial(_conv, dtype=self.dtype)
        norm = functools.partial(FrozenBatchNorm, self.dtype)
        y = nn.relu(norm(name="norm_1")(conv(self.width, 1, name="conv_1")(x)))
        y = nn.relu(norm(name="norm_2")(conv(self.width, 3, name="conv_2", stride=self.stride)(y)))
        y = norm(name="norm_3")(conv(4 * self.width, 1, name="conv_3")(y))
        if x.shape != y.shape:
            x = conv(4 * self.width, 1, name="shortcut_conv", stride=self.stride)(x)
            x = norm(name="shortcut_norm")(x)
        return nn.relu(x + y)


class FrozenBatchNorm(nn.Module):
    """BatchNorm with fixed pretrained statistics and a trained affine map."""

    dtype: DTypeLike
    eps: float = 1e-5

    def __call__(self, x: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
        """Normalises each channel."""
        factor, shift = self.affine(x.shape[-1])
        return (x * factor + shift).astype(self.dtype)

    @nn.compact
    def affine(self, channels: int) -> Affine:
        """The factor and the shift of each channel that make up the layer."""
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        statistics = self.param(
            "statistics", lambda _: {"mean": jnp.zeros(channels), "variance": jnp.ones(channels)}
        )
        factor = scale * jax.lax.rsqrt(statistics["variance"] + self.eps)
        return factor, bias - statistics["mean"] * factor


def _conv(features: int, size: int, dtype: DTypeLike, name: str, stride: int = 1) -> nn.Conv:
    padding = ((size // 2, size // 2),) * 2
    return _Conv(features, (size, size), stride, padding, dtype=dtype, name=name)
