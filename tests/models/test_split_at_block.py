"""Encoders cut in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models import ConvNeXt, EfficientNetLite, VisionTransformer
from hypjax.models.split_at_block import highest_frozen, lower_blocks, upper_blocks

VIT = VisionTransformer(image_size=16, patch_size=8, width=8, depth=3, num_heads=2)
CONVNEXT = ConvNeXt(image_size=16, depths=(1, 2), widths=(4, 6))


@pytest.mark.parametrize(
    ("encoder", "block"), [(VIT, "block_1"), (CONVNEXT, "stage_1_block_0")], ids=["vit", "convnext"]
)
def test_the_upper_part_embeds_what_the_lower_part_computes(encoder, block):
    @jax.jit
    def compute(images):
        params = encoder.init(jax.random.key(1), images)["params"]
        kept = lower_blocks(encoder, block, params, images)
        upper = upper_blocks(encoder, block, params, kept, jnp.zeros_like(images[:1]))
        return kept, upper, encoder.apply({"params": params}, images)

    images = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
    kept, upper, expected = compute(images)
    np.testing.assert_allclose(upper, expected, rtol=1e-4, atol=1e-5)
    assert kept.ndim > 2 and kept.dtype == jnp.float32


def test_the_highest_frozen_block_has_only_frozen_layers_below():
    assert highest_frozen(VIT, ["block_2", "norm"]) == "block_1"
    assert highest_frozen(VIT, ["block_1"]) == "block_0"
    assert highest_frozen(VIT, ["block_2", "cls_token"]) is None
    assert highest_frozen(VIT, ["block_0"]) is None
    assert highest_frozen(CONVNEXT, ["stage_1_block_1"]) == "stage_1_block_0"
    assert highest_frozen(CONVNEXT, ["stage_1_downsample"]) == "stage_0_block_0"
    upper = [f"stage_5_block_{i}" for i in range(4)] + ["stage_6_block_0", "head_conv"]
    assert highest_frozen(EfficientNetLite(image_size=32), upper) == "stage_4_block_2"
