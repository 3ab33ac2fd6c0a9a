"""Embeddings at several scales."""

import pytest

from hypjax.models import ResNet, VisionTransformer
from hypjax.models.embedder import scaled_side

VIT = VisionTransformer(image_size=32, patch_size=4, width=24, depth=1, num_heads=2)


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
