"""From the pixels of a batch to points of a space, on the devices."""

from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Array, PyTree, UInt8

from hypjax.geometry import Space
from hypjax.models import Embedder
from hypjax.models.normalize import normalize
from hypjax.types import Outputs

PixelScaling = tuple[Sequence[float], Sequence[float]]  # Mean and standard deviation by channel.


def embed_function(
    model: Embedder, pixel_scaling: PixelScaling, spaces: Mapping[str, Space]
) -> Callable[[PyTree, UInt8[Array, "batch side side channels"]], dict[str, Array]]:
    """Returns the function from parameters and pixels to the points of each space, to be jitted.

    Args:
        model: Encoder and head, as they are evaluated.
        pixel_scaling: Mean and standard deviation of pixels.
        spaces: The space of each part of the model to embed: "head", "encoder", or both.
    """

    def embed(params: PyTree, images: Array) -> dict[str, Array]:
        images = normalize(images, *pixel_scaling)
        outputs: Outputs = model.apply({"params": params}, images)
        features = {"head": outputs.projected, "encoder": outputs.pooled}
        return {part: space.embed(features[part]) for part, space in spaces.items()}

    return embed
