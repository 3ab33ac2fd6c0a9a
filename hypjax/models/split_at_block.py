"""Splits an encoder at a block, to train the upper blocks on cached outputs of the lower blocks."""

import itertools
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hypjax.models.encoder import Encoder
from hypjax.models.layers import Images


def highest_frozen(encoder: Encoder, trained_names: Collection[str]) -> str | None:
    """Name of the highest block up to which no layer is trained; None if there is none."""
    layers = encoder.layers[:-1]
    frozen = [*itertools.takewhile(lambda names: not {*names} & {*trained_names}, layers)]
    if len(frozen) < 2:  # The first layer is no block.
        return None
    *_, block = frozen[-1]  # Names of other modules, such as downsampling, precede the block's.
    return block


def lower_blocks(
    encoder: Encoder, block: str, params: PyTree, images: Images
) -> Float[Array, "batch ..."]:
    """Computes a block's output for normalised pixels, in the block's dtype."""
    # This function and the next apply the full encoder; XLA removes layers without use.
    _, captured = encoder.apply(
        {"params": params},
        images,
        capture_intermediates=lambda module, _: module.name == block,
        mutable=["intermediates"],
    )
    return captured["intermediates"][block]["__call__"][0]


def upper_blocks(
    encoder: Encoder,
    block: str,
    params: PyTree,
    activations: Float[Array, "batch ..."],
    example: Float[Array, "1 height width channels"],  # Any image of the right size.
) -> Float[Array, "batch dim"]:
    """Embeds images from a block's output, which `lower_blocks` computes."""

    def replaced(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        at_block = context.module.name == block and context.method_name == "__call__"
        return activations if at_block else call(*args, **kwargs)

    with nn.intercept_methods(replaced):
        images = jnp.broadcast_to(example, (len(activations), *example.shape[1:]))
        embedding: Any = encoder.apply({"params": params}, images)
    return embedding
