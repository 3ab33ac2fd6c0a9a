"""Models of images and texts by others, with random weights, against the libraries of the files."""

import collections
import functools
import json
import pathlib

import numpy as np
import pytest

from hypjax.models import architectures, create_embedder, language_image
from hypjax.models.language_image import read_language_image
from hypjax.types import IMAGES, TEXTS

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: transformers")
open_clip = pytest.importorskip("open_clip", reason="needs the parity extra: open_clip_torch")
safetensors = pytest.importorskip("safetensors.torch")

SIDE, PATCH, END = 16, 8, 49
IMAGE_ARRAYS = np.random.default_rng(0).normal(size=(3, SIDE, SIDE, 3)).astype(np.float32)
TEXT_IDS = np.zeros((3, 9), np.int32)
for row, length in enumerate((3, 9, 6)):
    TEXT_IDS[row, :length] = [48, *range(row + 1, row + length - 1), END]


@pytest.fixture(autouse=True)
def tiny_towers(monkeypatch):
    """Adds a tiny architecture to each family, because the real ones are large."""
    for name, other, options in (
        ("vit_tiny_patch8_clip_tiny", "vit_base_patch32_clip_224", {}),
        ("vit_tiny_patch8_siglip_tiny", "vit_base_patch16_siglip_224", {"attention_pool": 4}),
    ):
        family = architectures._FAMILY_OF[other]
        sizes = {"width": 64, "depth": 2, "num_heads": 4, "image_size": SIDE, **options}
        monkeypatch.setitem(family.members, name, sizes)
        monkeypatch.setitem(architectures._FAMILY_OF, name, family)
        for module in (architectures, language_image):
            monkeypatch.setattr(module, "ARCHITECTURES", (*module.ARCHITECTURES, name))


def randomised(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def check(found, image_features, text_features):
    """Compares the heads' outputs."""
    model = create_embedder(found.settings)
    inputs = {IMAGES: IMAGE_ARRAYS, TEXTS: TEXT_IDS}
    outputs = model.apply({"params": found.params}, inputs, method="embed")
    for tower, expected in ((IMAGES, image_features), (TEXTS, text_features)):
        expected = expected.detach().numpy()
        scale = np.abs(expected).max()
        np.testing.assert_allclose(outputs[tower].projected, expected, atol=1e-5 * scale)


def as_torch():
    return torch.tensor(IMAGE_ARRAYS.transpose(0, 3, 1, 2)), torch.tensor(TEXT_IDS).long()


TOWERS = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)


@pytest.mark.parametrize("kind", ["CLIP gelu", "CLIP quick_gelu", "SigLIP gelu_pytorch_tanh"])
def test_transformers(kind, tmp_path):
    name, activation = kind.split()
    library = name.replace("SigLIP", "Siglip")
    config = getattr(transformers, f"{library}Config")(
        text_config=TOWERS
        | dict(intermediate_size=128, vocab_size=50, max_position_embeddings=9, eos_token_id=END)
        | dict(bos_token_id=48, hidden_act=activation),
        vision_config=TOWERS
        | dict(intermediate_size=256, image_size=SIDE, patch_size=PATCH, hidden_act=activation),
        projection_dim=8,
    )
    model = randomised(getattr(transformers, f"{library}Model")(config))
    model.save_pretrained(tmp_path)
    found = read_language_image(tmp_path)
    assert found.kind == name
    assert found.scale == pytest.approx(model.logit_scale.exp().item())
    pixels, ids = as_torch()
    with torch.no_grad():
        images, texts = model.get_image_features(pixels), model.get_text_features(ids)
    check(found, *(getattr(x, "pooler_output", x) for x in (images, texts)))


@pytest.mark.parametrize("quick", [False, True])
def test_open_clip(quick, tmp_path):
    vision = dict(image_size=SIDE, layers=2, width=64, head_width=16, patch_size=PATCH)
    text = dict(context_length=9, vocab_size=50, width=128, heads=2, layers=2)
    model = randomised(open_clip.CLIP(8, vision, text, quick_gelu=quick))
    file = tmp_path / "open_clip_model.safetensors"
    safetensors.save_file({k: v.contiguous() for k, v in model.state_dict().items()}, file)
    config = {"model_cfg": {"quick_gelu": quick, "vision_cfg": vision, "text_cfg": text}}
    config["preprocess_cfg"] = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    found = read_language_image(tmp_path)
    assert found.pixels.mean == (0.5,) * 3 and found.pixels.std == (0.25,) * 3
    pixels, ids = as_torch()
    check(found, model.encode_image(pixels), model.encode_text(ids))


class MeruBlock(torch.nn.Module):
    """A block of the tower of texts, from PyTorch's own layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        layers = dict(c_fc=torch.nn.Linear(width, 4 * width), gelu=torch.nn.GELU())
        layers["c_proj"] = torch.nn.Linear(4 * width, width)
        self.mlp = torch.nn.Sequential(collections.OrderedDict(layers))

    def forward(self, x):
        y = self.ln_1(x)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Meru(torch.nn.Module):
    """MERU's towers and projections (Desai et al., ICML 2023), from timm's and PyTorch's layers."""

    def __init__(self):
        super().__init__()
        self.visual = timm.models.VisionTransformer(
            SIDE,
            PATCH,
            embed_dim=384,
            depth=1,
            num_heads=12,
            num_classes=0,
            norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-5),
        )
        self.textual = torch.nn.Module()
        self.textual.token_embed = torch.nn.Embedding(50, 128)
        self.textual.posit_embed = torch.nn.Parameter(torch.randn(9, 128))
        self.textual.resblocks = torch.nn.ModuleList([MeruBlock(128, 2) for _ in range(2)])
        self.textual.ln_final = torch.nn.LayerNorm(128)
        self.visual_proj = torch.nn.Linear(384, 8, bias=False)
        self.textual_proj = torch.nn.Linear(128, 8, bias=False)
        for name in ("logit_scale", "curv", "visual_alpha", "textual_alpha"):
            setattr(self, name, torch.nn.Parameter(torch.tensor(-0.5)))
        self.register_buffer("pixel_mean", torch.full((3, 1, 1), 0.4))
        self.register_buffer("pixel_std", torch.full((3, 1, 1), 0.2))

    def images(self, pixels):
        return self.visual_alpha.exp() * self.visual_proj(self.visual(pixels))

    def texts(self, ids):
        x = self.textual.token_embed(ids) + self.textual.posit_embed
        for block in self.textual.resblocks:
            x = block(x)
        x = self.textual.ln_final(x)[torch.arange(len(ids)), ids.argmax(dim=1)]
        return self.textual_alpha.exp() * self.textual_proj(x)


def touch():
    pathlib.Path("executed").touch()


class Trap:
    """An object that runs code when it is unpickled."""

    def __reduce__(self):
        return touch, ()


def test_meru(tmp_path, monkeypatch):
    """Averages of the optimiser, and objects, are passed over as they are in the authors' files."""
    monkeypatch.chdir(tmp_path)
    model = randomised(Meru())
    averages = {i: {"exp_avg": torch.zeros_like(x)} for i, x in enumerate(model.parameters())}
    optimizer = {"state": averages, "param_groups": [{"betas": Trap()}]}
    content = {"optimizer": optimizer, "model": model.state_dict(), "scheduler": Trap()}
    torch.save(content, tmp_path / "meru.pth")
    found = read_language_image(tmp_path / "meru.pth")
    assert found.kind == "MERU" and found.settings.encoder.num_heads == 12
    pixels, ids = as_torch()
    check(found, model.images(pixels), model.texts(ids))
    assert [path.name for path in tmp_path.iterdir()] == ["meru.pth"]
