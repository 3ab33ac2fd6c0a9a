"""Converts encoder weights from timm's names and layouts, and back; never executes their code."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from hypjax.errors import UserError, writing
from hypjax.models.architectures import (
    create_encoder,
    encoder_shapes,
    is_in_timm,
    pool_first_field,
    timm_name,
)
from hypjax.models.embedder import Embedder
from hypjax.models.encoder import Encoder, Path, renamed
from hypjax.models.vit import VisionTransformer
from hypjax.models.weight_files import KEY, StateDict, read_state_dict
from hypjax.models.weight_names import HEADS, check_names, find_encoder
from hypjax.settings import Pixels
from hypjax.system.files import contiguous, replacing, write_safetensors

_ANY_TRANSFORMER = "vit_base_patch16_224"  # timm builds any size of ViT from it.
_LEAVES = dict(kernel="weight", scale="weight", mean="running_mean", variance="running_var")


def name_in_timm(encoder: Encoder, path: Path) -> str:
    """Name of a parameter in timm; for a user's module, its path, 'encoder/Dense_0/kernel'."""
    if encoder.names is None:
        return "/".join(("encoder", *path))
    *modules, leaf = (name for name in path if name != "statistics")
    return renamed(".".join((*modules, _LEAVES.get(leaf, leaf))), encoder.names)


def to_timm(encoder: Encoder, path: Path, array: np.ndarray) -> np.ndarray:
    """Converts a parameter to timm's layout; `from_timm` is the inverse.

    Kernels are [inputs, outputs] and [h, w, inputs, outputs] here, but [outputs, inputs] and
    [outputs, inputs, h, w] in timm. timm's convolutions of patches are dense layers here.
    """
    if encoder.names is None or path[-1] != "kernel":
        return array
    if side := encoder.patches.get(path[-2]):
        return rearrange(array, "(p q i) o -> o i p q", p=side, q=side)
    return array.T if array.ndim == 2 else rearrange(array, "h w i o -> o i h w")


def from_timm(encoder: Encoder, path: Path, array: np.ndarray) -> np.ndarray:
    """Converts a parameter from timm's layout; `to_timm` is the inverse."""
    if encoder.names is None or path[-1] != "kernel":
        return array
    if path[-2] in encoder.patches:
        return rearrange(array, "o i p q -> (p q i) o")
    return array.T if array.ndim == 2 else rearrange(array, "o i h w -> h w i o")


def load_timm(name_or_path: str, encoder: Encoder, channels: int = 3) -> PyTree:
    """Loads an encoder's parameters from the hub or a file, as float32 NumPy arrays.

    Weights are named as in timm, such as `vit_small_patch16_224.dino`, or as another model of the
    hub whose tensors have timm's names, such as `hf-hub:OWNER/NAME`; or they are in a file of
    safetensors, PyTorch (which needs torch) or Google (.npz), or in a folder with such a file.
    `FILE?key=ENTRY` names one of several models in a file. Raises a `UserError` for weights that
    are missing, damaged or of another model.
    """
    try:
        return convert_timm(read_weights(name_or_path, encoder, channels), encoder, channels)
    except UserError as error:
        raise UserError(f"weights {name_or_path}: {error}") from error


def read_weights(name_or_path: str, encoder: Encoder, channels: int = 3) -> StateDict:
    """Reads weights as for `load_timm`: arrays by timm's names, and heads by hypjax's."""
    location, _, key = name_or_path.partition(KEY)
    expected = _timm_shapes(encoder_shapes(encoder, channels), encoder)
    content = read_state_dict(location)
    names = find_encoder(content, expected.keys(), key)
    state = {name: content[source] for name, source in names.items()}
    positions = state.get("pos_embed")
    if getattr(encoder, "positions", "") == "patches" and positions is not None:
        num_patches = positions.shape[1] - 1
        if math.isqrt(num_patches) ** 2 == num_patches:
            # As timm, for DINOv2's registers: the class token's position is added to the token.
            state["cls_token"] = np.float32(state["cls_token"]) + positions[:, :1]
            state["pos_embed"] = positions[:, 1:]
    return state


def convert_timm(
    state_dict: Mapping[str, np.ndarray],
    encoder: Encoder,
    channels: int = 3,
    interpolate: bool = True,
) -> PyTree:
    """Converts arrays under timm's names to an encoder's parameters, float32 NumPy arrays.

    Classifiers are ignored. With `interpolate`, position embeddings for another image size are
    interpolated as in timm: bicubic with antialiasing. Raises a `UserError` for a tensor that is
    missing, unknown or of another shape.
    """
    shapes = encoder_shapes(encoder, channels)
    expected = _timm_shapes(shapes, encoder)
    state = dict(state_dict)
    if encoder.learn_gem:  # timm's weights have no exponent.
        state.setdefault("gem_exponent", np.array(encoder.gem_exponent, np.float32))
    check_names(expected.keys() - state.keys(), state.keys() - expected.keys())
    state = {name: state[name] for name in expected}
    for name, value in state.items():  # A cast would drop imaginary parts and integers' scales.
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise UserError(f"{name} holds {value.dtype}, but weights are floating-point numbers")
        state[name] = np.asarray(value, np.float32)
    if interpolate and isinstance(encoder, VisionTransformer) and "pos_embed" in state:
        if (positions := state["pos_embed"]).ndim == 3:
            state["pos_embed"] = np.asarray(encoder.resized(positions))
    for name, shape in expected.items():
        value = state[name]
        if value.ndim == len(shape) == 4 and {value.shape[1], shape[1]} == {1, 3}:
            # As timm, for other channels: the kernel's are summed, or the only one is repeated.
            summed = value.sum(axis=1, keepdims=True) / shape[1]
            state[name] = np.repeat(summed, shape[1], axis=1)
        if state[name].shape != shape:
            theirs, ours = ("×".join(map(str, x)) for x in (state[name].shape, shape))
            raise UserError(f"{name} is {theirs}, not {ours}: the weights belong to another model")
    arrays = {path: state[name_in_timm(encoder, path)] for path in flatten_dict(shapes)}
    return unflatten_dict({path: from_timm(encoder, path, x) for path, x in arrays.items()})


def timm_state_dict(params: PyTree, encoder: Encoder) -> StateDict:
    """Converts an encoder's parameters to arrays under timm's names; inverts `convert_timm`."""
    return {
        name_in_timm(encoder, path): contiguous(to_timm(encoder, path, np.asarray(x)))
        for path, x in flatten_dict(params).items()
    }


def timm_classifier(head: PyTree, encoder: Encoder) -> StateDict:
    """Converts a Dense head to timm's classifiers: one, or two copies for a distilled model."""
    # timm averages both copies' outputs, which is the head's output for the mean of both tokens.
    state = {}
    for name in encoder.classifiers:
        state[f"{name}.weight"] = contiguous(np.asarray(head["kernel"]).T)
        state[f"{name}.bias"] = contiguous(head["bias"])
    return state


def save_timm(path: pathlib.Path, params: PyTree, model: Embedder) -> None:
    """Writes a model as .safetensors under timm's names; a dense head becomes the classifier."""
    # An encoder of features has no parameters.
    state = timm_state_dict(params.get("encoder", {}), model.encoder)
    if model.head_kind == "dense":  # timm has no other heads.
        state |= timm_classifier(params["head"], model.encoder)
    with writing(path), replacing(path) as temporary:
        write_safetensors(temporary, state)


def load_model(state_dict: Mapping[str, np.ndarray], model: Embedder, channels: int = 3) -> PyTree:
    """Converts the arrays of a file by `save_timm` back to parameters, bit for bit."""
    params = {}
    if model.encoder.takes_pixels:
        params["encoder"] = convert_timm(state_dict, model.encoder, channels, interpolate=False)
    if model.head_kind == "dense":
        name = model.encoder.classifiers[0]
        weight, bias = (state_dict.get(f"{name}.{x}", np.zeros(0)) for x in ("weight", "bias"))
        params["head"] = check_head({"kernel": weight.T, "bias": bias}, model)
    return params


def released_head(state_dict: Mapping[str, np.ndarray], model: Embedder) -> PyTree | None:
    """Reads the model's head from a file of a paper's authors; None if the file holds no head."""
    for kind in HEADS:
        if (weight := state_dict.get(f"{kind}.weight")) is None:
            continue
        if (model.head_kind, model.head_dim) != (kind, len(weight)):
            fields = f"--config.model.head={kind} --config.model.head_dim={len(weight)}"
            raise UserError(f"their head is of another kind or size; set {fields}")
        # Heads of Hyp-ViT's first release have no bias.
        bias = state_dict.get(f"{kind}.bias", np.zeros(len(weight), np.float32))
        return check_head({"kernel": weight.T, "bias": bias}, model)
    return None


def check_head(head: Mapping[str, np.ndarray], model: Embedder) -> PyTree:
    """Checks that a head's parameters fit the model; returns them contiguous and in float32."""
    shapes: dict[str, tuple[int, ...]] = {"kernel": (model.encoder.dim, model.head_dim)}
    if model.head_kind != "linear":
        shapes["bias"] = (model.head_dim,)
    if {name: value.shape for name, value in head.items()} != shapes or not all(
        jnp.issubdtype(value.dtype, jnp.floating) for value in head.values()
    ):
        raise UserError("the head has other parameters: it belongs to another model")
    return {name: contiguous(np.asarray(value, np.float32)) for name, value in head.items()}


def towers(state: Mapping[str, np.ndarray], shapes: PyTree) -> PyTree:
    """Parameters of the towers beside that of images, from arrays by path; `shapes` has all."""
    expected = flatten_dict({x: tree for x, tree in shapes.items() if x.startswith("towers_")})
    arrays = {tuple(name.split(".")): value for name, value in state.items()}
    if {x: np.shape(y) for x, y in arrays.items()} != {x: y.shape for x, y in expected.items()}:
        raise UserError("the towers have other parameters: they belong to another model")
    return unflatten_dict({path: np.asarray(x, np.float32) for path, x in arrays.items()})


def timm_constructor(params: PyTree, model: Embedder) -> str:
    """Line of Python code that builds the timm model for weights by `save_timm`."""
    name, settings = timm_model(params, model)
    arguments = ", ".join(f"{key}={value!r}" for key, value in settings.items()).replace("'", '"')
    if name is None:
        return f"timm.models.VisionTransformer({arguments})"
    return f'timm.create_model("{name}", {arguments})'


def timm_config(params: PyTree, model: Embedder, pixels: Pixels) -> dict[str, Any]:
    """Content of the config.json from which timm builds a model of a folder or a repository."""
    name, settings = timm_model(params, model)
    num_classes = settings.pop("num_classes")
    side = model.encoder.image_size
    view, crop_mode, crop_pct = pixels.view, "center", side / pixels.view.resize
    if math.floor(side / crop_pct) != view.resize:  # timm rounds down.
        crop_pct = math.nextafter(crop_pct, 0)
    if view.test in ("letterbox", "squash"):  # timm pads with the mean colour, not with black.
        crop_mode, crop_pct = {"letterbox": "border", "squash": "squash"}[view.test], 1.0
    return {
        "architecture": name or _ANY_TRANSFORMER,
        "num_classes": num_classes,
        "num_features": model.encoder.dim,
        "model_args": settings,
        "pretrained_cfg": {
            "num_classes": num_classes,
            "input_size": [len(pixels.mean), side, side],
            "crop_pct": crop_pct,
            "crop_mode": crop_mode,
            "interpolation": "bicubic",
            "mean": list(pixels.mean),
            "std": list(pixels.std),
            "first_conv": None,  # So that timm converts no channels.
            "classifier": None,
        },
    }


def timm_model(params: PyTree, model: Embedder) -> tuple[str | None, dict[str, Any]]:
    """Name of a model in timm, None if it has none, and settings that differ from timm's."""
    encoder = model.encoder
    if not is_in_timm(encoder):
        problem = "timm builds no encoder with these norms or this activation by name"
        raise UserError(f"{problem}; compute points by hypjax, or convert another model")
    name = timm_name(encoder)
    settings = {"num_classes": model.head_dim if model.head_kind == "dense" else 0}
    stem = {key: value for key, value in params["encoder"].items() if key in encoder.layers[0]}
    shapes = _timm_shapes(stem, encoder).values()
    channels = next(shape[1] for shape in shapes if len(shape) == 4)  # Of the first convolution.
    if channels != 3:
        settings["in_chans"] = channels
    if name is None:
        settings |= dict(img_size=encoder.image_size, patch_size=encoder.patch_size)
        settings |= dict(embed_dim=encoder.width, depth=encoder.depth, num_heads=encoder.num_heads)
    elif hasattr(encoder, "patch_size") and create_encoder(name).image_size != encoder.image_size:
        settings["img_size"] = encoder.image_size
    if (pool_first := pool_first_field(encoder)) is not None:
        settings["use_fc_norm" if encoder.blocks.rotary else "fc_norm"] = pool_first
    return name, settings | (_timm_pooling(encoder) or {})


def _timm_pooling(encoder: Encoder) -> dict[str, str] | None:
    """Settings with which timm pools tokens like the encoder; None if timm cannot."""
    name = timm_name(encoder)
    default = create_encoder(name).pooling if name else "cls"
    if encoder.pooling == default:
        return {}
    # For "cls", timm's EVA-02 has other parameters. ConvNets, without `pool_first`, have no token.
    change = default, encoder.pooling, encoder.pool_first
    names = {("avg", "cls", False): "token", ("cls", "avg", True): "avg"}
    return next(({"global_pool": name} for key, name in names.items() if key == change), None)


def pools_as_timm(encoder: Encoder) -> bool:
    """Whether timm's model of this architecture can pool tokens like the encoder."""
    return _timm_pooling(encoder) is not None


def _timm_shapes(params: PyTree, encoder: Encoder) -> dict[str, tuple[int, ...]]:
    """Shapes in timm's layout, by timm's names, of parameters or `jax.ShapeDtypeStruct`s."""
    arrays = {path: np.broadcast_to(0, leaf.shape) for path, leaf in flatten_dict(params).items()}
    return {
        name_in_timm(encoder, path): to_timm(encoder, path, array).shape
        for path, array in arrays.items()
    }
