"""Random changes of colour and sharpness of training images, made on the devices.

As in MoCo v2 (Chen et al., 2020), colours are jittered, some images become grey, and some are
blurred. Hyp-ViT's supplement mentions these changes for training without labels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt8

_JITTERED_SHARE = 0.8  # Share of images whose colours are jittered.
_SIGMA = 0.1, 2.0  # Range of the blur's standard deviation, in pixels of images of side `_SIDE`.
_SIDE = 224
_LUMA = np.array((0.299, 0.587, 0.114), np.float32)
_BATCH_SIZE = 32  # Images that are in memory as float32 at the same time.
Pixels = Float[Array, "side side channels"]


class ColourChanges(NamedTuple):
    """How strongly and how often images are changed: fields of `config.data`."""

    jitter: tuple[float, ...]  # Brightness, contrast, saturation and hue, as in torchvision.
    grey: float  # Share of grey images.
    blur: float  # Share of blurred images.


class Draws(NamedTuple):
    """Random changes of the images of a batch."""

    factors: Float[Array, "images 3"]  # Factors of brightness, contrast and saturation.
    hue: Float[Array, " images"]  # Rotation of the hue, in turns.
    grey: Bool[Array, " images"]  # Whether an image becomes grey.
    sigma: Float[Array, " images"]  # The blur's deviation, as in `_SIGMA`; 0 for no blur.


def draw_changes(key: PRNGKeyArray, changes: ColourChanges, num_images: int) -> Draws:
    """Draws the changes of each image."""
    keys = jax.random.split(key, 5)
    strengths = jnp.array(changes.jitter)
    jitter = strengths * jax.random.uniform(keys[0], (num_images, 4), minval=-1.0)
    jitter *= jax.random.bernoulli(keys[1], _JITTERED_SHARE, (num_images, 1))
    low, high = _SIGMA
    sigma = jax.random.uniform(keys[2], (num_images,), minval=low, maxval=high)
    sigma *= jax.random.bernoulli(keys[3], changes.blur, (num_images,))
    grey = jax.random.bernoulli(keys[4], changes.grey, (num_images,))
    return Draws(jnp.maximum(1 + jitter[:, :3], 0), hue=jitter[:, 3], grey=grey, sigma=sigma)


def changed(images: UInt8[Array, "n side side channels"], draws: Draws) -> UInt8[Array, "n s s c"]:
    """Applies the changes to images."""
    return jax.lax.map(lambda inputs: _changed(*inputs), (images, draws), batch_size=_BATCH_SIZE)


def _changed(image: UInt8[Array, "side side channels"], draws: Draws) -> Array:
    """Changes an image's brightness, contrast, saturation, hue and sharpness, in this order."""
    brightness, contrast, saturation = draws.factors
    x = _clipped(brightness * image.astype(jnp.float32))
    mean = jnp.mean(_luma(x))
    x = _clipped(mean + contrast * (x - mean))
    if x.shape[-1] == 3:
        grey = _luma(x)
        x = _rotated(_clipped(grey + saturation * (x - grey)), draws.hue)
        x = jnp.where(draws.grey, _luma(x), x)
    return jnp.rint(_blurred(x, draws.sigma * len(x) / _SIDE)).astype(jnp.uint8)


def _clipped(x: Pixels) -> Pixels:
    return jnp.clip(x, 0, 255)


def _luma(x: Pixels) -> Float[Array, "side side 1"]:
    return x if x.shape[-1] == 1 else jnp.sum(x * _LUMA, axis=-1, keepdims=True)


def _rotated(x: Pixels, turns: Float[Array, ""]) -> Pixels:
    """Rotates the hue about the axis k of greys by Rodrigues' formula, as in YIQ, keeping luma."""
    grey = _luma(x)
    angle = 2 * jnp.pi * turns
    chroma = x - grey
    k_cross_chroma = (jnp.roll(chroma, 1, -1) - jnp.roll(chroma, -1, -1)) / jnp.sqrt(3.0)
    rotated = jnp.cos(angle) * chroma + jnp.sin(angle) * k_cross_chroma
    rotated += (1 - jnp.cos(angle)) * jnp.mean(chroma, axis=-1, keepdims=True)
    return _clipped(grey + rotated - _luma(rotated))


def _blurred(x: Pixels, sigma: Float[Array, ""]) -> Pixels:
    """Blurs by a Gaussian, whose weights sum to 1 at the edges too; σ = 0 changes nothing."""
    offsets = jnp.arange(len(x)) - jnp.arange(len(x))[:, None]
    weights = jax.nn.softmax(-((offsets / jnp.maximum(sigma, 1e-3)) ** 2) / 2, axis=-1)
    return jnp.einsum("ai,bj,ijc->abc", weights, weights, x, precision="highest")
