"""Pixels on the device: what the jitted step does to a batch before the model sees it."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8


def normalize(
    images: UInt8[Array, "batch height width channels"],
    mean: Sequence[float],
    std: Sequence[float],
) -> Float[Array, "batch height width channels"]:
    """Scales pixels to [0, 1], then subtracts the mean and divides by the deviation."""
    scaled = images.astype(jnp.float32) / 255
    return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def mirror(images: Array, flips: Bool[Array, " batch"]) -> Array:
    """Mirrors the marked images left to right."""
    return jnp.where(flips[:, None, None, None], images[:, :, ::-1], images)
