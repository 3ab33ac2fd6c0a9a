"""Models of images and texts by others, with random weights, against the libraries of the files."""

import collections
import functools
import json
import pathlib

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.models import create_embedder, language_image
from hypjax.models.language_image import read_language_image
from hypjax.settings import ModelSettings
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


def save_open_clip(folder, model, config, **preprocess):
    """Writes a model as the hub's repositories for open_clip have it."""
    folder.mkdir(exist_ok=True)
    state = {name: x.contiguous() for name, x in model.state_dict().items()}
    safetensors.save_file(state, folder / "open_clip_model.safetensors")
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(content))


def check_open_clip(model, config, folder, **preprocess):
    save_open_clip(folder, model, config, **preprocess)
    found = read_language_image(folder)
    pixels, ids = as_torch()
    check(found, model.encode_image(pixels), model.encode_text(ids))
    return found


@pytest.mark.parametrize("quick", [False, True])
def test_open_clip(quick, tmp_path):
    vision = dict(image_size=SIDE, layers=2, width=64, head_width=16, patch_size=PATCH)
    text = dict(context_length=9, vocab_size=50, width=128, heads=2, layers=2)
    config = {"quick_gelu": quick, "vision_cfg": vision, "text_cfg": text}
    for build in (open_clip.CLIP, open_clip.CustomTextCLIP):  # The second names texts "text.".
        model = randomised(build(8, vision, text, quick_gelu=quick))
        pixels = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
        found = check_open_clip(model, config, tmp_path / build.__name__, **pixels)
        assert found.pixels.mean == (0.5,) * 3 and found.pixels.std == (0.25,) * 3
        assert found.pixels.view.test == "centre_crop"


def test_checkpoints_of_open_clip_for_images_of_another_side(tmp_path):
    """Its training writes such files; position embeddings of another grid are interpolated."""
    vision = dict(image_size=3 * PATCH, layers=1, width=64, head_width=16, patch_size=PATCH)
    text = dict(context_length=9, vocab_size=50, width=64, heads=1, layers=1)
    state = randomised(open_clip.CLIP(8, vision, text)).state_dict()
    vision["image_size"] = SIDE
    model = open_clip.CLIP(8, vision, text).eval()
    entries = {f"module.{name}": x.bfloat16() for name, x in state.items()}
    content = {"epoch": 3, "state_dict": entries, "optimizer": {"state": {0: Trap()}}}
    torch.save(content, tmp_path / "epoch_3.pt")
    config = {"model_cfg": {"vision_cfg": vision, "text_cfg": text}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    state = {name: x.bfloat16().float() for name, x in state.items()}
    open_clip.model.resize_pos_embed(state, model)
    model.load_state_dict(state)
    found = read_language_image(tmp_path / "epoch_3.pt")
    pixels, ids = as_torch()
    check(found, model.encode_image(pixels), model.encode_text(ids))


# Numbers of a head, and the perceptrons' ratio, in LAION's ViT-H/14, ViT-g/14 and ViT-bigG/14.
@pytest.mark.parametrize(("head", "ratio"), [(80, 4.0), (88, 4.3637), (104, 4.9231)])
def test_open_clip_of_huge_towers(head, ratio, tmp_path):
    vision = dict(image_size=SIDE, layers=2, width=2 * head, head_width=head, mlp_ratio=ratio)
    vision |= dict(patch_size=PATCH)
    text = dict(context_length=9, vocab_size=50, width=96, heads=3, layers=2)
    config = {"vision_cfg": vision, "text_cfg": text}
    model = randomised(open_clip.CLIP(8, vision, text))
    found = check_open_clip(model, config, tmp_path)
    encoder = found.settings.encoder
    assert (encoder.architecture, encoder.num_heads, encoder.activation) == ("vit_clip", 2, "gelu")


@pytest.mark.parametrize("name", ["ViT-H-14", "ViT-g-14", "ViT-bigG-14", "ViT-B-16-plus-240"])
def test_settings_of_open_clip_s_models(name, tmp_path, monkeypatch):
    """Sizes, without the numbers: all blocks but the first are left out."""
    config = open_clip.get_model_config(name)
    vision, text = (config[f"{tower}_cfg"] | {"layers": 1} for tower in ("vision", "text"))
    with torch.device("meta"):
        model = open_clip.CLIP(config["embed_dim"], vision, text)
    monkeypatch.setattr(language_image, "_beside", lambda file, name: {"model_cfg": config})
    state = {x: np.broadcast_to(np.float32(0), y.shape) for x, y in model.state_dict().items()}
    arrays = language_image._arrays(state)
    for tower in ("visual", "textual"):
        blocks = {x: y for x, y in arrays.items() if x.startswith(f"{tower}.blocks.0.")}
        depth = config["vision_cfg" if tower == "visual" else "text_cfg"]["layers"]
        for i in range(1, depth):
            arrays |= {x.replace("blocks.0", f"blocks.{i}"): y for x, y in blocks.items()}
    towers = [
        {x.partition(".")[2]: y for x, y in arrays.items() if x.startswith(tower)}
        for tower in ("visual.", "textual.")
    ]
    image, text = language_image._encoders("CLIP", *towers, tmp_path)
    encoder = create_embedder(ModelSettings(image, "none", 0)).encoder
    vision, texts = config["vision_cfg"], config["text_cfg"]
    assert encoder.num_heads == vision["width"] // vision.get("head_width", 64)
    assert (encoder.width, encoder.depth) == (vision["width"], vision["layers"])
    assert (text.width, text.depth, text.num_heads) == tuple(
        texts[x] for x in ("width", "layers", "heads")
    )
    timm_name = {"ViT-H-14": "vit_huge", "ViT-g-14": "vit_giant", "ViT-bigG-14": "vit_gigantic"}
    expected = f"{timm_name[name]}_patch14_clip_224" if name in timm_name else "vit_clip"
    assert image.architecture == expected


@pytest.mark.parametrize(
    ("name", "activation", "text"),
    [
        ("vit_base_patch16_siglip_224", "gelu", {}),  # SigLIP, and SigLIP 2.
        ("vit_base_patch16_siglip_224", "gelu", {"act_kwargs": {"approximate": "tanh"}}),
        ("vit_so400m_patch16_siglip_256", "gelu_tanh", {}),
    ],
)
def test_open_clip_siglip(name, activation, text, tmp_path, monkeypatch):
    sizes = dict(img_size=SIDE, patch_size=PATCH, embed_dim=64, depth=2, num_heads=1, mlp_ratio=3)
    design = dict(class_token=False, global_pool="map", num_classes=0, act_layer=activation)
    trunk = timm.models.VisionTransformer(**sizes, **design)
    monkeypatch.setattr(timm, "create_model", lambda name, **kwargs: trunk)
    vision = dict(image_size=SIDE, timm_model_name=name, timm_pool="map", timm_proj="none")
    text = dict(context_length=9, vocab_size=50, width=96, heads=3, layers=2, **text)
    text |= dict(no_causal_mask=True, proj_bias=True, pool_type="last", mlp_ratio=2.5)
    text |= dict(norm_kwargs={"eps": 1e-6})
    config = {"custom_text": True, "vision_cfg": vision, "text_cfg": text}
    model = randomised(open_clip.CustomTextCLIP(64, vision, text, init_logit_bias=-10))
    found = check_open_clip(model, config, tmp_path, resize_mode="squash")
    assert (found.kind, found.bias) == ("SigLIP", -10)
    assert found.scale == pytest.approx(model.logit_scale.exp().item())
    assert found.pixels.view.test == "squash" and found.pixels.mean == (0.5,) * 3
    text["no_causal_mask"] = False
    save_open_clip(tmp_path, model, config)
    with pytest.raises(UserError, match="open_clip_config.json sets no_causal_mask=False"):
        read_language_image(tmp_path)


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
