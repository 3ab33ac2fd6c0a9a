"""Splits an encoder at a block, so that upper blocks can train on cached outputs of lower blocks.

Both parts apply the full encoder; XLA removes layers whose results are not used.
"""

import itertools
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, PyTree

from hypjax.models.encoder import Encoder
from hypjax.models.layers import Images


def highest_frozen(encoder: Encoder, trained: Collection[str]) -> str | None:
    """Name of the highest block up to which all layers are frozen; None if there is none.

    `trained` holds names of trained modules and parameters, as in `Encoder.layers`.
    """
    frozen = itertools.takewhile(lambda names: not {*names} & {*trained}, encoder.layers[:-1])
    _, *blocks = [*frozen] or [()]  # The first layer is no block.
    return blocks[-1][-1] if blocks else None


def lower_blocks(
    encoder: Encoder, block: str, params: PyTree, images: Images
) -> Float[Array, "batch ..."]:
    """Computes a block's output for normalised pixels, in the block's dtype."""
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
    example: Float[Array, "1 height width channels"],
) -> Float[Array, "batch dim"]:
    """Embeds images from a block's output, which `lower_blocks` computes.

    `example` is any image of the size that `lower_blocks` took; its pixels do not matter.
    """

    def replace(
        call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        at_block = context.module.name == block and context.method_name == "__call__"
        return activations if at_block else call(*args, **kwargs)

    with nn.intercept_methods(replace):
        return encoder.apply({"params": params}, example)
