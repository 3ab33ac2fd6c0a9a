"""Pre-norm blocks of Transformers, with the options of the families that hypjax covers."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hypjax.models.attention import Heads, attend
from hypjax.models.layers import Affine, Dense, LayerNorm, activate

# Cosines and sines of the angles of rotary position embeddings.
Rope: TypeAlias = tuple[Float[Array, "tokens dim/2"], Float[Array, "tokens dim/2"]]
TILE = 8  # Tensor cores multiply matrices whose sides are multiples of this.


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


class KernelStds(NamedTuple):
    """Standard deviations of a block's initial kernels; None for `layers.KERNEL_INIT`."""

    qkv: float | None = None
    branches: float | None = None  # Last kernels of the two residual branches.
    hidden: float | None = None  # First kernels of the perceptron.


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
    stds: KernelStds = KernelStds()


def pad_to_tile(tokens: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens2 dim"]:
    """Arranges tokens for tensor cores: pads their number to a multiple of `TILE`."""
    return _store_row_major(jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % TILE), (0, 0))))


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
    causal: bool = False  # Whether a token attends only to those before it, and to itself.


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
            total = (x + branch).astype(x.dtype)
            return total if self.heads.tokens is None else _store_row_major(total)

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
        fc_2 = Dense(width, self.heads.dtype, std=design.stds.branches, name="fc_2")
        return add(x, fc_2(hidden, affine, factor=mlp_scale), 1)

    def _hidden(self, x: Array, affine: Affine) -> Array:
        """Applies the perceptron up to the input of its last layer."""
        activation, gate = self.design.activation, self.design.gate
        width = int(x.shape[-1] * self.mlp_ratio + 1e-6)  # 56 · (488 / 56) is below 488.
        if gate == "packed":
            packed = Dense(2 * width, self.heads.dtype, name="fc_1")
            gated = packed(x, affine, part=0, parts=2)
            return activate(gated, activation) * packed(x, affine, part=1, parts=2)
        fc_1 = Dense(width, self.heads.dtype, std=self.design.stds.hidden, name="fc_1")
        hidden = fc_1(x, affine)
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
        mixed = attend(query, key, value, self.heads.tokens, self.heads.kernel, self.heads.causal)
        mixed = rearrange(mixed, "b t h d -> b t (h d)")
        proj = Dense(width, self.heads.dtype, std=design.stds.branches, name="proj")
        return proj(mixed, factor=factor)

    def _projected(self, inputs: tuple[Array, ...], affine: Affine) -> Iterator[Array]:
        """Queries, keys and values by three products, faster than splitting a single product."""
        width, biases, std = inputs[0].shape[-1], self.design.qkv_bias, self.design.stds.qkv
        packed = Dense(3 * width, self.heads.dtype, biases == "qkv", std, name="qkv")
        for part, (name, x) in enumerate(zip(("query", "key", "value"), inputs, strict=True)):
            if not self.design.qkv_packed:
                yield Dense(width, self.heads.dtype, name[0] in biases, name=name)(x, affine)
            elif biases == "qv" and name != "key":
                bias = self.param(f"{name[0]}_bias", nn.initializers.zeros, (width,))
                yield packed(x, affine, part=part, parts=3) + bias.astype(self.heads.dtype)
            else:
                yield packed(x, affine, part=part, parts=3)
