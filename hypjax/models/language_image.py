"""Reads models of images and texts from the files of their authors; never executes their code.

These are CLIP (Radford et al., ICML 2021) and SigLIP (Zhai et al., ICCV 2023) under the names of
OpenAI, open_clip and Transformers, and MERU (Desai et al., ICML 2023) with its successors HyCoCLIP
and UNCHA, and the CLIP that each is compared with.
"""

import dataclasses
import json
import math
import pathlib
import re
import zipfile
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hypjax.errors import UserError, explained
from hypjax.geometry import Lorentz, Space, Sphere
from hypjax.models import architectures
from hypjax.models.architectures import CLIP_PIXELS, HALF_PIXELS
from hypjax.models.embedder import Embedder, create_embedder
from hypjax.models.encoder import renamed
from hypjax.models.pretrained import check_head, convert_timm
from hypjax.models.weight_files import StateDict, read_state_dict, weights_in
from hypjax.models.weight_names import OPTIMISER, check_names, preferred
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
    r"((?:.+?\.)??)(textual\.token_embed|(text_model\.embeddings\.|text\.)?token_embedding)\.weight"
)
# Patterns of the sources' names, and timm's names by tower.
_NAMES = (
    (r"^text\.", ""),  # open_clip's CustomTextCLIP, whose images may have a tower of timm.
    (r"^visual\.trunk\.", "visual."),
    (r"^visual\.head\.proj\.", "visual_proj."),
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
# Numbers beside the weights that their shapes tell, too, and a count of averages.
_REDUNDANT = re.compile(r"input_resolution|context_length|vocab_size|n_averaged|.*\.position_ids")
_MERU = {"curv", "visual_alpha", "textual_alpha"}
_OPTIONAL = {"logit_bias", "global_logit_scale", "local_logit_scale", "global_local_logit_scale"}
_OPTIONAL |= {"visual_proj.kernel", "visual_proj.bias", "textual_proj.bias"}
# Where a config.json names none, Transformers assumes these; of kinds that it has.
_ACTIVATION_OF = {"CLIP": "quick_gelu", "SigLIP": "gelu_pytorch_tanh"}
# Heads of towers of images by width, if not of 64 numbers: of SigLIP and large CLIPs, and of MERU.
_HEADS = {1152: 16, 1280: 16, 1408: 16, 1536: 16, 1664: 16, 1792: 16}
_HEADS_OF_MERU = {384: 12}


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
        files = sorted(file.glob("open_clip_model.*"))[-1:] or weights_in(file)
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
    prefixes = [match[1] for match in matches if match]
    if not prefixes:
        return {}
    start = preferred(prefixes)
    passed_over = tuple(x for x in prefixes if x.startswith(start) and x != start)
    arrays: StateDict = {}
    for name, array in content.items():
        short = name.removeprefix(start)
        is_other = not name.startswith(start) or name.startswith(passed_over)
        if is_other or _REDUNDANT.fullmatch(short) or OPTIMISER.search(short):
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
    expected |= {"visual_proj.kernel"} if kind != "SigLIP" else set()
    if is_meru:
        expected |= {"pixel_mean", "pixel_std"} | (_MERU if _MERU & others.keys() else set())
    check_names(expected - others.keys(), others.keys() - expected - _OPTIONAL)

    image, text = _encoders(kind, visual, textual, file)
    dim = others["textual_proj.kernel"].shape[1]
    kinds = "none", "linear", "dense"  # By the number of arrays.
    heads = [kinds[sum(name.startswith(f"{tower}_proj.") for name in others)] for tower in towers]
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
    """Settings of both towers, from the shapes of their arrays and files beside them."""
    kernel, positions = visual["patch_embed.proj.weight"], visual["pos_embed"].shape[1]
    image, text = _configs(kind, kernel, file)
    sides = np.broadcast_to(image.get("image_size", 0), 2).tolist()  # May be a pair.
    positions -= "cls_token" in visual
    grid = math.isqrt(positions)
    if kernel.ndim != 4 or positions != grid**2 or sides[0] != sides[1]:
        shapes = "a NaFlex model of images" if kernel.ndim == 2 else "a model of images"
        raise UserError(f"{shapes} that are not square, which hypjax does not embed")
    patch = kernel.shape[-1]
    side = patch * (sides[0] // patch or grid)
    prepared = _beside(file, "open_clip_config.json").get("preprocess_cfg", {})
    resize = prepared.get("resize_mode", "squash" if kind == "SigLIP" else "shortest")
    view = View(side, side, kernel.shape[1], "squash" if resize == "squash" else "centre_crop")
    name, pooling = f"vit_{kind.lower()}", "map" if kind == "SigLIP" else "cls"
    name = name if name in architectures.UNSIZED else "vit"
    width, depth, ratio = _sizes(visual)
    heads = image.get("num_attention_heads") or _usual_heads(
        width, _HEADS_OF_MERU if kind.startswith("MERU") else _HEADS
    )
    settings = EncoderSettings(name, view, pooling, "auto", patch, width, depth, heads, ratio)
    activations = [tower["hidden_act"].replace("pytorch_", "") for tower in (image, text)]
    norm_eps = image.get("layer_norm_eps")
    settings = dataclasses.replace(settings, norm_eps=norm_eps, activation=activations[0])
    encoder = create_embedder(ModelSettings(settings, "none", 0)).encoder
    if known := architectures.timm_name(encoder):
        settings = EncoderSettings(known, view, pooling)
    width, depth, ratio = _sizes(textual)
    heads = text.get("num_attention_heads") or _usual_heads(width, {1152: 16})
    vocabulary, context = len(textual["token_embed"]), textual["pos_embed"].shape[1]
    eps = text.get("layer_norm_eps") or (1e-6 if kind == "SigLIP" else 1e-5)
    form, sizes = "siglip" if kind == "SigLIP" else "clip", (width, depth, heads, vocabulary)
    return settings, TextSettings(*sizes, context, activations[1], eps, ratio, form)


def _sizes(state: StateDict) -> tuple[int, int, float]:
    """Width and depth of a tower, and the width of its perceptrons relative to it."""
    hidden, width = state["blocks.0.mlp.fc1.weight"].shape
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    return width, depth, hidden / width


def _usual_heads(width: int, by_width: dict[int, int]) -> int:
    """The heads of a tower where no file beside the weights tells them: of 64 numbers, mostly."""
    if width % 64 and width not in by_width:
        raise UserError(f"no (open_clip_)config.json beside it tells the heads of width {width}")
    return by_width.get(width, width // 64)


def _configs(kind: str, kernel: np.ndarray, file: pathlib.Path) -> list[dict[str, Any]]:
    """Settings of both towers from files beside the weights, by Transformers' names."""
    if kind not in _ACTIVATION_OF:
        return [{"hidden_act": "gelu", "layer_norm_eps": 1e-5}] * 2
    if "model_cfg" in (open_clip := _beside(file, "open_clip_config.json")):
        return _open_clip_configs(kind, open_clip["model_cfg"])
    config, usual = _beside(file, "config.json"), {"hidden_act": _ACTIVATION_OF[kind]}
    if config.get("model_type") in ("clip", "siglip") or kind == "SigLIP":  # It may be timm's.
        return [usual | config.get(f"{tower}_config", {}) for tower in ("vision", "text")]
    halves = [kernel.astype(dtype).astype(kernel.dtype) for dtype in (np.float16, jnp.bfloat16)]
    is_quick = [np.array_equal(kernel, half) for half in halves] == [True, False]
    guess = "quick GELU, as in OpenAI's" if is_quick else "GELU, unlike in OpenAI's"
    remedy = "a config.json or open_clip_config.json beside it would tell"
    console.say(f"{file} is read with {guess} files of half precision; {remedy}")
    return [{"hidden_act": "quick_gelu" if is_quick else "gelu"}] * 2


def _open_clip_configs(kind: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of a model of open_clip, whose tower of images may be timm's, as `_configs`."""
    configs, towers = [], [config.get(f"{tower}_cfg", {}) for tower in ("vision", "text")]
    rule = towers[1].get("no_causal_mask", False), towers[1].get("pool_type", "argmax")
    if towers[1] and rule != ((True, "last") if kind == "SigLIP" else (False, "argmax")):
        sets = "no_causal_mask={}, pool_type={}".format(*rule)
        raise UserError(f"open_clip_config.json sets {sets} of the texts, unlike {kind}")
    for tower in towers:
        activation = f"gelu_{(tower.get('act_kwargs') or {}).get('approximate', '')}".strip("_")
        settings: dict[str, Any] = {
            "hidden_act": "quick_gelu" if config.get("quick_gelu") else activation
        }
        settings["layer_norm_eps"] = (tower.get("norm_kwargs") or {}).get("eps", 1e-5)
        heads = tower.get("width", 0) // tower.get("head_width", 64)
        settings["num_attention_heads"] = tower.get("heads", heads)
        settings["image_size"] = tower.get("image_size", 0)
        configs.append(settings)
    if name := towers[0].get("timm_model_name"):
        blocks = name in architectures.ARCHITECTURES and architectures.create_encoder(name).blocks
        configs[0] |= {
            "hidden_act": blocks.activation if blocks else "gelu",
            "layer_norm_eps": None,
        }
    return configs


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
            alpha = np.float32(_exp(others.get(f"{tower}_alpha", np.zeros(1)), 0.0, 1.0))
            params["head"] = check_head({leaf: alpha * x for leaf, x in head.items()}, model)
        return params
    except UserError as error:
        raise UserError(f"{tower} tower: {error}") from error


def _exp(logarithm: np.ndarray, least: float, most: float) -> float:
    """The learned number whose logarithm a file holds, within the bounds of training."""
    return min(max(math.exp(logarithm.item()), least), most)
