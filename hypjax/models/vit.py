"""Vision Transformer (Dosovitskiy et al., ICLR 2021), with timm's numerics.

GELU is exact, LayerNorm has ε = 1e-6, one fused matrix with bias computes queries, keys and values,
and position embeddings include the class token. Distilled models (DeiT, Touvron et al., ICML 2021)
have a distillation token after the class token.
"""

import functools
import math
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from hypjax.models.attention import attend
from hypjax.models.layers import full_products_in, pool_tokens, pooled_tokens

Affine: TypeAlias = tuple[Float[Array, " dim"], Float[Array, " dim"]]  # Scale and shift.
_TILE = 8  # Sides of matrices that tensor cores multiply are multiples of it.
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
        tensor_cores: Whether to arrange tokens for NVIDIA's tensor cores, which changes results by
            their rounding only. Their number is padded to a multiple of 8, since XLA would
            otherwise copy every operand of a product into such rows; and tokens are stored one
            after the other, so that a LayerNorm reads each once.
        attention: The kernel of attention on NVIDIA GPUs, see `attend`.
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
    tensor_cores: bool = False
    attention: str = "auto"

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return self.width

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Names of the parameters of each layer, as in timm: what makes tokens, then the blocks."""
        blocks = [(f"block_{i}",) for i in range(self.depth)]
        stem = ("cls_token", "dist_token", "pos_embed", "patch_embed")
        return [stem, *blocks[:-1], (*blocks[-1], "norm")]

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
            number = tokens.shape[1]
            pooled = number if return_tokens else pooled_tokens(self.pooling) or number
            options = {"num_heads": self.num_heads, "mlp_ratio": self.mlp_ratio}
            options |= {"dtype": self.dtype, "kernel": self.attention}
            outputs = pooled
            if self.tensor_cores:
                tokens = _in_rows(_padded(tokens))
                options["tokens"], outputs = number, pooled + -pooled % _TILE
            for i in range(self.depth):
                factors = () if branch_factors is None else (branch_factors[:, i],)
                # What is not pooled is needed up to the last block, which attends to it.
                last = {"outputs": outputs} if i == self.depth - 1 else {}
                tokens = block(**options, **last, name=f"block_{i}")(tokens, *factors)
            tokens = tokens[:, :pooled]
            tokens, (scale, shift) = LayerNorm(jnp.float32, name="norm")(tokens)
            tokens = tokens * scale + shift
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


def _padded(tokens: Float[Array, "batch tokens dim"]) -> Float[Array, "batch padded dim"]:
    """Tokens with zeros after them, to a multiple of 8."""
    return jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % _TILE), (0, 0)))


def _in_rows(tokens: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens dim"]:
    """Keeps XLA from transposing tokens in memory, as it does to suit the patch projection."""
    return with_layout_constraint(tokens, Layout((0, 1, 2)))


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then a two-layer perceptron.

    Attributes:
        num_heads: Number of attention heads.
        mlp_ratio: Width of the perceptron divided by that of the tokens.
        dtype: Dtype of matrix products.
        kernel: That of attention on NVIDIA GPUs, see `attend`.
        tokens: On tensor cores (see `VisionTransformer`), the number of tokens before padding.
        outputs: How many of the first tokens are returned; None for all.
    """

    num_heads: int
    mlp_ratio: float
    dtype: DTypeLike
    kernel: str = "auto"
    tokens: int | None = None
    outputs: int | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch tokens dim"],
        branch_factors: Float[Array, "batch 2"] | None = None,
    ) -> Float[Array, "batch outputs dim"]:
        """Applies the block, with its branches times their factors, if there are any."""

        def added(x: Array, branch: Array, place: int) -> Array:
            if branch_factors is not None:
                branch = branch_factors[:, place, None, None] * branch
            return x + branch if self.tokens is None else _in_rows(x + branch)

        width = x.shape[-1]
        options = (self.num_heads, self.dtype, self.kernel, self.tokens, self.outputs)
        normed = LayerNorm(self.dtype, name="norm_1")(x)
        mixed = Attention(*options, name="attention")(*normed)
        x = added(x[:, : self.outputs], mixed, 0)
        normed = LayerNorm(self.dtype, name="norm_2")(x)
        hidden = Dense(int(width * self.mlp_ratio), self.dtype, name="fc_1")(*normed)
        return added(x, Dense(width, self.dtype, name="fc_2")(_gelu(hidden)), 1)


class Attention(nn.Module):
    """Multi-head self-attention; one matrix has the weights of queries, keys and values.

    Its attributes are those of the `Block`.
    """

    num_heads: int
    dtype: DTypeLike
    kernel: str = "auto"
    tokens: int | None = None
    outputs: int | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens dim"], affine: Affine
    ) -> Float[Array, "batch outputs dim"]:
        """Attends to all tokens but those of padding; see `Dense` for the affine map."""
        width = x.shape[-1]
        # Three products are faster than one whose result, and its gradient, is taken apart.
        qkv = Dense(3 * width, self.dtype, name="qkv")
        factors = (x[:, : self.outputs], x, x)
        if self.tokens is not None:  # Or XLA merges the three where images are few.
            factors = jax.lax.optimization_barrier(factors)
        query, key, value = (
            rearrange(qkv(factor, affine, part, 3), "b t (h d) -> b t h d", h=self.num_heads)
            for part, factor in enumerate(factors)
        )
        mixed = attend(query, key, value, self.tokens, self.kernel)
        return Dense(width, self.dtype, name="proj")(rearrange(mixed, "b t h d -> b t (h d)"))


class Dense(nn.Module):
    """A linear layer, into whose weights the affine map of a `LayerNorm` is folded, if given."""

    features: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... dim"],
        affine: Affine | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> Float[Array, "... features"]:
        """Applies the layer, or one of equal parts of its outputs, to x · scale + shift."""
        kernel = self.param("kernel", _TOKEN_INIT, (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        kernel, bias = (jnp.split(each, parts, axis=-1)[part] for each in (kernel, bias))
        if affine is not None:
            scale, shift = affine
            bias = bias + jnp.matmul(shift, kernel, precision="highest")
            kernel = scale[:, None] * kernel
        x, kernel, bias = (each.astype(self.dtype) for each in (x, kernel, bias))
        precision = "highest" if x.dtype == jnp.float32 else None
        return _product(x, kernel, precision) + bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(
    x: Float[Array, "... dim"], kernel: Float[Array, "dim dim2"], precision: str | None
) -> Float[Array, "... dim2"]:
    return jnp.matmul(x, kernel, precision=precision)


def _product_forward(x: Array, kernel: Array, precision: str | None) -> tuple:
    return _product(x, kernel, precision), (x, kernel)


def _product_backward(precision: str | None, kept: tuple, slope: Array) -> tuple[Array, Array]:
    # JAX derives the transpose of the kernel's gradient, for which XLA copies a factor on CPUs.
    x, kernel = kept
    by_x = jnp.matmul(slope, kernel.T, precision=precision)
    x, slope = (rearrange(each, "... dim -> (...) dim") for each in (x, slope))
    return by_x, jnp.matmul(x.T, slope, precision=precision)


_product.defvjp(_product_forward, _product_backward)


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


@jax.checkpoint  # Nothing inside is stored for the backward pass.
def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU, x·Φ(x), in float32 by erf as in timm; JAX's uses erfc, which is slow on CPUs."""
    full = x.astype(jnp.float32)
    return (0.5 * full * (1 + jax.lax.erf(full * math.sqrt(0.5)))).astype(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis (Ba et al., 2016) with ε = 1e-6, in float32.

    Returns its normalised input in `dtype`, and the scale and shift that belong to it. These pass
    into the weights of the next `Dense`: that is the same, but their gradients are then sums over
    weights, and not over all tokens.
    """

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "... dim"]) -> tuple[Float[Array, "... dim"], Affine]:
        """Applies the layer."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        shift = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return _normalized(x, jnp.dtype(self.dtype)), (scale, shift)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _normalized(x: Float[Array, "... dim"], dtype: jnp.dtype) -> Float[Array, "... dim"]:
    return _normalized_forward(x, dtype)[0]


def _normalized_forward(x: Array, dtype: jnp.dtype) -> tuple:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    # The fast variance E[x²] − E[x]² loses digits for tokens whose mean exceeds their deviation.
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(variance + 1e-6)
    return ((x - mean) * factor).astype(dtype), (x, mean, factor)


def _normalized_backward(dtype: jnp.dtype, kept: tuple, slope: Array) -> tuple[Array]:
    # Derived by JAX, it stores several arrays of the size of x; here no more than the result.
    x, mean, factor = kept
    slope, unit = slope.astype(jnp.float32), (x - mean) * factor
    along = jnp.mean(slope * unit, axis=-1, keepdims=True)
    return (factor * (slope - jnp.mean(slope, axis=-1, keepdims=True) - unit * along),)


_normalized.defvjp(_normalized_forward, _normalized_backward)
