"""Vision Transformer (Dosovitskiy et al., ICLR 2021), with timm's numerics.

GELU is exact, LayerNorm has ε = 1e-6, one fused matrix with bias computes queries, keys and values,
and position embeddings include the class token. Distilled models (DeiT, Touvron et al., ICML 2021)
have a distillation token after the class token.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from hypjax.models.attention import attend
from hypjax.models.layers import full_products_in, pool_tokens

_TOKEN_INIT = nn.initializers.truncated_normal(0.02)


class VisionTransformer(nn.Module):
    """Maps images to one embedding, pooled from the tokens after the final LayerNorm.

    Attributes:
        image_size: Side of the images in pixels, for which pretrained position embeddings are
            resized.
        patch_size: Side of a patch in pixels; it divides the sides of the images.
        width: Dimension of tokens and of the embedding.
        depth: Number of blocks.
        num_heads: Number of attention heads; it divides the width.
        distilled: Whether a distillation token follows the class token.
        pooling: How tokens are pooled into an embedding, see `hypjax.models.layers.poolings`.
        mlp_ratio: Width of a block's hidden layer, relative to the width of tokens.
        dtype: Dtype of matrix products and of the activations between them. Products in float32 are
            true float32 on every device. Parameters, the residual stream, LayerNorm statistics,
            softmax and the result are always float32.
        remat: Whether to recompute the activations of blocks in the backward pass.
    """

    image_size: int
    patch_size: int
    width: int
    depth: int
    num_heads: int
    distilled: bool = False
    pooling: str = "cls"
    mlp_ratio: float = 4
    dtype: DTypeLike = jnp.float32
    remat: bool = False

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return self.width

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patch tokens."""
        return 2 if self.distilled else 1

    @nn.compact
    def __call__(
        self,
        images: Float[ArrayLike, "batch height width channels"],
        return_tokens: bool = False,
        branch_factors: Float[ArrayLike, "batch depth 2"] | None = None,
    ) -> Float[Array, "batch dim"] | Float[Array, "batch tokens dim"]:
        """Embeds images.

        Args:
            images: Normalised pixels, [batch, height, width, channels].
            return_tokens: Whether to return all tokens after the final LayerNorm, the class token
                first, as timm's `forward_features` does.
            branch_factors: Factors of the two residual branches of each block, attention and
                perceptron, for each image: stochastic depth (`drop_path_factors`), in training
                only. None multiplies by nothing.

        Returns:
            Embeddings [batch, dim], or with `return_tokens` tokens [batch, tokens, dim]; float32.
        """
        block = nn.remat(Block) if self.remat else Block
        with full_products_in(self.dtype):
            tokens = self._tokens(images)
            for i in range(self.depth):
                factors = () if branch_factors is None else (branch_factors[:, i],)
                tokens = block(self.num_heads, self.mlp_ratio, self.dtype, name=f"block_{i}")(
                    tokens, *factors
                )
            tokens = _layer_norm("norm", jnp.float32)(tokens)
        if return_tokens:
            return tokens
        return pool_tokens(tokens, self.num_prefix_tokens, self.pooling)

    def _tokens(self, images: ArrayLike) -> Array:
        """Class token, distillation token if any, and patch tokens, with position embeddings."""
        p = self.patch_size
        patches = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=p)
        patches = nn.Dense(self.width, dtype=self.dtype, name="patch_embed")(patches)
        names = ("cls_token", "dist_token")[: self.num_prefix_tokens]
        prefix = [self.param(name, _TOKEN_INIT, (1, 1, self.width)) for name in names]
        number = len(prefix) + patches.shape[1]
        positions = self.param("pos_embed", _TOKEN_INIT, (1, number, self.width))
        prefix = [jnp.broadcast_to(token, (len(images), 1, self.width)) for token in prefix]
        return jnp.concatenate([*prefix, patches], axis=1) + positions


def drop_path_factors(
    key: PRNGKeyArray, rate: float, depth: int, images: int
) -> Float[Array, "images depth 2"]:
    """Draws the factors of residual branches for stochastic depth (Huang et al., ECCV 2016).

    As in timm, each of a block's two branches, attention and perceptron, is dropped for each image
    independently, at a rate that rises linearly from 0 in the first block to the given one in the
    last. What is kept is divided by the probability to keep it, so that the mean of every factor is
    1. Factors are float32.
    """
    kept = 1 - jnp.linspace(0, rate, depth, dtype=jnp.float32)[:, None]
    return jax.random.bernoulli(key, kept, (images, depth, 2)) / kept


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then a two-layer perceptron."""

    num_heads: int
    mlp_ratio: float
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch tokens dim"],
        branch_factors: Float[Array, "batch 2"] | None = None,
    ) -> Float[Array, "batch tokens dim"]:
        """Applies the block, with its branches times their factors, if there are any."""

        def scaled(branch: Array, place: int) -> Array:
            return (
                branch if branch_factors is None else branch_factors[:, place, None, None] * branch
            )

        width = x.shape[-1]
        normed = _layer_norm("norm_1", self.dtype)(x)
        x = x + scaled(Attention(self.num_heads, self.dtype, name="attention")(normed), 0)
        normed = _layer_norm("norm_2", self.dtype)(x)
        hidden = _dense(int(width * self.mlp_ratio), self.dtype, "fc_1")(normed)
        return x + scaled(_dense(width, self.dtype, "fc_2")(_gelu(hidden)), 1)


class Attention(nn.Module):
    """Multi-head self-attention with a fused projection of queries, keys and values."""

    num_heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens dim"]:
        """Attends over all tokens."""
        width = x.shape[-1]
        qkv = _dense(3 * width, self.dtype, "qkv")(x)
        query, key, value = rearrange(qkv, "b t (n h d) -> n b t h d", n=3, h=self.num_heads)
        mixed = attend(query, key, value)
        return _dense(width, self.dtype, "proj")(rearrange(mixed, "b t h d -> b t (h d)"))


def resize_positions(
    positions: Float[ArrayLike, "1 tokens dim"], tokens: int, prefix: int
) -> Float[ArrayLike, "1 tokens2 dim"]:
    """Interpolates a square of positions after a prefix as timm does: bicubic, antialiased."""
    old, new = (math.isqrt(max(n - prefix, 0)) for n in (positions.shape[1], tokens))
    if old in (0, new) or old**2 + prefix != positions.shape[1]:
        return positions
    grid = rearrange(positions[0, prefix:], "(h w) d -> h w d", h=old)
    grid = jax.image.resize(jnp.asarray(grid), (new, new, grid.shape[-1]), "cubic", antialias=True)
    grid = rearrange(grid, "h w d -> 1 (h w) d")
    return jnp.concatenate([positions[:, :prefix], grid], axis=1)


def _dense(features: int, dtype: DTypeLike, name: str) -> nn.Dense:
    return nn.Dense(features, dtype=dtype, kernel_init=_TOKEN_INIT, name=name)


@jax.checkpoint  # Nothing inside is stored for the backward pass.
def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU, x·Φ(x), in float32 by erf as in timm; JAX's uses erfc, which is slow on CPUs."""
    full = x.astype(jnp.float32)
    return (0.5 * full * (1 + jax.lax.erf(full * math.sqrt(0.5)))).astype(x.dtype)


def _layer_norm(name: str, dtype: DTypeLike) -> nn.LayerNorm:
    # The fast variance E[x²] − E[x]² loses digits for tokens whose mean exceeds their deviation.
    return nn.LayerNorm(epsilon=1e-6, dtype=dtype, use_fast_variance=False, name=name)
