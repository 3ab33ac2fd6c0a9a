"""Transformers of texts: CLIP's (Radford et al., ICML 2021), which MERU shares, and SigLIP's."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from hypjax.models.blocks import Block, BlockDesign, HeadDesign, KernelStds, pad_to_tile
from hypjax.models.encoder import Encoder, Names, Path
from hypjax.models.layers import (
    compute_dtype,
    full_products_in,
    normed,
    on_tensor_cores,
    residual_dtype,
)
from hypjax.settings import TextSettings
from hypjax.types import View

# Patterns of the names here, and of timm's vision transformers.
_NAMES = (
    (r"^block_(\d+)", r"blocks.\1"),
    (r"\.attention\.", ".attn."),
    (r"\.norm_(\d)", r".norm\1"),
    (r"\.fc_(\d)", r".mlp.fc\1"),
)


class TextTransformer(Encoder):
    """Embeds texts, given as tokens; the embedding is one token's after the final LayerNorm.

    In the kind "clip", a token attends to those before it, and the embedding is the token of the
    largest number, the text's end: what follows changes nothing. In "siglip" (Zhai et al., ICCV
    2023), tokens attend to all, and the embedding is the last of them: texts then always have
    `context` tokens, as in training.

    Attributes:
        settings: Sizes, kind and design.
        dtype: Dtype of matrix products, as in `VisionTransformer`.
        residual: Dtype of the tokens between the residual branches, likewise.
        tensor_cores: Whether to arrange tokens for NVIDIA's tensor cores, likewise.
    """

    settings: TextSettings
    dtype: DTypeLike = jnp.float32
    residual: DTypeLike = jnp.float32
    tensor_cores: bool = False

    takes_pixels = False
    classifiers = ()

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        return self.settings.width

    @property
    def layers(self) -> list[Path]:
        """Names of the parameters of each layer: tokens first, then the blocks."""
        blocks: list[Path] = [(f"block_{i}",) for i in range(self.settings.depth)]
        blocks[-1] += ("norm",)
        return [("token_embed", "pos_embed"), *blocks]

    @property
    def names(self) -> Names:
        """Patterns that turn parameter paths into the names of timm's vision transformers."""
        return _NAMES

    def example(self, view: View) -> Int[Array, "1 context"]:
        """An int32 batch of one text, all zeros."""
        return jnp.zeros((1, self.settings.context), jnp.int32)

    @nn.compact
    def __call__(
        self, ids: Int[ArrayLike, "*batch tokens"], return_tokens: bool = False
    ) -> Float[Array, "*batch dim"] | Float[Array, "*batch tokens dim"]:
        """Embeds texts of at most `context` tokens each, in float32.

        With `return_tokens`, returns all tokens after the final LayerNorm.
        """
        batch, settings, blocks = jnp.shape(ids)[:-1], self.settings, _blocks(self.settings)
        ids = jnp.reshape(jnp.asarray(ids), (-1, jnp.shape(ids)[-1]))
        num_tokens, width, causal = ids.shape[1], settings.width, settings.kind == "clip"
        block = nn.remat(Block) if settings.remat else Block
        normal = nn.initializers.normal
        embeddings = self.param("token_embed", normal(0.02), (settings.vocabulary, width))
        positions = self.param("pos_embed", normal(0.01), (1, settings.context, width))
        with full_products_in(self.dtype):
            tokens = jnp.take(embeddings, ids, axis=0, mode="clip") + positions[:, :num_tokens]
            tokens = tokens.astype(self.residual)
            kernel = settings.attention if self.tensor_cores else "xla"
            heads = HeadDesign(settings.num_heads, self.dtype, kernel, causal=causal)
            if self.tensor_cores:
                heads, tokens = heads._replace(tokens=num_tokens), pad_to_tile(tokens)
            for i in range(settings.depth):
                tokens = block(heads, settings.mlp_ratio, blocks, name=f"block_{i}")(tokens)
            if not return_tokens:
                pooled = jnp.argmax(ids, axis=1) if causal else jnp.full(len(ids), num_tokens - 1)
                tokens = jnp.take_along_axis(tokens, pooled[:, None, None], axis=1)[:, 0]
            else:
                tokens = tokens[:, :num_tokens]
            tokens = normed(tokens, "norm", blocks.norm_eps)
        return tokens.reshape(*batch, *tokens.shape[1:])


def _blocks(settings: TextSettings) -> BlockDesign:
    """The design of the blocks, with deviations of initial weights as in CLIP's released code."""
    width, depth = settings.width, settings.depth
    blocks = BlockDesign(settings.norm_eps, settings.activation)
    if settings.kind != "clip":
        return blocks
    stds = KernelStds(width**-0.5, (2 * width * depth) ** -0.5, (2 * width) ** -0.5)
    return dataclasses.replace(blocks, stds=stds)


def create_text_encoder(
    settings: TextSettings, device: jax.Device | None = None
) -> TextTransformer:
    """Builds an encoder of texts for a device, by default JAX's first."""
    dtype = compute_dtype(settings.precision, device)
    residual = residual_dtype(settings.residual, dtype)
    return TextTransformer(settings, dtype, residual, on_tensor_cores(dtype, device))
