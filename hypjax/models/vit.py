"""Vision Transformer (Dosovitskiy et al., ICLR 2021), with timm's numerics.

Its options also cover the encoders that descend from it, such as DeiT (Touvron et al., ICML 2021),
DINOv2, SigLIP and EVA-02; `hypjax.models.architectures` lists them.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from hypjax.models.attention import attend
from hypjax.models.blocks import TILE, Block, BlockDesign, HeadDesign, Rope, pad_to_tile
from hypjax.models.encoder import Encoder, Names, Path
from hypjax.models.layers import (
    GEM_EXPONENT,
    KERNEL_INIT,
    Dense,
    Images,
    LayerNorm,
    activate,
    full_products_in,
    normed,
    num_pooled_tokens,
    poolings,
)
from hypjax.models.parts import ApplyBlock, apply_blocks, has_parts


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
        dtype: Dtype of matrix products and of activations between them. Parameters, LayerNorm
            statistics, rotations, softmax and the result are always float32.
        residual: Dtype of the tokens between the residual branches. In half precision, a program
            moves a quarter fewer bytes.
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
    residual: DTypeLike = jnp.float32
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
    def gathers(self) -> list[str]:
        """Names of the parameters that the encoder itself gathers, see `Encoder`."""
        if type(self).__call__ is not VisionTransformer.__call__:  # A user's encoder.
            return []
        return [f"block_{i}" for i in range(self.depth)]

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
            tokens = self._tokens(images).astype(self.residual)
            rope = self._rope(images)
            num_tokens = tokens.shape[1]
            num_pooled = num_tokens
            if not return_tokens:
                num_pooled = num_pooled_tokens(self.pooling, num_tokens)
            num_outputs = num_pooled  # Of the last block, which attends to all tokens.
            heads = HeadDesign(self.num_heads, self.dtype, self.attention)
            if self.tensor_cores:
                heads = heads._replace(tokens=num_tokens)
                tokens = pad_to_tile(tokens)
                num_outputs += -num_pooled % TILE
            depth = self.depth
            if has_parts(self.variables.get("params", {})):
                tokens = self._blocks_in_parts(tokens, heads, num_outputs, drop_path_masks, rope)
                depth = 0
            for i in range(depth):
                if i == self.depth - 1:
                    heads = heads._replace(outputs=num_outputs)
                masks = None if drop_path_masks is None else drop_path_masks[:, i]
                apply_block = block(heads, self.mlp_ratio, self.blocks, name=f"block_{i}")
                tokens = apply_block(tokens, masks, rope)
            tokens = tokens[:, :num_pooled].astype(jnp.float32)
            if not self.pool_first:
                tokens = normed(tokens, "norm", self.blocks.norm_eps)
            if return_tokens and not self.is_initializing():
                return tokens
            embedding = self._pooled(tokens)
            return normed(embedding, "norm", self.blocks.norm_eps) if self.pool_first else embedding

    def _blocks_in_parts(
        self,
        tokens: Array,
        heads: HeadDesign,
        num_outputs: int,
        masks: Float[Array, "batch depth 2"] | None,
        rope: Rope | None,
    ) -> Array:
        """Applies all blocks; each gathers its parameters, see `apply_blocks`."""

        def apply_with(heads: HeadDesign) -> ApplyBlock:
            block: Any = Block(heads, self.mlp_ratio, self.blocks, parent=None)
            return lambda params, *args: block.apply({"params": params}, *args, rope)

        numbers = range(self.depth)
        return apply_blocks(
            apply_with(heads),
            apply_with(heads._replace(outputs=num_outputs)),
            [self.variables["params"][f"block_{i}"] for i in numbers],
            tokens,
            [None if masks is None else masks[:, i] for i in numbers],
            remat=self.remat,
        )

    def _tokens(self, images: Images) -> Array:
        """Prefix and patch tokens, with position embeddings."""
        p = self.patch_size
        patches = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=p)
        patches = nn.Dense(self.width, not self.pre_norm, self.dtype, name="patch_embed")(patches)
        counts = [("cls_token", 1), ("dist_token", 1)][: self.class_tokens]
        if self.registers:
            counts.append(("reg_token", self.registers))
        prefix = [self.param(name, KERNEL_INIT, (1, n, self.width)) for name, n in counts]
        prefix = [jnp.broadcast_to(x, (images.shape[0], *x.shape[1:])) for x in prefix]
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
        padding = -(len(angles) + self.num_prefix_tokens) % TILE if self.tensor_cores else 0
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
        query = Dense(width, self.dtype, name="q")(jnp.repeat(latent, tokens.shape[0], axis=0))
        kv = Dense(2 * width, self.dtype, name="kv")
        query, key, value = (
            rearrange(x, "b t (h d) -> b t h d", h=self.num_heads)
            for x in (query, kv(tokens, part=0, parts=2), kv(tokens, part=1, parts=2))
        )
        mixed = rearrange(attend(query, key, value, kernel="xla"), "b 1 h d -> b (h d)")
        x = Dense(width, self.dtype, name="proj")(mixed).astype(jnp.float32)
        y, affine = LayerNorm(self.dtype, self.design.norm_eps, name="norm")(x)
        y = Dense(int(width * self.mlp_ratio + 1e-6), self.dtype, name="fc_1")(y, affine)
        return x + Dense(width, self.dtype, name="fc_2")(activate(y, self.design.activation))
