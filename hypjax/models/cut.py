"""An encoder cut in two: its lowest layers, and the layers above them.

What frozen layers compute of an image never changes, so the layers above them can be trained on
activations that are computed once. Each part is the whole encoder in which the other part's results
are not used, so that XLA does not compute them.
"""

import itertools
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, PyTree

from hypjax.models.encoder import Encoder
from hypjax.models.layers import Images


def highest_frozen(encoder: Encoder, trained: Collection[str]) -> str | None:
    """Returns the module whose output the lowest layers without trained parameters compute.

    Args:
        encoder: The encoder.
        trained: Names of its modules and parameters, as in `Encoder.layers`, that are trained.

    Returns:
        The name of a block; None if the lowest block is trained, or what precedes it.
    """
    frozen = itertools.takewhile(lambda names: not {*names} & {*trained}, encoder.layers[:-1])
    _, *blocks = [*frozen] or [()]  # What precedes the blocks is no module.
    return blocks[-1][-1] if blocks else None


def lower(
    encoder: Encoder, block: str, params: PyTree, images: Images
) -> Float[Array, "batch ..."]:
    """Returns the output of a block for normalised pixels, in the block's dtype."""
    _, kept = encoder.apply(
        {"params": params},
        images,
        capture_intermediates=lambda module, _: module.name == block,
        mutable=["intermediates"],
    )
    return kept["intermediates"][block]["__call__"][0]


def upper(
    encoder: Encoder,
    block: str,
    params: PyTree,
    activations: Float[Array, "batch ..."],
    example: Float[Array, "1 height width channels"],
) -> Float[Array, "batch dim"]:
    """Returns the embeddings of images from the output of a block for them.

    Args:
        encoder: The encoder.
        block: Name of the block.
        params: Parameters of the encoder.
        activations: Output of the block, as `lower` returns it.
        example: Any image of the size that `lower` was given, whose pixels do not matter.
    """

    def replace(
        call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        found = context.module.name == block and context.method_name == "__call__"
        return activations if found else call(*args, **kwargs)

    with nn.intercept_methods(replace):
        return encoder.apply({"params": params}, example)
