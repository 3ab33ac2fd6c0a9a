"""From the pixels of a batch to points of a space, on the devices."""

from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Array, PyTree, UInt8

from hypjax.geometry import Space
from hypjax.inference.scored import part_of
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
        spaces: The spaces in which parts of the model are embedded, by the names of
            `hypjax.inference.scored`.
    """

    def embed(params: PyTree, images: Array) -> dict[str, Array]:
        images = normalize(images, *pixel_scaling)
        outputs: Outputs = model.apply({"params": params}, images)
        features = {"head": outputs.projected, "encoder": outputs.pooled}
        return {name: space.embed(features[part_of(name)]) for name, space in spaces.items()}

    return embed
