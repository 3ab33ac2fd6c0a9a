"""Files of weights are converted as timm converts them: Google's, and checkpoints of any form."""

import argparse

import numpy as np
import pytest

from hypjax.models import VisionTransformer
from hypjax.models.pretrained import load_timm, timm_state_dict
from hypjax.models.vit import BlockDesign

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")

WIDTH, HEADS, PATCH = 24, 2, 8
ENCODER = VisionTransformer(image_size=16, patch_size=PATCH, width=WIDTH, depth=2, num_heads=HEADS)
REGISTERS = dict(reg_tokens=4, no_embed_class=True, init_values=1e-5)


def peer(seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(img_size=16, patch_size=PATCH, embed_dim=WIDTH, depth=2, num_heads=HEADS)
    model = timm.models.VisionTransformer(**sizes, **{"num_classes": 0, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def assert_loaded(path, model, encoder=ENCODER, channels=3):
    loaded = timm_state_dict(load_timm(str(path), encoder, channels), encoder)
    expected = model.state_dict()
    for name, array in loaded.items():
        np.testing.assert_allclose(array, expected[name].numpy(), atol=1e-6, err_msg=name)


def google_arrays(*, big_vision, pooled):
    """Random arrays under the names of vision_transformer, or of big_vision with stacked blocks."""
    rng, dim = np.random.default_rng(0), WIDTH // HEADS

    def layer(name, *shape, leaves=("kernel", "bias"), outputs=1):
        sizes = {"kernel": shape, "bias": shape[-outputs:], "scale": shape[-outputs:]}
        return {f"{name}/{leaf}": np.float32(rng.normal(size=sizes[leaf])) for leaf in leaves}

    def norm(name):
        return layer(name, WIDTH, leaves=("scale", "bias"))

    def attention(name):
        arrays = layer(f"{name}/out", HEADS, dim, WIDTH)
        for part in ("query", "key", "value"):
            arrays |= layer(f"{name}/{part}", WIDTH, HEADS, dim, outputs=2)
        return arrays

    def perceptron(name):
        hidden = 4 * WIDTH
        return layer(f"{name}/Dense_0", WIDTH, hidden) | layer(f"{name}/Dense_1", hidden, WIDTH)

    def block():
        numbers = (0, 1, 0) if big_vision else (1, 2, 3)
        attended = attention(f"MultiHeadDotProductAttention_{numbers[0]}")
        norms = norm("LayerNorm_0") | norm(f"LayerNorm_{numbers[1]}")
        return attended | norms | perceptron(f"MlpBlock_{numbers[2]}")

    blocks, folder = [block(), block()], "Transformer/encoderblock"
    arrays = layer("embedding", PATCH, PATCH, 3, WIDTH) | norm("Transformer/encoder_norm")
    arrays |= layer("head", WIDTH, 5) | layer("pre_logits", WIDTH, WIDTH)
    positions = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    arrays[positions] = np.float32(rng.normal(size=(1, 4 + (not pooled), WIDTH)))
    if big_vision:
        arrays |= {f"{folder}/{x}": np.stack([b[x] for b in blocks]) for x in blocks[0]}
    else:
        arrays |= {f"{folder}_{i}/{x}": array for i in (0, 1) for x, array in blocks[i].items()}
    if pooled:
        arrays |= {f"MAPHead_0/{x}": array for x, array in norm("LayerNorm_0").items()}
        parts = attention("MultiHeadDotProductAttention_0") | perceptron("MlpBlock_0")
        arrays |= {f"MAPHead_0/{x}": array for x, array in parts.items()}
        arrays["MAPHead_0/probe"] = np.float32(rng.normal(size=(1, 1, WIDTH)))
    else:
        arrays["cls"] = np.float32(rng.normal(size=(1, 1, WIDTH)))
    return arrays


@pytest.mark.parametrize(
    ("prefix", "big_vision", "pooled"),
    [("", False, False), ("opt/target/", False, False), ("params/img/", True, True)],
)
def test_files_of_google(prefix, big_vision, pooled, tmp_path):
    arrays = google_arrays(big_vision=big_vision, pooled=pooled)
    path = tmp_path / "B_16.npz"
    np.savez(path, **{prefix + name: array for name, array in arrays.items()})
    model = peer(**(dict(class_token=False, global_pool="map") if pooled else {}))
    model.load_pretrained(str(path))
    pooling = dict(class_tokens=0, attention_pool=HEADS, pooling="map") if pooled else {}
    assert_loaded(path, model, ENCODER.clone(**pooling))


def test_forms_of_checkpoints_that_timm_reads_too(tmp_path):
    state = peer(seed=1).state_dict()
    average = {name: -value for name, value in state.items()}
    head = {"visual.head.proj.weight": torch.zeros(3, WIDTH), "logit_scale": torch.ones(())}
    forms = {
        "a.pth.tar": {"state_dict": state, "args": argparse.Namespace(lr=1.0), "arch": "vit"},
        "b.ckpt": {"state_dict": state, "state_dict_ema": average},
        "c.PTH": {"model": {f"module.{x}": y for x, y in state.items()}, "model_ema": average},
        "d.pt": {f"_orig_mod.module.{x}": y for x, y in state.items()},
        "e.bin": {f"visual.trunk.{x}": y for x, y in state.items()} | head,
    }
    resample = timm.models.vision_transformer.checkpoint_filter_fn
    for name, content in forms.items():
        torch.save(content, tmp_path / name)
        model = peer()
        path = str(tmp_path / name)
        timm.models.load_checkpoint(model, path, filter_fn=resample, strict=False)
        assert_loaded(path, model)


def test_registers_under_the_names_of_their_authors(tmp_path):
    state = peer(**REGISTERS).state_dict()
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"], state["mask_token"] = torch.randn(1, 5, WIDTH), torch.zeros(1, WIDTH)
    torch.save(state, tmp_path / "reg4_pretrain.pth")
    model = peer(seed=1, **REGISTERS)
    resample = timm.models.vision_transformer.checkpoint_filter_fn
    model.load_state_dict(resample(state, model))
    blocks = BlockDesign(layer_scale=True)
    encoder = ENCODER.clone(registers=4, positions="patches", blocks=blocks)
    assert_loaded(tmp_path / "reg4_pretrain.pth", model, encoder)


@pytest.mark.parametrize("channels", [(3, 1), (1, 3)])
def test_first_kernels_are_adapted_to_other_channels(channels, tmp_path):
    theirs, ours = channels
    state = peer(in_chans=theirs).state_dict()
    torch.save(state, tmp_path / "a.pth")
    kernel = "patch_embed.proj.weight"
    state[kernel] = timm.models.adapt_input_conv(ours, state[kernel], base_chans=theirs)
    model = peer(in_chans=ours)
    model.load_state_dict(state)
    assert_loaded(tmp_path / "a.pth", model, channels=ours)


def test_folders_by_timm(tmp_path):
    sizes = dict(img_size=16, patch_size=PATCH, embed_dim=WIDTH, depth=2, num_heads=HEADS)
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    for safe in (True, False):
        folder = tmp_path / str(safe)
        timm.models.save_for_hf(model, folder, safe_serialization=safe)
        assert_loaded(folder, model)
