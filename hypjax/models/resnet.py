"""ResNet-50 and ResNet-101 (He et al., CVPR 2016), with frozen BatchNorm and timm's numerics."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hypjax.models.encoder import ConvNet
from hypjax.models.layers import Affine, FeatureMap

CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
Conv = functools.partial(nn.Conv, use_bias=False, kernel_init=CONV_INIT)


class ResNet(ConvNet):
    """Maps images to the pooled features of the last stage.

    Each stage halves the side and doubles the width. `depths` are the stages' numbers of
    bottlenecks. `width` is the inner width of the first stage, a quarter of its output's width.
    """

    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classifiers = ("fc",)
    names = (
        ("^stem_conv", "conv1"),
        ("^stem_norm", "bn1"),
        (r"^stage_(\d)_block_", lambda stage: f"layer{int(stage[1]) + 1}."),
        (r"\.conv_(\d)", r".conv\1"),
        (r"\.norm_(\d)", r".bn\1"),
        ("shortcut_conv", "downsample.0"),
        ("shortcut_norm", "downsample.1"),
    )

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return 4 * self.width * 2 ** (len(self.depths) - 1)

    def _stem(self, x: FeatureMap) -> Array:
        x = _conv(self.width, 7, self.dtype, "stem_conv", stride=2)(x)
        x = nn.relu(FrozenBatchNorm(self.dtype, name="stem_norm")(x))
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))

    def _block(self, x: FeatureMap, stage: int, i: int) -> Array:
        bottleneck = nn.remat(Bottleneck) if self.remat else Bottleneck
        stride = 2 if stage > 0 and i == 0 else 1
        name = f"stage_{stage}_block_{i}"
        return bottleneck(self.width * 2**stage, stride, self.dtype, name=name)(x)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, which is projected if the shape changes."""

    width: int
    stride: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: FeatureMap) -> Float[Array, "batch h2 w2 4*{self.width}"]:
        """Applies the block."""
        conv = functools.partial(_conv, dtype=self.dtype)
        norm = functools.partial(FrozenBatchNorm, self.dtype)
        y = nn.relu(norm(name="norm_1")(conv(self.width, 1, name="conv_1")(x)))
        # The 3×3 convolution has the stride, as in torchvision and timm ("v1.5").
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
        """The layer's equivalent factor and shift of each channel."""
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        statistics = self.param(
            "statistics", lambda _: {"mean": jnp.zeros(channels), "variance": jnp.ones(channels)}
        )
        factor = scale * jax.lax.rsqrt(statistics["variance"] + self.eps)
        return factor, bias - statistics["mean"] * factor


def _conv(features: int, size: int, dtype: DTypeLike, name: str, stride: int = 1) -> nn.Conv:
    padding = ((size // 2, size // 2),) * 2
    return Conv(features, (size, size), stride, padding, dtype=dtype, name=name)
