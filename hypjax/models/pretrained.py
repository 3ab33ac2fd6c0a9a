"""Conversion of encoder weights from timm, in files or on the Hugging Face hub, and back to timm.

A table maps timm's tensors to parameters, and says how to convert each. Nothing that could execute
code is ever loaded.
"""

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError, writing
from hypjax.models.architectures import create_encoder, encoder_shapes, timm_name
from hypjax.models.embedder import Embedder
from hypjax.models.encoder import Encoder, Path, renamed
from hypjax.models.vit import VisionTransformer
from hypjax.models.weight_files import PROXIES, StateDict, read_state_dict
from hypjax.system.files import replacing

HEADS = ("dense", "norm_dense")  # Kinds of heads that have parameters.
# Tensors without a counterpart: classifiers, update counts of BatchNorm, mask tokens; and in the
# authors' files, heads, proxies, and the second names of a ResNet's layers.
_IGNORED = re.compile(
    r"(head|head_dist|fc|head\.fc|classifier)\.(weight|bias)|.*\.num_batches_tracked|mask_token"
    rf"|({'|'.join(HEADS)})\.(weight|bias)|{PROXIES}|layer_blocks\..*"
)
_ANY_TRANSFORMER = "vit_base_patch16_224"  # timm builds any size of ViT from it.
_MAX_LISTED = 3  # Names of tensors in a message.
_LEAVES = dict(kernel="weight", scale="weight", mean="running_mean", variance="running_var")


def name_in_timm(encoder: Encoder, path: Path) -> str:
    """Name of a parameter in timm; its path for a user's module: 'encoder/Dense_0/kernel'."""
    if encoder.names is None:
        return "/".join(("encoder", *path))
    *modules, leaf = (part for part in path if part != "statistics")
    return renamed(".".join((*modules, _LEAVES.get(leaf, leaf))), encoder.names)


def to_timm(encoder: Encoder, path: Path, array: np.ndarray) -> np.ndarray:
    """Lays out a parameter as in timm.

    Kernels are [inputs, outputs] and [h, w, inputs, outputs] here, [outputs, inputs] and [outputs,
    inputs, h, w] there. A convolution of patches is a dense layer on their values here.
    """
    if encoder.names is None or path[-1] != "kernel":
        return array
    if side := encoder.patches.get(path[-2]):
        return rearrange(array, "(p q i) o -> o i p q", p=side, q=side)
    return array.T if array.ndim == 2 else rearrange(array, "h w i o -> o i h w")


def from_timm(encoder: Encoder, path: Path, array: np.ndarray) -> np.ndarray:
    """Inverts `to_timm`."""
    if encoder.names is None or path[-1] != "kernel":
        return array
    if path[-2] in encoder.patches:
        return rearrange(array, "o i p q -> (p q i) o")
    return array.T if array.ndim == 2 else rearrange(array, "o i h w -> h w i o")


def load_timm(name_or_path: str, encoder: Encoder, channels: int = 3) -> PyTree:
    """Loads an encoder's parameters from the hub or a file, as float32 NumPy arrays.

    Weights have timm's name on the hub, such as `vit_small_patch16_224.dino`, or the name of
    another model, such as `hf-hub:facebook/dinov2-small`, whose tensors may have Transformers'
    names; or they are a file: `.safetensors`, or `.pth`, `.pt` and `.bin`, which need torch and may
    contain only tensors. Weights that are absent, damaged or of another model are a `UserError`.
    """
    try:
        return convert_timm(read_state_dict(name_or_path), encoder, channels)
    except UserError as error:
        raise UserError(f"weights {name_or_path}: {error}") from error


def convert_timm(
    state_dict: Mapping[str, np.ndarray],
    encoder: Encoder,
    channels: int = 3,
    interpolate: bool = True,
) -> PyTree:
    """Converts arrays under timm's names to an encoder's parameters, float32 NumPy arrays.

    Classifiers are ignored. Unless `interpolate` is false, position embeddings for another image
    size are interpolated as in timm: bicubic with antialiasing. A `UserError` names a tensor that
    is missing, unknown or of another shape.
    """
    shapes = encoder_shapes(encoder, channels)
    expected = _timm_shapes(shapes, encoder)
    state = {name: value for name, value in state_dict.items() if not _IGNORED.fullmatch(name)}
    if encoder.learn_gem:  # No weights of timm have it.
        state.setdefault("gem_exponent", np.float32(encoder.gem_exponent))
    _raise_on_names("they lack", expected.keys() - state.keys())
    _raise_on_names("unlike the encoder, they contain", state.keys() - expected.keys())
    for name, value in state.items():  # A cast would drop imaginary parts, and scales of integers.
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise UserError(f"{name} holds {value.dtype}, but weights are floating-point numbers")
        state[name] = np.asarray(value, np.float32)
    positions = state.get("pos_embed")
    if interpolate and isinstance(encoder, VisionTransformer) and np.ndim(positions) == 3:
        state["pos_embed"] = np.asarray(encoder.resized(positions))
    for name, shape in expected.items():
        if state[name].shape != shape:
            theirs, ours = ("×".join(map(str, x)) for x in (state[name].shape, shape))
            raise UserError(f"{name} is {theirs}, not {ours}: the weights belong to another model")
    named = {path: state[name_in_timm(encoder, path)] for path in flatten_dict(shapes)}
    return unflatten_dict({k: from_timm(encoder, k, x) for k, x in named.items()})


def timm_state_dict(params: PyTree, encoder: Encoder) -> StateDict:
    """Converts an encoder's parameters to arrays under timm's names: inverse of `convert_timm`."""
    return {
        name_in_timm(encoder, path): np.ascontiguousarray(to_timm(encoder, path, np.asarray(x)))
        for path, x in flatten_dict(params).items()
    }


def timm_classifier(head: PyTree, encoder: Encoder) -> StateDict:
    """Converts a Dense layer on an encoder to timm's classifier.

    timm averages the two classifiers of a distilled model, one per token. Two copies of the layer
    therefore compute what the layer computes from the mean of the tokens.
    """
    kernel, bias = (np.asarray(head[part]) for part in ("kernel", "bias"))
    parts = {"weight": np.ascontiguousarray(kernel.T), "bias": bias}
    return {f"{n}.{part}": x.copy() for n in encoder.classifiers for part, x in parts.items()}


def save_timm(path: pathlib.Path, params: PyTree, model: Embedder) -> None:
    """Writes a model as .safetensors under timm's names; a dense head becomes the classifier."""
    from safetensors.numpy import save

    state = timm_state_dict(params["encoder"], model.encoder)
    if model.head_kind == "dense":  # Other heads have no counterpart.
        state |= timm_classifier(params["head"], model.encoder)
    with writing(path), replacing(path) as temporary:
        temporary.write_bytes(save(state))


def load_model(state_dict: Mapping[str, np.ndarray], model: Embedder, channels: int = 3) -> PyTree:
    """Converts the arrays of a file that `save_timm` wrote: the inverse, bit for bit."""
    params = {"encoder": convert_timm(state_dict, model.encoder, channels, interpolate=False)}
    if model.head_kind == "dense":
        name = model.encoder.classifiers[0]
        weight, bias = (state_dict.get(f"{name}.{x}", np.zeros(0)) for x in ("weight", "bias"))
        params["head"] = check_head({"kernel": weight.T, "bias": bias}, model)
    return params


def released_head(state_dict: Mapping[str, np.ndarray], model: Embedder) -> PyTree | None:
    """The head in a file of the papers' authors; None if it holds none.

    A head of another kind than the model's, or of another size, is a `UserError`. In the first
    release of Hyp-ViT it has no bias.
    """
    for kind in HEADS:
        if (weight := state_dict.get(f"{kind}.weight")) is None:
            continue
        if (model.head_kind, model.head_dim) != (kind, len(weight)):
            fields = f"--config.model.head={kind} --config.model.head_dim={len(weight)}"
            raise UserError(f"their head needs {fields}")
        bias = state_dict.get(f"{kind}.bias", np.zeros(len(weight), np.float32))
        return check_head({"kernel": weight.T, "bias": bias}, model)
    return None


def check_head(head: Mapping[str, np.ndarray], model: Embedder) -> PyTree:
    """Returns a head's parameters, contiguous and float32, if they fit the model's head."""
    shapes = {"kernel": (model.encoder.dim, model.head_dim), "bias": (model.head_dim,)}
    if {name: value.shape for name, value in head.items()} != shapes or not all(
        jnp.issubdtype(value.dtype, jnp.floating) for value in head.values()
    ):
        raise UserError("the head has other parameters: it belongs to another model")
    return {name: np.ascontiguousarray(value, np.float32) for name, value in head.items()}


def timm_constructor(params: PyTree, model: Embedder) -> str:
    """A line of Python that builds the timm model for weights written by `save_timm`."""
    name, settings = timm_model(params, model)
    arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    if name is None:
        return f"timm.models.VisionTransformer({arguments})"
    return f'timm.create_model("{name}", {arguments})'


def timm_config(params: PyTree, model: Embedder, data: ConfigDict) -> dict[str, Any]:
    """The config.json with which timm builds a model from a folder or a repository."""
    name, settings = timm_model(params, model)
    classes, side = settings.pop("num_classes"), model.encoder.image_size
    squashed, share = data.test_view == "squash", side / data.resize
    if math.floor(side / share) != data.resize:  # timm rounds down.
        share = math.nextafter(share, 0)
    return {
        "architecture": name or _ANY_TRANSFORMER,
        "num_classes": classes,
        "num_features": model.encoder.dim,
        "model_args": settings,
        "pretrained_cfg": {
            "num_classes": classes,
            "input_size": [len(data.mean), side, side],
            "crop_pct": 1.0 if squashed else share,
            "crop_mode": "squash" if squashed else "center",
            "interpolation": "bicubic",
            "mean": list(data.mean),
            "std": list(data.std),
            "first_conv": None,  # So that timm converts no channels.
            "classifier": None,
        },
    }


def timm_model(params: PyTree, model: Embedder) -> tuple[str | None, dict[str, Any]]:
    """Name of a model in timm, None if it has none, and the settings that differ from its own."""
    encoder, name = model.encoder, timm_name(model.encoder)
    settings = {"num_classes": model.head_dim if model.head_kind == "dense" else 0}
    stem = {k: v for k, v in params["encoder"].items() if k in encoder.layers[0]}
    channels = next(x[1] for x in _timm_shapes(stem, encoder).values() if len(x) == 4)
    if channels != 3:
        settings["in_chans"] = channels
    if name is None:
        settings |= dict(img_size=encoder.image_size, patch_size=encoder.patch_size)
        settings |= dict(embed_dim=encoder.width, depth=encoder.depth, num_heads=encoder.num_heads)
    elif hasattr(encoder, "patch_size") and create_encoder(name).image_size != encoder.image_size:
        settings["img_size"] = encoder.image_size
    return name, settings | (_timm_pooling(encoder) or {})


def _timm_pooling(encoder: Encoder) -> dict[str, str] | None:
    """Settings with which timm pools tokens as the encoder does, or None if it cannot."""
    name = timm_name(encoder)
    default = create_encoder(name).pooling if name else "cls"
    if encoder.pooling == default:
        return {}
    # With the class token, timm's EVA-02 has other parameters.
    by_class_token = default == "avg" and not getattr(encoder, "pool_first", True)
    return {"global_pool": "token"} if encoder.pooling == "cls" and by_class_token else None


def pools_as_timm(encoder: Encoder) -> bool:
    """Whether timm's model of this architecture can pool tokens as the encoder does."""
    return _timm_pooling(encoder) is not None


def _timm_shapes(params: PyTree, encoder: Encoder) -> dict[str, tuple[int, ...]]:
    """Shapes in timm of parameters, which may be their `jax.ShapeDtypeStruct`."""
    arrays = {path: np.broadcast_to(0, leaf.shape) for path, leaf in flatten_dict(params).items()}
    return {
        name_in_timm(encoder, path): to_timm(encoder, path, array).shape
        for path, array in arrays.items()
    }


def _raise_on_names(problem: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:_MAX_LISTED])
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        raise UserError(f"{problem} {listed}{more}: the weights belong to another model")
