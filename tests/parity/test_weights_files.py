"""Files of weights are converted as timm converts them: Google's, and checkpoints of any form."""

import numpy as np
import pytest

from hypjax.models import VisionTransformer
from hypjax.models.blocks import BlockDesign
from hypjax.models.pretrained import load_timm, timm_state_dict

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


def google_arrays():
    """Random arrays under the names of vision_transformer."""
    rng, dim, hidden = np.random.default_rng(0), WIDTH // HEADS, 4 * WIDTH
    shapes = {"cls": (1, 1, WIDTH), "Transformer/posembed_input/pos_embedding": (1, 5, WIDTH)}

    def layer(name, *shape, kernel="kernel", outputs=1):
        shapes.update({f"{name}/{kernel}": shape, f"{name}/bias": shape[-outputs:]})

    layer("embedding", PATCH, PATCH, 3, WIDTH)
    layer("head", WIDTH, 5)
    layer("pre_logits", WIDTH, WIDTH)
    layer("Transformer/encoder_norm", WIDTH, kernel="scale")
    for block in ("Transformer/encoderblock_0", "Transformer/encoderblock_1"):
        for part in ("query", "key", "value"):
            attention = f"{block}/MultiHeadDotProductAttention_1"
            layer(f"{attention}/{part}", WIDTH, HEADS, dim, outputs=2)
        layer(f"{attention}/out", HEADS, dim, WIDTH)
        layer(f"{block}/LayerNorm_0", WIDTH, kernel="scale")
        layer(f"{block}/LayerNorm_2", WIDTH, kernel="scale")
        layer(f"{block}/MlpBlock_3/Dense_0", WIDTH, hidden)
        layer(f"{block}/MlpBlock_3/Dense_1", hidden, WIDTH)
    return {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_files_of_google(prefix, tmp_path):
    path = tmp_path / "B_16.npz"
    np.savez(path, **{prefix + name: array for name, array in google_arrays().items()})
    model = peer()
    model.load_pretrained(str(path))
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
