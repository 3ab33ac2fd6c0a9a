"""MLP-Mixer (Tolstikhin et al., NeurIPS 2021), with timm's numerics."""

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from hypjax.models.encoder import Encoder
from hypjax.models.layers import Dense, LayerNorm, activate, full_products_in, pool_tokens


class Mixer(Encoder):
    """Perceptrons mix patches and channels in turn."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    pooling: str = "avg"
    dtype: DTypeLike = jnp.float32
    remat: bool = False

    classifiers = ("head",)
    names = (
        ("^stem", "stem.proj"),
        (r"^block_(\d+)", r"blocks.\1"),
        (r"\.norm_", ".norm"),
        (r"\.(tokens|channels)", r".mlp_\1"),
    )

    @property
    def patches(self) -> dict[str, int]:
        """The layer that is a convolution in timm, with the side of its kernel."""
        return {"stem": self.patch_size}

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return self.width

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """The stem, then the blocks; in timm, the last norm belongs to the last block."""
        blocks = [(f"block_{i}",) for i in range(self.depth)]
        return [("stem",), *blocks[:-1], (*blocks[-1], "norm")]

    @nn.compact
    def __call__(
        self, images: Float[ArrayLike, "b h w c"], return_tokens: bool = False
    ) -> Float[Array, "b dim"] | Float[Array, "b patches dim"]:
        """Embeds normalised pixels; products have the dtype, all else is float32."""
        p = self.patch_size
        block = nn.remat(Block) if self.remat else Block
        with full_products_in(self.dtype):
            x = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=p)
            x = Dense(self.width, self.dtype, name="stem")(x).astype(jnp.float32)
            for i in range(self.depth):
                x = block(self.dtype, name=f"block_{i}")(x)
            x, (scale, shift) = LayerNorm(jnp.float32, name="norm")(x)
        x = x * scale + shift
        return x if return_tokens else pool_tokens(x, 0, self.pooling)


class Block(nn.Module):
    """A perceptron over patches, then one over channels, each after a LayerNorm."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b patches dim"]) -> Float[Array, "b patches dim"]:
        """Applies the block."""
        width = x.shape[-1]
        normed, (scale, shift) = LayerNorm(jnp.float32, name="norm_1")(x)
        patches = jnp.swapaxes(normed * scale + shift, 1, 2)
        x += jnp.swapaxes(Perceptron(width // 2, self.dtype, name="tokens")(patches), 1, 2)
        normed, (scale, shift) = LayerNorm(jnp.float32, name="norm_2")(x)
        return x + Perceptron(4 * width, self.dtype, name="channels")(normed * scale + shift)


class Perceptron(nn.Module):
    """Two linear layers with a GELU between them."""

    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Applies both layers."""
        hidden = activate(Dense(self.hidden, self.dtype, name="fc1")(x))
        return Dense(x.shape[-1], self.dtype, name="fc2")(hidden)
