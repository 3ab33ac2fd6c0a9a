"""From pixels to points of a space."""

from collections.abc import Callable

from jaxtyping import Array, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax.geometry import Space
from hypjax.models import Embedder
from hypjax.models.normalize import normalize
from hypjax.types import Outputs


def embed_function(
    config: ConfigDict, model: Embedder, spaces: dict[str, Space]
) -> Callable[[PyTree, UInt8[Array, "batch side side channels"]], dict[str, Array]]:
    """The function from parameters and pixels to points of each space, to be jitted."""

    def embed(params: PyTree, images: Array) -> dict[str, Array]:
        images = normalize(images, config.data.mean, config.data.std)
        outputs: Outputs = model.apply({"params": params}, images)
        features = {"head": outputs.projected, "encoder": outputs.pooled}
        return {part: space.embed(features[part]) for part, space in spaces.items()}

    return embed
