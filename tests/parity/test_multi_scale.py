"""Comparison of embeddings at several scales with a plain loop in PyTorch, over timm's encoders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.geometry import Sphere
from hypjax.inference.embedding import embed_function
from hypjax.models import Embedder, ResNet, VisionTransformer
from hypjax.models.embedder import resize_images
from hypjax.models.pretrained import convert_timm

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")
functional = torch.nn.functional

SMALL = dict(patch_size=8, depth=2, num_heads=3, embed_dim=48, num_classes=0)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
SCALES = {1.0: 64, 0.7071: 48, 0.5: 32}  # And sides: 5.66 patches are rounded to 6.


def as_torch(images):
    return torch.tensor(np.asarray(images, np.float32).transpose(0, 3, 1, 2))


def state_of(model):
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def interpolated(images, side):
    return functional.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)


@pytest.mark.parametrize(("old", "side"), [(224, 160), (224, 158), (64, 32), (33, 20), (20, 31)])
def test_images_are_interpolated_as_by_torch(old, side):
    images = np.random.default_rng(0).normal(size=(2, old, old, 3)).astype(np.float32)
    expected = interpolated(as_torch(images), side).numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(resize_images(jnp.asarray(images), side), expected, atol=1e-5)


def test_points_of_a_transformer_equal_a_loop_over_timms():
    """At each scale, timm's model has position embeddings resampled by timm."""
    torch.manual_seed(0)
    native = timm.models.VisionTransformer(img_size=64, **SMALL).eval()
    with torch.no_grad():
        for parameter in native.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    images = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)
    inputs = as_torch((images / 255 - MEAN) / STD)
    total = torch.zeros(4, 48)
    with torch.no_grad():
        for side in SCALES.values():
            peer = timm.models.VisionTransformer(img_size=side, **SMALL).eval()
            state = timm.models.vision_transformer.checkpoint_filter_fn(native.state_dict(), peer)
            peer.load_state_dict(state)
            total += functional.normalize(peer(interpolated(inputs, side)))
    encoder = VisionTransformer(image_size=64, patch_size=8, width=48, depth=2, num_heads=3)
    params = convert_timm(state_of(native), encoder)
    check(encoder, params, images, functional.normalize(total).numpy())


def test_points_of_a_resnet_equal_a_loop_over_timms():
    torch.manual_seed(0)
    layers = (1, 1, 1, 1)
    peer = timm.models.ResNet(timm.models.resnet.Bottleneck, layers, num_classes=0).eval()
    encoder = ResNet(image_size=64, stage_sizes=layers)
    images = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)
    inputs = as_torch((images / 255 - MEAN) / STD)
    with torch.no_grad():
        sides = (64, 45, 32)  # 45.3 pixels are rounded to 45.
        points = [functional.normalize(peer(interpolated(inputs, side))) for side in sides]
    expected = functional.normalize(sum(points)).numpy()
    check(encoder, convert_timm(state_of(peer), encoder), images, expected)


def check(encoder, params, images, expected):
    model = Embedder(encoder, head_dim=encoder.dim, head_kind="none")
    embed = embed_function(model, (MEAN, STD), {"encoder": Sphere()}, tuple(SCALES))
    found = jax.jit(embed)({"encoder": params}, images)["encoder"]
    np.testing.assert_allclose(found, expected, atol=2e-5)
