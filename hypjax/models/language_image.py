"""Reads models of images and texts from the files of their authors; never executes their code.

These are CLIP (Radford et al., ICML 2021) under the names of OpenAI, open_clip and Transformers,
SigLIP (Zhai et al., ICCV 2023) under Transformers' names, and MERU (Desai et al., ICML 2023) with
its successors HyCoCLIP and UNCHA, and the CLIP that each is compared with.
"""

import dataclasses
import json
import math
import pathlib
import re
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from hypjax.errors import UserError, explained
from hypjax.geometry import Lorentz, Space, Sphere
from hypjax.models.architectures import ARCHITECTURES, CLIP_PIXELS, HALF_PIXELS, create_encoder
from hypjax.models.embedder import Embedder, create_embedder
from hypjax.models.encoder import renamed
from hypjax.models.pretrained import check_head, convert_timm
from hypjax.models.weight_files import StateDict, read_state_dict, weights_in
from hypjax.models.weight_names import OPTIMISER, check_names
from hypjax.settings import EncoderSettings, ModelSettings, Pixels, TextSettings
from hypjax.system import console
from hypjax.types import TEXTS, View


class LanguageImage(NamedTuple):
    """A model of images and texts that others have trained.

    The logit of an image and a text is scale · cosine + bias or, in a curved space, −scale ·
    distance. MERU's points lie at distance α‖v‖ from the origin, where `Lorentz.embed` doubles it:
    the space's `feature_scale` is 1/2, and each tower's α is part of its head's kernel.
    """

    kind: str  # "CLIP", "SigLIP", "MERU", "HyCoCLIP", "UNCHA" or "MERU's CLIP", their baseline.
    settings: ModelSettings
    params: PyTree  # Of the `Embedder` with these settings; float32 NumPy arrays.
    space: Space
    pixels: Pixels
    scale: float
    bias: float


# The embeddings of tokens, whose names tell the sources apart.
_ANCHOR = re.compile(
    r"((?:.+?\.)??)(textual\.token_embed|text_model\.embeddings\.token_embedding|token_embedding)"
    r"\.weight"
)
# Patterns of all sources' names, and timm's names below "visual" and "textual".
_NAMES = (
    (r"^vision_model\.", "visual."),  # Transformers.
    (r"^text_model\.head\.", "textual_proj."),
    (r"^text_model\.", "textual."),
    (r"^visual_projection\.", "visual_proj."),
    (r"^text_projection\.", "textual_proj."),
    (r"\.embeddings\.", "."),
    (r"\.encoder\.layers\.", ".blocks."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
    (r"\.self_attn\.(q|k|v)_proj\.", r".attn.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"\.pre_layrnorm\.", ".norm_pre."),
    (r"\.(post_layernorm|final_layer_norm)\.", ".norm."),
    (r"^visual\.head\.probe$", "visual.attn_pool.latent"),
    (r"^visual\.head\.attention\.in_proj_", "visual.attn_pool.qkv."),
    (r"^visual\.head\.attention\.out_proj\.", "visual.attn_pool.proj."),
    (r"^visual\.head\.layernorm\.", "visual.attn_pool.norm."),
    (r"^visual\.head\.mlp\.", "visual.attn_pool.mlp."),
    (r"^(transformer|token_embedding|positional_embedding|ln_final)\b", r"textual.\1"),  # OpenAI.
    (r"^visual\.proj$", "visual_proj.kernel"),
    (r"^text_projection$", "textual_proj.kernel"),
    (r"\.(transformer\.)?resblocks\.", ".blocks."),
    (r"\.ln_pre\.", ".norm_pre."),
    (r"\.ln_(post|final)\.", ".norm."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.(conv1|patch_embedding)\.", ".patch_embed.proj."),
    (r"\.class_embedding$", ".cls_token"),
    (r"\.token_embed(ding)?\.weight$", ".token_embed"),
    (r"\.(posit_embed|(position|positional)_embedding(\.weight)?)$", ".pos_embed"),
)
# Numbers that accompany the weights and are found in their shapes.
_REDUNDANT = re.compile(r"input_resolution|context_length|vocab_size|.*\.position_ids")
_MERU = {"curv", "visual_alpha", "textual_alpha"}
_OPTIONAL = {"logit_bias", "global_logit_scale", "local_logit_scale", "global_local_logit_scale"}
# Transformers' activations, by its names, and those that it assumes where a config.json has none.
_LIBRARY_DEFAULTS = {"CLIP": "quick_gelu", "SigLIP": "gelu_pytorch_tanh"}
_ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_language_image(path: str | pathlib.Path) -> LanguageImage | None:
    """Reads a model from a file, or from a folder such as a repository of the hub.

    Files beside it, such as config.json, tell what arrays do not. Returns None if the path holds no
    embeddings of tokens. Raises a `UserError` if it holds them, but arrays are missing, unknown or
    of another shape.
    """
    file = pathlib.Path(path).expanduser()
    if file.is_dir():
        # Repositories for open_clip may hold the tower of images a second time.
        files = sorted(file.glob("open_clip_model.*")) or weights_in(file)
        if not files:
            return None
        file = files[0] if len(files) == 1 else file
    elif not file.is_file():
        return None
    if zipfile.is_zipfile(file) and "/constants.pkl" in " ".join(zipfile.ZipFile(file).namelist()):
        remedy = "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE), if you trust it"
        raise UserError(f"{file} is a program of TorchScript; save its weights once: {remedy}")
    arrays = _arrays(read_state_dict(str(file)))
    if arrays is None:
        return None
    with explained(f"{file} holds no model of images and texts that hypjax knows"):
        try:
            return _model(arrays, _notes(file))
        except UserError as error:
            raise UserError(f"{file}: {error}") from error


def _arrays(content: StateDict) -> StateDict | None:
    """The model's arrays by timm's names below its towers; None without embeddings of tokens."""
    matches = (_ANCHOR.fullmatch(name) for name in content if not OPTIMISER.search(name))
    if (match := next(filter(None, matches), None)) is None:
        return None
    arrays: StateDict = {}
    for name, array in content.items():
        short = name.removeprefix(match[1])
        if not name.startswith(match[1]) or _REDUNDANT.fullmatch(short):
            continue
        name = renamed(short, _NAMES)
        if name.endswith("_proj.weight"):
            name, array = name.replace("weight", "kernel"), array.T
        if name.endswith((".cls_token", ".pos_embed")):
            array = array.reshape(1, -1, array.shape[-1])
        arrays[name] = array
    for name in [name for name in arrays if ".attn.q." in name]:
        parts = [name.replace(".q.", f".{part}.") for part in "qkv"]
        if arrays.keys() >= {*parts}:
            arrays[name.replace(".q.", ".qkv.")] = np.concatenate([arrays.pop(x) for x in parts])
    for name in [name for name in arrays if ".attn_pool.qkv." in name]:
        array = arrays.pop(name)
        query, key_value = np.split(array, [len(array) // 3])
        arrays |= {name.replace("qkv", "q"): query, name.replace("qkv", "kv"): key_value}
    return arrays


class _Notes(NamedTuple):
    """What files beside the weights tell of them, in the forms of Transformers and open_clip."""

    file: pathlib.Path
    config: Mapping[str, Any]
    open_clip: Mapping[str, Any]
    processor: Mapping[str, Any]

    def heads(self, tower: str) -> int | None:
        """Number of attention heads of the tower "vision" or "text"; None if no file says."""
        open_clip = self.open_clip.get("model_cfg", {}).get(f"{tower}_cfg", {})
        return self.config.get(f"{tower}_config", {}).get("num_attention_heads") or open_clip.get(
            "heads"
        )

    def activations(self, kind: str, patches: np.ndarray) -> list[str]:
        """Activations of the towers of images and of texts.

        If no file says, a CLIP whose kernel of patches fits into half precision is OpenAI's, which
        needs quick GELU.
        """
        if kind not in _LIBRARY_DEFAULTS:
            return ["gelu", "gelu"]
        if self.config or kind == "SigLIP":
            towers = (self.config.get(f"{tower}_config", {}) for tower in ("vision", "text"))
            default = _LIBRARY_DEFAULTS[kind]
            return [_ACTIVATIONS[tower.get("hidden_act", default)] for tower in towers]
        is_quick = self.open_clip.get("model_cfg", {}).get("quick_gelu", False)
        if not self.open_clip:
            is_quick = np.array_equal(patches, patches.astype(np.float16))
            found, name = ("", "quick_gelu") if is_quick else ("not ", "gelu")
            reason = f"its weights are {found}of half precision, as OpenAI's"
            remedy = "a config.json or open_clip_config.json beside it would say"
            console.say(f"{self.file} is read with the activation {name}: {reason}; {remedy}")
        return ["quick_gelu" if is_quick else "gelu"] * 2


def _notes(file: pathlib.Path) -> _Notes:
    """Reads the files beside the weights; a config.json by others, such as timm, says nothing."""
    names = ("config.json", "open_clip_config.json", "preprocessor_config.json")
    paths = (file.with_name(name) for name in names)
    config, open_clip, processor = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {} for path in paths
    )
    is_known = config.get("model_type") in ("clip", "siglip")
    return _Notes(file, config if is_known else {}, open_clip, processor)


def _model(arrays: StateDict, notes: _Notes) -> LanguageImage:
    """Builds the model of arrays that `_arrays` named."""
    towers: dict[str, StateDict] = {"visual": {}, "textual": {}}
    others: StateDict = {}
    for name, array in arrays.items():
        tower, _, rest = name.partition(".")
        towers.get(tower, others)[rest if tower in towers else name] = array
    visual, textual = towers.values()
    kind = _kind(visual, others)
    expected = {"logit_scale", "textual_proj.kernel"}
    expected |= {"logit_bias", "textual_proj.bias"} if kind == "SigLIP" else {"visual_proj.kernel"}
    if kind not in _LIBRARY_DEFAULTS:
        expected |= {"pixel_mean", "pixel_std"} | (_MERU if _MERU & others.keys() else set())
    check_names(expected - others.keys(), others.keys() - expected - _OPTIONAL)

    image, text = _encoders(kind, visual, textual, notes)
    width, dim = others["textual_proj.kernel"].shape
    heads = ("none", "dense") if kind == "SigLIP" else ("linear", "linear")
    texts = ModelSettings(text, heads[1], dim)
    settings = ModelSettings(image, heads[0], dim, {TEXTS: texts})
    model = create_embedder(settings)
    params = _parameters("visual", visual, others, model)
    params[f"towers_{TEXTS}"] = _parameters("textual", textual, others, model.towers[TEXTS])

    curved = "curv" in others
    scale = others.get("global_logit_scale", others["logit_scale"])
    return LanguageImage(
        kind,
        settings,
        params,
        space=Lorentz(_exp(others["curv"], 0.1, 10), None, 0.5) if curved else Sphere(),
        pixels=_pixels(kind, image.view, others, notes),
        scale=_exp(scale, 0, math.inf if kind == "SigLIP" else 100),
        bias=float(others["logit_bias"].item()) if "logit_bias" in others else 0.0,
    )


def _kind(visual: StateDict, others: StateDict) -> str:
    """Tells models apart; HyCoCLIP's have a mean of pixels that is their deviation, by mistake."""
    if "curv" not in others:
        baseline = "MERU's CLIP" if "pixel_mean" in others else "CLIP"
        return "SigLIP" if "attn_pool.latent" in visual else baseline
    if "global_logit_scale" in others:
        return "UNCHA"
    is_trap = np.array_equal(others.get("pixel_mean", 0), others.get("pixel_std", 1))
    return "HyCoCLIP" if is_trap else "MERU"


def _encoders(
    kind: str, visual: StateDict, textual: StateDict, notes: _Notes
) -> tuple[EncoderSettings, TextSettings]:
    """Settings of both towers, from the shapes of their arrays."""
    width, depth, hidden = _sizes(visual)
    _, channels, patch, _ = visual["patch_embed.proj.weight"].shape
    side = patch * math.isqrt(visual["pos_embed"].shape[1])  # A class token changes nothing.
    activation, text_activation = notes.activations(kind, visual["patch_embed.proj.weight"])
    view = View(side, side, channels, "squash" if kind == "SigLIP" else "centre_crop")
    if kind in _LIBRARY_DEFAULTS:
        sizes = width, depth, patch, hidden, notes.heads("vision")
        image = _named_encoder(kind, view, sizes, activation)
    else:
        num_heads = 12 if width == 384 else width // 64
        image = EncoderSettings("vit", view, "cls", "auto", patch, width, depth, num_heads)
        image = dataclasses.replace(image, norm_eps=1e-5)
    width, depth, hidden = _sizes(textual)
    text = TextSettings(
        width,
        depth,
        num_heads=notes.heads("text") or (16 if width == 1152 else width // 64),
        vocabulary=len(textual["token_embed"]),
        context=textual["pos_embed"].shape[1],
        activation=text_activation,
        norm_eps=1e-6 if kind == "SigLIP" else 1e-5,
        mlp_ratio=hidden / width,
        kind="siglip" if kind == "SigLIP" else "clip",
    )
    return image, text


def _sizes(state: StateDict) -> tuple[int, int, int]:
    """Width, depth and the perceptrons' width of a tower."""
    hidden, width = state["blocks.0.mlp.fc1.weight"].shape
    return width, len({name.split(".")[1] for name in state if name.startswith("blocks.")}), hidden


def _named_encoder(
    kind: str, view: View, sizes: tuple[int | None, ...], activation: str
) -> EncoderSettings:
    """The architecture of these sizes, if possible with this activation."""
    found = {}
    for name in ARCHITECTURES:
        if f"_{kind.lower()}_" not in name:
            continue
        encoder: Any = create_encoder(name)
        hidden, num_heads = int(encoder.width * encoder.mlp_ratio), encoder.num_heads
        theirs = encoder.width, encoder.depth, encoder.patch_size, hidden, sizes[-1] and num_heads
        if theirs == sizes:
            found[name] = encoder
    if not found:
        width, depth, patch = sizes[:3]
        tower = f"its tower of images has {depth} blocks of width {width} and patches of {patch}"
        raise UserError(f"{tower}, and no {kind} of docs/encoders.md has these sizes")
    name = max(found, key=lambda name: found[name].blocks.activation == activation)
    changed = None if found[name].blocks.activation == activation else activation
    return EncoderSettings(name, view, found[name].pooling, activation=changed)


def _parameters(tower: str, state: StateDict, others: StateDict, model: Embedder) -> PyTree:
    """Parameters of a tower; a factor of its embeddings becomes part of the head."""
    try:
        channels = 3 if "token_embed" in state else state["patch_embed.proj.weight"].shape[1]
        params = {"encoder": convert_timm(state, model.encoder, channels)}
        if model.head_kind == "none":
            return params
        names = {"linear": ["kernel"], "dense": ["kernel", "bias"]}[model.head_kind]
        head = {name: others[f"{tower}_proj.{name}"] for name in names}
        if f"{tower}_alpha" in others:
            head["kernel"] = head["kernel"] * np.float32(_exp(others[f"{tower}_alpha"], 0, 1))
        return params | {"head": check_head(head, model)}
    except UserError as error:
        raise UserError(f"{tower} tower: {error}") from error


def _pixels(kind: str, view: View, others: StateDict, notes: _Notes) -> Pixels:
    """The model's own scaling of pixels, what files beside it say, or its library's."""
    if "pixel_mean" in others:
        # As text, the numbers are those that were rounded to float32.
        own = (others[name].ravel().astype(str) for name in ("pixel_mean", "pixel_std"))
        mean, std = (tuple(map(float, numbers)) for numbers in own)
    else:
        noted = notes.open_clip.get("preprocess_cfg", {})
        mean, std = HALF_PIXELS if kind == "SigLIP" else CLIP_PIXELS
        mean = noted.get("mean") or notes.processor.get("image_mean") or mean
        std = noted.get("std") or notes.processor.get("image_std") or std
    return Pixels(view, tuple(mean), tuple(std))


def _exp(logarithm: np.ndarray, least: float, most: float) -> float:
    """The learned number whose logarithm a file holds, within the bounds of training."""
    return min(max(math.exp(logarithm.item()), least), most)
