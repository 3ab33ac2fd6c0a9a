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

    kind: str  # "CLIP", "SigLIP", "MERU" (and its successors) or "MERU's CLIP" (their baseline).
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
# Patterns of the sources' names, and timm's names by tower.
_NAMES = (
    (r"^vision_model\.head\.(attention\.)?", "visual.attn_pool."),
    (r"^vision_model\.", "visual."),
    (r"^(text_model\.head|text_projection)\.", "textual_proj."),
    (r"^text_model\.", "textual."),
    (r"^visual_projection\.", "visual_proj."),
    (r"^visual\.proj$", "visual_proj.kernel"),
    (r"^text_projection$", "textual_proj.kernel"),
    (r"^(transformer|token_embedding|positional_embedding|ln_final)\b", r"textual.\1"),
    (r"\.embeddings\.", "."),
    (r"\.(encoder\.layers|(transformer\.)?resblocks)\.", ".blocks."),
    (r"\.(pre_layrnorm|ln_pre)\.", ".norm_pre."),
    (r"\.((post_|final_)?layer_?norm|ln_post|ln_final)\.", ".norm."),
    (r"\.(layer_norm|ln_)(\d)\.", r".norm\2."),
    (r"\.self_attn\.", ".attn."),
    (r"\.attn\.(q|k|v)_proj\.", r".attn.\1."),
    (r"\.in_proj_", ".qkv."),
    (r"\.out_proj\.", ".proj."),
    (r"\.c_fc\.", ".fc1."),
    (r"\.c_proj\.", ".fc2."),
    (r"\.(conv1|patch_embedding)\.", ".patch_embed.proj."),
    (r"\.class_embedding$", ".cls_token"),
    (r"\.probe$", ".latent"),
    (r"\.token_embed(ding)?\.weight$", ".token_embed"),
    (r"\.(posit_embed|position(al)?_embedding(\.weight)?)$", ".pos_embed"),
)
# Numbers beside the weights that their shapes tell, too.
_REDUNDANT = re.compile(r"input_resolution|context_length|vocab_size|.*\.position_ids")
_MERU = {"curv", "visual_alpha", "textual_alpha"}
_OPTIONAL = {"logit_bias", "global_logit_scale", "local_logit_scale", "global_local_logit_scale"}
_ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Where a config.json names none, Transformers assumes these; of kinds that it has.
_ACTIVATION_OF = {"CLIP": "quick_gelu", "SigLIP": "gelu_pytorch_tanh"}


def read_language_image(path: str | pathlib.Path) -> LanguageImage | None:
    """Reads a model from a file, or from a folder such as a repository of the hub.

    config.json, open_clip_config.json and preprocessor_config.json beside the file tell what arrays
    do not. Without them, a CLIP has quick GELU if its weights are of half precision, like OpenAI's.
    Returns None if the path holds no embeddings of tokens. Raises a `UserError` if it does, but
    arrays are missing, unknown or of another shape.
    """
    file = pathlib.Path(path).expanduser()
    if file.is_dir():
        # Repositories for open_clip may hold the tower of images a second time.
        files = sorted(file.glob("open_clip_model.*")) or weights_in(file)
        file = files[0] if len(files) == 1 else file
    if not (file.is_file() or weights_in(file)):
        return None
    if zipfile.is_zipfile(file) and "/constants.pkl" in " ".join(zipfile.ZipFile(file).namelist()):
        remedy = "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE), if you trust it"
        raise UserError(f"{file} is a program of TorchScript; save its weights once: {remedy}")
    if not (arrays := _arrays(read_state_dict(str(file)))):
        return None
    with explained(f"{file} holds no model of images and texts that hypjax knows"):
        try:
            return _model(arrays, file)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error


def _arrays(content: StateDict) -> StateDict:
    """The model's arrays by timm's names and tower; none without embeddings of tokens."""
    matches = (_ANCHOR.fullmatch(name) for name in content if not OPTIMISER.search(name))
    if (match := next(filter(None, matches), None)) is None:
        return {}
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
        query, key, value = np.split(arrays.pop(name), 3)
        arrays[name.replace("qkv", "q")] = query
        arrays[name.replace("qkv", "kv")] = np.concatenate([key, value])
    return arrays


def _model(arrays: StateDict, file: pathlib.Path) -> LanguageImage:
    """Builds the model of arrays by `_arrays`."""
    towers: dict[str, StateDict] = {"visual": {}, "textual": {}}
    others: StateDict = {}
    for name, array in arrays.items():
        tower, _, rest = name.partition(".")
        towers.get(tower, others)[rest if tower in towers else name] = array
    visual, textual = towers.values()
    kind = "SigLIP" if "attn_pool.latent" in visual else "CLIP"
    if is_meru := "pixel_mean" in others:
        kind = "MERU" if "curv" in others else "MERU's CLIP"
    expected = {"logit_scale", "textual_proj.kernel"}
    expected |= {"logit_bias", "textual_proj.bias"} if kind == "SigLIP" else {"visual_proj.kernel"}
    if is_meru:
        expected |= {"pixel_mean", "pixel_std"} | (_MERU if _MERU & others.keys() else set())
    check_names(expected - others.keys(), others.keys() - expected - _OPTIONAL)

    image, text = _encoders(kind, visual, textual, file)
    dim = others["textual_proj.kernel"].shape[1]
    heads = ("none", "dense") if kind == "SigLIP" else ("linear", "linear")
    settings = ModelSettings(image, heads[0], dim, {TEXTS: ModelSettings(text, heads[1], dim)})
    model = create_embedder(settings)
    params = _parameters("visual", visual, others, model)
    params[f"towers_{TEXTS}"] = _parameters("textual", textual, others, model.towers[TEXTS])
    scale = others.get("global_logit_scale", others["logit_scale"])  # UNCHA has several.
    return LanguageImage(
        kind,
        settings,
        params,
        space=Lorentz(_exp(others["curv"], 0.1, 10.0), None, 0.5) if kind == "MERU" else Sphere(),
        pixels=_pixels(kind, image.view, others, file),
        scale=_exp(scale, 0.0, math.inf if kind == "SigLIP" else 100.0),
        bias=float(others.get("logit_bias", np.zeros(1)).item()),
    )


def _encoders(
    kind: str, visual: StateDict, textual: StateDict, file: pathlib.Path
) -> tuple[EncoderSettings, TextSettings]:
    """Settings of both towers, from the shapes of their arrays."""
    config = _transformers_config(file)
    kernel = visual["patch_embed.proj.weight"]
    activations = _activations(kind, kernel, file)
    width, depth, hidden = _sizes(visual)
    side = kernel.shape[-1] * math.isqrt(visual["pos_embed"].shape[1])  # Less any class token.
    prepared = _beside(file, "open_clip_config.json").get("preprocess_cfg", {})
    is_squashed = kind == "SigLIP" or prepared.get("resize_mode") == "squash"
    view = View(side, side, kernel.shape[1], "squash" if is_squashed else "centre_crop")
    if kind in _ACTIVATION_OF:
        sizes = width, depth, kernel.shape[-1], hidden
        image = _named_encoder(kind, view, sizes, activations[0])
    else:
        heads = 12 if width == 384 else width // 64
        image = EncoderSettings("vit", view, "cls", "auto", kernel.shape[-1], width, depth, heads)
        image = dataclasses.replace(image, norm_eps=1e-5)
    width, depth, hidden = _sizes(textual)
    heads = config.get("text_config", {}).get("num_attention_heads")
    text = TextSettings(
        width,
        depth,
        heads or (16 if width == 1152 else width // 64),
        vocabulary=len(textual["token_embed"]),
        context=textual["pos_embed"].shape[1],
        activation=activations[1],
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
    kind: str, view: View, sizes: tuple[int, int, int, int], activation: str
) -> EncoderSettings:
    """The architecture of a width, depth, patch and perceptron, if possible of an activation."""
    candidates: dict[str, Any] = {}
    for name in (name for name in ARCHITECTURES if f"_{kind.lower()}_" in name):
        x: Any = create_encoder(name)
        if (x.width, x.depth, x.patch_size, int(x.width * x.mlp_ratio)) == sizes:
            candidates[name] = x
    if not candidates:
        tower = "its tower of images has {1} blocks of width {0} and patches of {2} pixels"
        problem = f"and no {kind} of docs/encoders.md has these sizes"
        raise UserError(f"{tower.format(*sizes)}, {problem}")
    name = max(candidates, key=lambda name: candidates[name].blocks.activation == activation)
    changed = None if candidates[name].blocks.activation == activation else activation
    return EncoderSettings(name, view, candidates[name].pooling, activation=changed)


def _activations(kind: str, kernel: np.ndarray, file: pathlib.Path) -> list[str]:
    """Activations of the towers of images and of texts, see `read_language_image`."""
    if kind not in _ACTIVATION_OF:
        return ["gelu", "gelu"]
    config, open_clip = _transformers_config(file), _beside(file, "open_clip_config.json")
    if config or kind == "SigLIP":
        towers = (config.get(f"{tower}_config", {}) for tower in ("vision", "text"))
        return [_ACTIVATIONS[tower.get("hidden_act", _ACTIVATION_OF[kind])] for tower in towers]
    is_quick = open_clip.get("model_cfg", {}).get("quick_gelu", False)
    if not open_clip:
        is_quick = np.array_equal(kernel, kernel.astype(np.float16))
        guess = "quick GELU, as in OpenAI's" if is_quick else "GELU, unlike in OpenAI's"
        remedy = "a config.json or open_clip_config.json beside it would tell"
        console.say(f"{file} is read with {guess} files of half precision; {remedy}")
    return ["quick_gelu" if is_quick else "gelu"] * 2


def _transformers_config(file: pathlib.Path) -> dict[str, Any]:
    config = _beside(file, "config.json")  # It may be timm's.
    return config if config.get("model_type") in ("clip", "siglip") else {}


def _beside(file: pathlib.Path, name: str) -> dict[str, Any]:
    path = file.with_name(name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _pixels(kind: str, view: View, others: StateDict, file: pathlib.Path) -> Pixels:
    """How pixels are scaled: by numbers of the model, of files beside it, or of its library."""
    if "pixel_mean" in others:
        # As text, the numbers are those that were rounded to float32.
        texts = (others[name].ravel().astype(str) for name in ("pixel_mean", "pixel_std"))
        mean, std = (tuple(map(float, numbers)) for numbers in texts)
    else:
        open_clip = _beside(file, "open_clip_config.json").get("preprocess_cfg", {})
        transformers = _beside(file, "preprocessor_config.json")
        mean, std = HALF_PIXELS if kind == "SigLIP" else CLIP_PIXELS
        mean = open_clip.get("mean") or transformers.get("image_mean") or mean
        std = open_clip.get("std") or transformers.get("image_std") or std
    return Pixels(view, tuple(mean), tuple(std))


def _parameters(tower: str, state: StateDict, others: StateDict, model: Embedder) -> PyTree:
    """Parameters of a tower; a factor of its embeddings becomes part of the head."""
    channels = state.get("patch_embed.proj.weight", np.empty((1, 3))).shape[1]
    try:
        params = {"encoder": convert_timm(state, model.encoder, channels)}
        if model.head_kind != "none":
            leaves = ("kernel", "bias")[: 1 + (model.head_kind == "dense")]
            head = {leaf: others[f"{tower}_proj.{leaf}"] for leaf in leaves}
            alpha = others.get(f"{tower}_alpha", np.zeros(1))
            head["kernel"] = head["kernel"] * np.float32(_exp(alpha, 0.0, 1.0))
            params["head"] = check_head(head, model)
        return params
    except UserError as error:
        raise UserError(f"{tower} tower: {error}") from error


def _exp(logarithm: np.ndarray, least: float, most: float) -> float:
    """The learned number whose logarithm a file holds, within the bounds of training."""
    return min(max(math.exp(logarithm.item()), least), most)
