"""From pixels to a model's input: normalisation and mirroring, inside jitted programs."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped, UInt8


def normalize(
    images: UInt8[Array, "batch height width channels"],
    mean: Sequence[float],
    std: Sequence[float],
) -> Float[Array, "batch height width channels"]:
    """Scales pixels to [0, 1], subtracts the mean, and divides by the standard deviation.

    Args:
        images: Pixels, [batch, height, width, channels], uint8.
        mean: Mean of each channel, on the scale [0, 1].
        std: Standard deviation of each channel, on the scale [0, 1].

    Returns:
        Normalised pixels, of the same shape, float32.
    """
    scaled = images.astype(jnp.float32) / 255
    return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def mirror(
    images: Shaped[Array, "batch height width channels"], flips: Bool[Array, " batch"]
) -> Shaped[Array, "batch height width channels"]:
    """Mirrors the selected images left to right.

    Args:
        images: Images, [batch, height, width, channels], of any dtype.
        flips: Whether to mirror each image, [batch].

    Returns:
        Images, of the same shape and dtype.
    """
    return jnp.where(flips[:, None, None, None], images[:, :, ::-1], images)
