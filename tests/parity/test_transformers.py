"""Weights under the names of Transformers' models give what these models compute."""

import dataclasses

import jax
import numpy as np
import pytest

from hypjax.models import create_encoder
from hypjax.models.pretrained import load_timm

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDES, REGISTERS = {"image_size": 56, "patch_size": 14}, {"num_register_tokens": 4}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
MODELS = {
    "vit_small_patch14_dinov2": ("Dinov2", SIDES),
    "vit_giant_patch14_dinov2": ("Dinov2", SIDES | {"use_swiglu_ffn": True}),
    "vit_small_patch14_reg4_dinov2": ("Dinov2WithRegisters", SIDES | REGISTERS),
    "vit_small_patch16_dinov3_qkvb": ("DINOv3ViT", REGISTERS),
    "vit_small_plus_patch16_dinov3_qkvb": ("DINOv3ViT", REGISTERS | GATED),
    "vit_base_patch16_siglip_224": ("SiglipVision", {"image_size": 64, "patch_size": 16}),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_agree(name, tmp_path):
    kind, options = MODELS[name]
    hidden = {} if kind.startswith("Dinov2") else {"intermediate_size": 128}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **hidden, **options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    side = 4 * config.patch_size
    encoder = create_encoder(name)
    small = {"width": 32, "depth": 2, "num_heads": 4, "image_size": side, "mlp_ratio": 4}
    if "giant" in name:
        small["mlp_ratio"] = 88 / 32  # Two thirds of the width, rounded up to eights.
    if "siglip" in name:  # timm's activation is the exact one.
        small["attention_pool"] = 4
        small["blocks"] = dataclasses.replace(encoder.blocks, activation="gelu_tanh")
    encoder = encoder.clone(**small)
    params = load_timm(str(tmp_path / "model.safetensors"), encoder)
    images = np.random.default_rng(0).normal(size=(2, side, side, 3)).astype(np.float32)
    with torch.no_grad():
        outputs = model(torch.tensor(images.transpose(0, 3, 1, 2)))
    expected = outputs.last_hidden_state.numpy()
    tokens = jax.jit(lambda p: encoder.apply({"params": p}, images, return_tokens=True))(params)
    np.testing.assert_allclose(tokens, expected, atol=2e-5 * np.ptp(expected))
    pooled = encoder.clone(pooling="map" if "siglip" in name else "cls")
    expected = outputs.pooler_output.numpy()
    actual = pooled.apply({"params": params}, images)
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.ptp(expected))
