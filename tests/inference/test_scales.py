"""Embeddings at several scales."""

import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models import ResNet, VisionTransformer
from hypjax.models.embedder import resize_images, scaled_side

VIT = VisionTransformer(image_size=32, patch_size=4, width=24, depth=1, num_heads=2)


def bilinear(images, side):
    """Interpolates between the centres of the four nearest pixels, in float64."""
    old = images.shape[1]
    positions = np.clip((np.arange(side) + 0.5) * old / side - 0.5, 0, old - 1)
    low = np.floor(positions).astype(int)
    high, part = np.minimum(low + 1, old - 1), positions - low
    rows = images[:, low] * (1 - part)[:, None, None] + images[:, high] * part[:, None, None]
    return rows[:, :, low] * (1 - part)[:, None] + rows[:, :, high] * part[:, None]


@pytest.mark.parametrize(("old", "side"), [(32, 16), (32, 24), (33, 20), (7, 5), (20, 31), (9, 1)])
def test_images_are_interpolated_without_antialiasing(old, side):
    images = np.random.default_rng(0).normal(size=(2, old, old, 3))
    found = resize_images(jnp.asarray(images, jnp.float32), side)
    np.testing.assert_allclose(found, bilinear(images, side), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "patch", "scale", "side"),
    [
        *((224, 16, 0.7071, 160), (224, 16, 0.5, 112), (32, 8, 0.01, 8), (32, 8, 1.0, 32)),
        (40, 8, 0.5, 24),  # 2.5 patches are rounded up.
    ],
)
def test_sides_are_whole_patches(size, patch, scale, side):
    assert scaled_side(VIT.clone(image_size=size, patch_size=patch), scale) == side
    assert scaled_side(ResNet(image_size=size), scale) == max(round(size * scale), 1)
