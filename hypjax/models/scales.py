"""A model at several scales of its images, as retrieval systems are evaluated."""

import math

import jax
from jaxtyping import Array, Float, PyTree

from hypjax.models.architectures import Encoder
from hypjax.models.embedder import Embedder
from hypjax.models.vit import resize_positions


def scaled_side(encoder: Encoder, scale: float) -> int:
    """Returns the side of images at a scale, in pixels.

    It is rounded to whole patches, halves up, and at least one patch: a position embedding belongs
    to a whole patch. For a ResNet it is rounded to whole pixels.

    Args:
        encoder: Encoder of the images.
        scale: Ratio to `encoder.image_size`.
    """
    unit = getattr(encoder, "patch_size", 1)
    return unit * max(1, math.floor(encoder.image_size * scale / unit + 0.5))


def resize_images(
    images: Float[Array, "batch height width channels"], side: int
) -> Float[Array, "batch side side channels"]:
    """Resizes to squares by bilinear interpolation without antialiasing.

    Centres of pixels are at halves, as in PyTorch's `interpolate` with `align_corners=False`, which
    the released multi-scale evaluations of image retrieval use.

    Args:
        images: Images, float32.
        side: Side of the squares, in pixels.
    """
    shape = (len(images), side, side, images.shape[-1])
    return jax.image.resize(images, shape, "linear", antialias=False)


def at_side(model: Embedder, params: PyTree, side: int) -> tuple[Embedder, PyTree]:
    """Returns a model for images of another side, with its parameters.

    Position embeddings are interpolated as those of pretrained weights are.

    Args:
        model: Encoder and head.
        params: Parameters of the model.
        side: Side of the images, in pixels; a multiple of the patches' side.
    """
    encoder = model.encoder.clone(image_size=side)
    positions = params["encoder"].get("pos_embed")
    if positions is not None:
        prefix = encoder.num_prefix_tokens
        number = prefix + (side // encoder.patch_size) ** 2
        resized = {"pos_embed": resize_positions(positions, number, prefix)}
        params = {**params, "encoder": {**params["encoder"], **resized}}
    return model.clone(encoder=encoder), params
