"""Vision Transformer (Dosovitskiy et al., ICLR 2021), with timm's numerics.

Its options also cover the encoders that descend from it, such as DeiT (Touvron et al., ICML 2021),
DINOv2, SigLIP and EVA-02; `hypjax.models.architectures` lists them.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from hypjax.models.attention import Heads, attend
from hypjax.models.encoder import Encoder, Names, Path
from hypjax.models.layers import (
    GEM_EXPONENT,
    KERNEL_INIT,
    Affine,
    Dense,
    Images,
    LayerNorm,
    activate,
    full_products_in,
    normed,
    num_pooled_tokens,
    poolings,
)

# Cosines and sines of the angles of rotary position embeddings.
Rope: TypeAlias = tuple[Float[Array, "tokens dim/2"], Float[Array, "tokens dim/2"]]
_TILE = 8  # Tensor cores multiply matrices whose sides are multiples of this.


class Rotary(NamedTuple):
    """Rotary position embeddings of patches (Su et al., 2021; Heo et al., ECCV 2024).

    In each head, pairs of coordinates of queries and keys are rotated: half of the pairs by angles
    proportional to the patch's row, half by angles proportional to its column. Class, distillation
    and register tokens are not rotated.
    """

    temperature: float = 1e4  # Frequencies fall from 1 towards 1 / temperature.
    centred: bool = False  # Whether rows and columns are numbered from −2π to 2π (DINOv3).
    reference: int = 1  # Unless centred, side to which grids of other sizes are scaled.
    offset: float = 0.0  # Number of the first row and column, unless centred.
    columns_first: bool = False  # Whether columns, instead of rows, rotate the first pairs.
    halves: bool = False  # Whether a pair has a coordinate of each half, instead of adjacent ones.

    def angles(self, height: int, width: int, dim: int) -> Float[np.ndarray, "patches dim/2"]:
        """Angles of the patches of a grid, row by row, for heads of dimension `dim`."""

        def coordinates(side: int) -> np.ndarray:
            if self.centred:
                return 2 * np.pi * ((2 * np.arange(side) + 1) / side - 1)
            return (np.arange(side) + self.offset) * self.reference / side

        rows, columns = np.meshgrid(coordinates(height), coordinates(width), indexing="ij")
        axes = np.stack([columns, rows] if self.columns_first else [rows, columns])
        frequencies = self.temperature ** -np.linspace(0, 1, dim // 4, endpoint=False)
        angles = rearrange(axes, "a h w -> (h w) a 1") * frequencies
        return rearrange(angles, "p a f -> p (a f)").astype(np.float32)

    def rotate(self, x: Heads, rope: Rope) -> Heads:
        """Rotates pairs of coordinates of each head, in float32."""
        pairs = "(two p)" if self.halves else "(p two)"
        first, second = rearrange(x.astype(jnp.float32), f"b t h {pairs} -> two b t h p", two=2)
        cos, sin = (table[: x.shape[1], None] for table in rope)
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin])
        return rearrange(rotated, f"two b t h p -> b t h {pairs}").astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class BlockDesign:
    """How a family of encoders changes the blocks of the original vision transformer."""

    norm_eps: float = 1e-6  # ε of all LayerNorms.
    activation: str = "gelu"  # Activation of perceptrons, see `hypjax.models.layers.activate`.
    # Unless '', a second linear map of the tokens multiplies the activation (GLU; Shazeer, 2020).
    # 'packed' keeps both maps in one matrix, 'separate' in two.
    gate: str = ""
    mlp_norm: bool = False  # Whether a LayerNorm precedes the perceptron's last layer (EVA-02).
    qkv_bias: str = "qkv"  # Which of queries, keys and values have biases: 'qkv', 'qv' or ''.
    qkv_packed: bool = True  # Whether queries, keys and values share one matrix of weights.
    layer_scale: bool = False  # Learned factors multiply the branches (Touvron et al., ICCV 2021).
    rotary: Rotary | None = None


class VisionTransformer(Encoder):
    """Vision Transformer: an `Encoder` that pools the tokens after the final LayerNorm.

    Attributes:
        patch_size: Side of a patch in pixels; it divides the sides of the images.
        width: Dimension of tokens and of the embedding.
        depth: Number of blocks.
        num_heads: Number of attention heads; it divides the width.
        class_tokens: 1 for the class token, 2 if DeiT's distillation token follows it, or 0.
        registers: Number of register tokens before the patch tokens (Darcet et al., ICLR 2024).
        positions: The tokens with a learned position embedding: 'all', 'patches' or 'none'.
        pre_norm: Whether a LayerNorm precedes the blocks; `patch_embed` then has no bias (CLIP).
        pool_first: Whether the final LayerNorm follows the pooling (EVA-02). Returned tokens are
            then not normalised.
        attention_pool: Number of heads of the attention pooling "map" (SigLIP, Zhai et al., ICCV
            2023); 0 for an encoder without this pooling.
        blocks: Design of the family's blocks.
        mlp_ratio: Width of a block's hidden layer, relative to the width of tokens.
        dtype: Dtype of matrix products and of activations between them. Parameters, the residual
            stream, LayerNorm statistics, rotations, softmax and the result are always float32.
        tensor_cores: Whether to arrange tokens for NVIDIA's tensor cores, which only changes the
            rounding of results. Tokens are padded to a multiple of 8, since XLA would otherwise
            copy operands into padded rows, and stored one after the other, so that a LayerNorm
            reads each token once.
        attention: Kernel of attention on NVIDIA GPUs, see `attend`.
    """

    image_size: int | tuple[int, int]
    patch_size: int
    width: int
    depth: int
    num_heads: int
    class_tokens: int = 1
    registers: int = 0
    positions: str = "all"
    pre_norm: bool = False
    pool_first: bool = False
    attention_pool: int = 0
    blocks: BlockDesign = BlockDesign()
    pooling: str = "cls"
    mlp_ratio: float = 4.0
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    tensor_cores: bool = False
    attention: str = "auto"
    gem_exponent: float = GEM_EXPONENT
    learn_gem: bool = False

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return self.width

    @property
    def layers(self) -> list[Path]:
        """Names of the parameters of each layer, as in timm: tokens first, then the blocks."""
        blocks: list[Path] = [(f"block_{i}",) for i in range(self.depth)]
        if not self.pool_first:
            blocks[-1] += ("norm",)
        tokens = ("cls_token", "dist_token", "reg_token", "pos_embed")
        return [(*tokens, "patch_embed", "norm_pre"), *blocks]

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patch tokens."""
        return self.class_tokens + self.registers

    @property
    def poolings(self) -> list[str]:
        """Names of the poolings that the encoder supports."""
        return poolings(self.class_tokens) + ["map"] * (self.attention_pool > 0)

    @property
    def classifiers(self) -> tuple[str, ...]:
        """Names in timm of the layers that follow the pooling."""
        return ("head", "head_dist")[: max(1, self.class_tokens)]

    @property
    def names(self) -> Names:
        """Patterns that turn parameter paths into timm's names, see `Encoder`."""
        # timm's class for models with rotary embeddings uses other names.
        scale = r"gamma_\1" if self.blocks.rotary else r"ls\1.gamma"
        return [
            (r"^block_(\d+)", r"blocks.\1"),
            (r"\.attention\.", ".attn."),
            (r"attn\.(q|k|v)(uery|ey|alue)", r"attn.\1_proj"),
            (r"\.norm_(\d)", r".norm\1"),
            (r"\.mlp_norm", ".mlp.norm"),
            (r"\.fc_gate", ".mlp.fc1_g"),
            (r"\.fc_1", ".mlp.fc1_x" if self.blocks.gate == "separate" else ".mlp.fc1"),
            (r"\.fc_2", ".mlp.fc2"),
            (r"layer_scale_(\d)", scale),
            ("^patch_embed", "patch_embed.proj"),
            (r"^norm\.", "fc_norm." if self.pool_first else "norm."),
        ]

    @property
    def patches(self) -> dict[str, int]:
        """Patch projections, see `Encoder`."""
        return {"patch_embed": self.patch_size}

    def resized(self, positions: Float[ArrayLike, "1 tokens dim"]) -> Float[Array, "1 tokens2 dim"]:
        """Interpolates embeddings of a square grid to the images' grid, bicubic and antialiased."""
        positions = jnp.asarray(positions)
        num_prefix = self.num_prefix_tokens if self.positions == "all" else 0
        grid = tuple(side // self.patch_size for side in self.sides)
        side = math.isqrt(max(positions.shape[1] - num_prefix, 0))
        if grid == (side, side) or side == 0 or side**2 + num_prefix != positions.shape[1]:
            return positions  # Their grid is the images' grid, or is not square.
        square = rearrange(positions[:, num_prefix:], "1 (h w) d -> h w d", h=side)
        resized = jax.image.resize(square, (*grid, square.shape[-1]), "cubic", antialias=True)
        resized = rearrange(resized, "h w d -> 1 (h w) d")
        return jnp.concatenate([positions[:, :num_prefix], resized], axis=1)

    @nn.compact
    def __call__(
        self,
        images: Float[ArrayLike, "batch height width channels"],
        return_tokens: bool = False,
        drop_path_masks: Float[Array, "batch depth 2"] | None = None,
    ) -> Float[Array, "batch dim"] | Float[Array, "batch tokens dim"]:
        """Embeds normalised pixels, in float32.

        With `return_tokens`, returns all tokens after the final LayerNorm, the class token first,
        like timm's `forward_features`. In training, `drop_path_masks` multiply the two residual
        branches of each block, attention and perceptron (`draw_drop_path_masks`).
        """
        block = nn.remat(Block) if self.remat else Block
        images = jnp.asarray(images)
        with full_products_in(self.dtype):
            tokens = self._tokens(images)
            rope = self._rope(images)
            num_tokens = tokens.shape[1]
            num_pooled = num_tokens
            if not return_tokens:
                num_pooled = num_pooled_tokens(self.pooling, num_tokens)
            num_outputs = num_pooled  # Of the last block, which attends to all tokens.
            heads = HeadDesign(self.num_heads, self.dtype, self.attention)
            if self.tensor_cores:
                heads = heads._replace(tokens=num_tokens)
                padding = -num_tokens % _TILE
                tokens = _store_row_major(jnp.pad(tokens, ((0, 0), (0, padding), (0, 0))))
                num_outputs += -num_pooled % _TILE
            for i in range(self.depth):
                if i == self.depth - 1:
                    heads = heads._replace(outputs=num_outputs)
                masks = None if drop_path_masks is None else drop_path_masks[:, i]
                apply_block = block(heads, self.mlp_ratio, self.blocks, name=f"block_{i}")
                tokens = apply_block(tokens, masks, rope)
            tokens = tokens[:, :num_pooled]
            if not self.pool_first:
                tokens = normed(tokens, "norm", self.blocks.norm_eps)
            if return_tokens and not self.is_initializing():
                return tokens
            embedding = self._pooled(tokens)
            return normed(embedding, "norm", self.blocks.norm_eps) if self.pool_first else embedding

    def _tokens(self, images: Images) -> Array:
        """Prefix and patch tokens, with position embeddings."""
        p = self.patch_size
        patches = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=p)
        patches = nn.Dense(self.width, not self.pre_norm, self.dtype, name="patch_embed")(patches)
        counts = [("cls_token", 1), ("dist_token", 1)][: self.class_tokens]
        if self.registers:
            counts.append(("reg_token", self.registers))
        prefix = [self.param(name, KERNEL_INIT, (1, n, self.width)) for name, n in counts]
        prefix = [jnp.broadcast_to(x, (len(images), *x.shape[1:])) for x in prefix]
        tokens = jnp.concatenate([*prefix, patches], axis=1)
        if self.positions != "none":
            num_unpositioned = self.num_prefix_tokens if self.positions == "patches" else 0
            shape = (1, tokens.shape[1] - num_unpositioned, self.width)
            positions = self.param("pos_embed", KERNEL_INIT, shape)
            if num_unpositioned:
                positions = jnp.pad(positions, ((0, 0), (num_unpositioned, 0), (0, 0)))
            tokens += positions
        return normed(tokens, "norm_pre", self.blocks.norm_eps) if self.pre_norm else tokens

    def _rope(self, images: Images) -> Rope | None:
        """Rotations of all tokens; angles of prefix tokens and padding are 0."""
        if self.blocks.rotary is None:
            return None
        height, width = (side // self.patch_size for side in images.shape[1:3])
        angles = self.blocks.rotary.angles(height, width, self.width // self.num_heads)
        padding = -(len(angles) + self.num_prefix_tokens) % _TILE if self.tensor_cores else 0
        angles = np.pad(angles, ((self.num_prefix_tokens, padding), (0, 0)))
        return np.cos(angles), np.sin(angles)

    def _pooled(self, tokens: Array) -> Array:
        """Pools tokens; the parameters of the pooling "map" exist whether it is used or not."""
        if self.attention_pool and (self.pooling == "map" or self.is_initializing()):
            heads, ratio = self.attention_pool, self.mlp_ratio
            pooling = AttentionPool(heads, ratio, self.blocks, self.dtype, name="attn_pool")
            pooled = pooling(tokens)
            if self.pooling == "map":
                return pooled
        return self.pool(tokens)


def draw_drop_path_masks(
    key: PRNGKeyArray, rate: float, depth: int, num_images: int
) -> Float[Array, "num_images depth 2"]:
    """Draws the masks of residual branches for stochastic depth (Huang et al., ECCV 2016).

    As in timm, each block's two branches, attention and perceptron, are dropped independently and
    for each image, at a rate that rises linearly from 0 in the first block to `rate` in the last. A
    mask is 0 or 1 / (1 − the block's rate), so that its mean is 1.
    """
    keep_rates = 1 - jnp.linspace(0, rate, depth, dtype=jnp.float32)[:, None]
    return jax.random.bernoulli(key, keep_rates, (num_images, depth, 2)) / keep_rates


def _store_row_major(tokens: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens dim"]:
    """Keeps XLA from transposing tokens in memory to suit the patch projection."""
    return with_layout_constraint(tokens, Layout((0, 1, 2)))


class HeadDesign(NamedTuple):
    """Attention heads, and the tokens that they attend to and return."""

    num_heads: int
    dtype: DTypeLike  # Dtype of the block's matrix products.
    kernel: str = "auto"  # Kernel of attention on NVIDIA GPUs, see `attend`.
    tokens: int | None = None  # Tokens without padding, if arranged for tensor cores.
    outputs: int | None = None  # Number of leading tokens to return; None for all.


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then a perceptron."""

    heads: HeadDesign
    mlp_ratio: float  # Width of the perceptron divided by the tokens' width.
    design: BlockDesign = BlockDesign()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch tokens dim"],
        drop_path_masks: Float[Array, "batch 2"] | None = None,
        rope: Rope | None = None,
    ) -> Float[Array, "batch outputs dim"]:
        """Applies the block; masks multiply its two branches."""

        def add(x: Array, branch: Array, index: int) -> Array:
            if drop_path_masks is not None:
                branch = drop_path_masks[:, index, None, None] * branch
            return x + branch if self.heads.tokens is None else _store_row_major(x + branch)

        width, design = x.shape[-1], self.design
        attention_scale: Array | None = None
        mlp_scale: Array | None = None
        if design.layer_scale:
            initial = nn.initializers.constant(1e-5)
            attention_scale = self.param("layer_scale_1", initial, (width,))
            mlp_scale = self.param("layer_scale_2", initial, (width,))
        norm = functools.partial(LayerNorm, self.heads.dtype, design.norm_eps)
        attention = Attention(self.heads, design, name="attention")
        mixed = attention(*norm(name="norm_1")(x), attention_scale, rope)
        x = add(x[:, : self.heads.outputs], mixed, 0)
        hidden = self._hidden(*norm(name="norm_2")(x))
        affine = None
        if design.mlp_norm:
            hidden, affine = norm(name="mlp_norm")(hidden)
        fc_2 = Dense(width, self.heads.dtype, name="fc_2")
        return add(x, fc_2(hidden, affine, factor=mlp_scale), 1)

    def _hidden(self, x: Array, affine: Affine) -> Array:
        """Applies the perceptron up to the input of its last layer."""
        activation, gate = self.design.activation, self.design.gate
        width = int(x.shape[-1] * self.mlp_ratio)
        if gate == "packed":
            packed = Dense(2 * width, self.heads.dtype, name="fc_1")
            gated = packed(x, affine, part=0, parts=2)
            return activate(gated, activation) * packed(x, affine, part=1, parts=2)
        hidden = Dense(width, self.heads.dtype, name="fc_1")(x, affine)
        if gate == "separate":
            gated = Dense(width, self.heads.dtype, name="fc_gate")(x, affine)
            return activate(gated, activation) * hidden
        return activate(hidden, activation)


class Attention(nn.Module):
    """Multi-head self-attention, with the attributes of `Block`."""

    heads: HeadDesign
    design: BlockDesign

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch tokens dim"],
        affine: Affine,
        factor: Float[Array, " dim"] | None = None,
        rope: Rope | None = None,
    ) -> Float[Array, "batch outputs dim"]:
        """Attends to all tokens without padding; `Dense` explains `affine` and `factor`."""
        width, design = x.shape[-1], self.design
        inputs = (x[:, : self.heads.outputs], x, x)
        if self.heads.tokens is not None:  # Otherwise, XLA merges the products for few images.
            inputs = jax.lax.optimization_barrier(inputs)
        query, key, value = (
            rearrange(projected, "b t (h d) -> b t h d", h=self.heads.num_heads)
            for projected in self._projected(inputs, affine)
        )
        if design.rotary is not None and rope is not None:
            query, key = (design.rotary.rotate(x, rope) for x in (query, key))
        mixed = attend(query, key, value, self.heads.tokens, self.heads.kernel)
        mixed = rearrange(mixed, "b t h d -> b t (h d)")
        return Dense(width, self.heads.dtype, name="proj")(mixed, factor=factor)

    def _projected(self, inputs: tuple[Array, ...], affine: Affine) -> Iterator[Array]:
        """Queries, keys and values by three products, faster than splitting a single product."""
        width, biases = inputs[0].shape[-1], self.design.qkv_bias
        packed = Dense(3 * width, self.heads.dtype, biases == "qkv", name="qkv")
        for part, (name, x) in enumerate(zip(("query", "key", "value"), inputs, strict=True)):
            if not self.design.qkv_packed:
                yield Dense(width, self.heads.dtype, name[0] in biases, name=name)(x, affine)
            elif biases == "qv" and name != "key":
                bias = self.param(f"{name[0]}_bias", nn.initializers.zeros, (width,))
                yield packed(x, affine, part=part, parts=3) + bias.astype(self.heads.dtype)
            else:
                yield packed(x, affine, part=part, parts=3)


class AttentionPool(nn.Module):
    """Pooling by attention: a learned query attends to all tokens; then a residual perceptron."""

    num_heads: int
    mlp_ratio: float
    design: BlockDesign
    dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens: Float[Array, "batch tokens dim"]) -> Float[Array, "batch dim"]:
        """Pools the tokens."""
        width = tokens.shape[-1]
        latent = self.param("latent", KERNEL_INIT, (1, 1, width))
        query = Dense(width, self.dtype, name="q")(jnp.repeat(latent, len(tokens), axis=0))
        kv = Dense(2 * width, self.dtype, name="kv")
        query, key, value = (
            rearrange(x, "b t (h d) -> b t h d", h=self.num_heads)
            for x in (query, kv(tokens, part=0, parts=2), kv(tokens, part=1, parts=2))
        )
        mixed = rearrange(attend(query, key, value, kernel="xla"), "b 1 h d -> b (h d)")
        x = Dense(width, self.dtype, name="proj")(mixed).astype(jnp.float32)
        y, affine = LayerNorm(self.dtype, self.design.norm_eps, name="norm")(x)
        y = Dense(int(width * self.mlp_ratio), self.dtype, name="fc_1")(y, affine)
        return x + Dense(width, self.dtype, name="fc_2")(activate(y, self.design.activation))
