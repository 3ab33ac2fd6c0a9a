"""Weights under timm's names, from a file or the Hugging Face hub, and back.

A table says which tensor of timm's is which parameter here, and how one becomes the other. Nothing
that could execute code is ever loaded.
"""

import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float, PyTree

from hypjax.errors import UserError
from hypjax.models.architectures import (
    ARCHITECTURES,
    Encoder,
    create_encoder,
    encoder_shapes,
    same_architecture,
)
from hypjax.models.embedder import Embedder
from hypjax.models.resnet import ResNet
from hypjax.models.weight_files import StateDict, read_state_dict

# Of what timm's models hold: classifiers, and how often a BatchNorm was updated.
_LEFT_OUT = re.compile(r"(head|head_dist|fc)\.(weight|bias)|.*\.num_batches_tracked")
_SHOWN = 3  # Names in a message.


class _Tensor(NamedTuple):
    """One tensor in both worlds.

    Attributes:
        timm: Its name there.
        path: The parameter's path here.
        here: From timm's array to ours.
        there: From ours to timm's.
    """

    timm: str
    path: tuple[str, ...]
    here: Callable[[np.ndarray], np.ndarray] = lambda x: x
    there: Callable[[np.ndarray], np.ndarray] = lambda x: x


def load_timm(name_or_path: str, encoder: Encoder, channels: int = 3) -> PyTree:
    """An encoder's parameters, from the hub or a file.

    Args:
        name_or_path: timm's name of weights on the hub, such as `vit_small_patch16_224.dino`, or a
            file: `.safetensors`, `.npz` (the original JAX checkpoints of ViT), or `.pth`, `.pt` and
            `.bin`, which need torch and may hold tensors only.
        encoder: What they are for.
        channels: Of the images.

    Returns:
        Parameters as NumPy arrays, float32.

    Raises:
        UserError: There are no such weights, or they are damaged or another encoder's.
    """
    try:
        return convert_timm(read_state_dict(name_or_path), encoder, channels)
    except UserError as error:
        raise UserError(f"weights {name_or_path}: {error}") from error


def convert_timm(
    state_dict: Mapping[str, np.ndarray], encoder: Encoder, channels: int = 3
) -> PyTree:
    """An encoder's parameters from a dict of arrays under timm's names.

    Classifiers are left out. Position embeddings of another image size are interpolated as timm
    does: bicubic with antialiasing.

    Raises:
        UserError: A tensor is missing, unknown or of another shape; the message names it.
    """
    table = list(_table(encoder))
    expected = _timm_shapes(encoder, channels, table)
    state = {name: value for name, value in state_dict.items() if not _LEFT_OUT.fullmatch(name)}
    _refuse("lack", expected.keys() - state.keys())
    _refuse("hold, which the encoder does not have,", state.keys() - expected.keys())
    state = {name: np.asarray(value, np.float32) for name, value in state.items()}
    if "pos_embed" in state:
        prefix = encoder.num_prefix_tokens
        state["pos_embed"] = _resampled(state["pos_embed"], expected["pos_embed"][1], prefix)
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise UserError(
                f"{name} has the shape {_sides(state[name].shape)}, but the encoder's has "
                f"{_sides(shape)}: the model is another one"
            )
    return unflatten_dict({tensor.path: tensor.here(state[tensor.timm]) for tensor in table})


def timm_state_dict(params: PyTree, encoder: Encoder) -> StateDict:
    """What `convert_timm` reads: an encoder's parameters under timm's names."""
    flat = flatten_dict(jax.tree.map(np.asarray, params))
    return {
        tensor.timm: np.ascontiguousarray(tensor.there(flat[tensor.path]))
        for tensor in _table(encoder)
    }


def timm_classifier(head: PyTree, encoder: Encoder) -> StateDict:
    """A Dense layer on an encoder, as timm's classifier.

    A distilled model has two, whose mean is the map of the tokens' mean.
    """
    weight, bias = np.ascontiguousarray(np.asarray(head["kernel"]).T), np.asarray(head["bias"])
    names = ["fc"] if isinstance(encoder, ResNet) else ["head", "head_dist"]
    names = names[: max(1, encoder.num_prefix_tokens)]
    return {
        f"{name}.{part}": value.copy()
        for name in names
        for part, value in (("weight", weight), ("bias", bias))
    }


def save_timm(path: pathlib.Path, params: PyTree, model: Embedder) -> None:
    """Writes a model under timm's names, its head as classifier, as .safetensors.

    Raises:
        UserError: The file cannot be written.
    """
    from safetensors.numpy import save

    state = timm_state_dict(params["encoder"], model.encoder)
    state |= timm_classifier(params["head"], model.encoder)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(save(state))
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {path} ({error.strerror})") from error


def timm_constructor(params: PyTree, model: Embedder) -> str:
    """The line of PyTorch that builds what `save_timm` writes weights for.

    timm's model pools by its own rule, see `pools_as_timm`.
    """
    encoder, settings = model.encoder, {"num_classes": model.head_dim}
    channels = _channels(params["encoder"], encoder)
    if channels != 3:
        settings["in_chans"] = channels
    name = _timm_name(encoder)
    if name is None:
        settings |= dict(img_size=encoder.image_size, patch_size=encoder.patch_size)
        settings |= dict(embed_dim=encoder.width, depth=encoder.depth, num_heads=encoder.num_heads)
        return f"timm.models.VisionTransformer({_arguments(settings)})"
    if create_encoder(name).image_size != encoder.image_size and not isinstance(encoder, ResNet):
        settings["img_size"] = encoder.image_size
    return f'timm.create_model("{name}", {_arguments(settings)})'


def pools_as_timm(encoder: Encoder) -> bool:
    """Whether timm's model of the encoder pools tokens as the encoder does."""
    if isinstance(encoder, ResNet):
        return encoder.pooling == "avg"
    return encoder.pooling == ("cls_dist_mean" if encoder.distilled else "cls")


def _timm_name(encoder: Encoder) -> str | None:
    same = (name for name in ARCHITECTURES if same_architecture(create_encoder(name), encoder))
    return next(same, None)


def _channels(params: PyTree, encoder: Encoder) -> int:
    if isinstance(encoder, ResNet):
        return params["stem_conv"]["kernel"].shape[2]
    return len(params["patch_embed"]["kernel"]) // encoder.patch_size**2


def _arguments(settings: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _table(encoder: Encoder) -> Iterator[_Tensor]:
    """All tensors of an encoder."""
    return _resnet(encoder) if isinstance(encoder, ResNet) else _transformer(encoder)


def _transformer(encoder: Encoder) -> Iterator[_Tensor]:
    tokens = ("cls_token", "dist_token")[: encoder.num_prefix_tokens]
    for name in (*tokens, "pos_embed"):
        yield _Tensor(name, (name,))
    side = encoder.patch_size
    yield _Tensor(
        "patch_embed.proj.weight",
        ("patch_embed", "kernel"),
        lambda x: rearrange(x, "o c p q -> (p q c) o"),
        lambda x: rearrange(x, "(p q c) o -> o c p q", p=side, q=side),
    )
    yield _Tensor("patch_embed.proj.bias", ("patch_embed", "bias"))
    for i in range(encoder.depth):
        block = f"block_{i}"
        yield from _norm(f"blocks.{i}.norm1", block, "norm_1")
        yield from _dense(f"blocks.{i}.attn.qkv", block, "attention", "qkv")
        yield from _dense(f"blocks.{i}.attn.proj", block, "attention", "proj")
        yield from _norm(f"blocks.{i}.norm2", block, "norm_2")
        yield from _dense(f"blocks.{i}.mlp.fc1", block, "fc_1")
        yield from _dense(f"blocks.{i}.mlp.fc2", block, "fc_2")
    yield from _norm("norm", "norm")


def _resnet(encoder: ResNet) -> Iterator[_Tensor]:
    yield _conv("conv1", "stem_conv")
    yield from _batch_norm("bn1", "stem_norm")
    for stage, blocks in enumerate(encoder.stage_sizes):
        for block in range(blocks):
            there, here = f"layer{stage + 1}.{block}", f"stage_{stage}_block_{block}"
            for i in (1, 2, 3):
                yield _conv(f"{there}.conv{i}", here, f"conv_{i}")
                yield from _batch_norm(f"{there}.bn{i}", here, f"norm_{i}")
            if block == 0:
                yield _conv(f"{there}.downsample.0", here, "shortcut_conv")
                yield from _batch_norm(f"{there}.downsample.1", here, "shortcut_norm")


def _dense(timm: str, *path: str) -> Iterator[_Tensor]:
    yield _Tensor(f"{timm}.weight", (*path, "kernel"), np.transpose, np.transpose)
    yield _Tensor(f"{timm}.bias", (*path, "bias"))


def _norm(timm: str, *path: str) -> Iterator[_Tensor]:
    yield _Tensor(f"{timm}.weight", (*path, "scale"))
    yield _Tensor(f"{timm}.bias", (*path, "bias"))


def _batch_norm(timm: str, *path: str) -> Iterator[_Tensor]:
    yield from _norm(timm, *path)
    yield _Tensor(f"{timm}.running_mean", (*path, "statistics", "mean"))
    yield _Tensor(f"{timm}.running_var", (*path, "statistics", "variance"))


def _conv(timm: str, *path: str) -> _Tensor:
    return _Tensor(
        f"{timm}.weight",
        (*path, "kernel"),
        lambda x: rearrange(x, "o i h w -> h w i o"),
        lambda x: rearrange(x, "h w i o -> o i h w"),
    )


def _timm_shapes(
    encoder: Encoder, channels: int, table: list[_Tensor]
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor under timm's name."""
    shapes = flatten_dict(encoder_shapes(encoder, channels))
    return {
        tensor.timm: tensor.there(np.broadcast_to(np.float32(0), shapes[tensor.path].shape)).shape
        for tensor in table
    }


def _resampled(
    positions: Float[np.ndarray, "1 tokens dim"], tokens: int, prefix: int
) -> Float[np.ndarray, "1 tokens2 dim"]:
    """Position embeddings for another number of patches, in a square; others stay as they are."""
    if positions.ndim != 3:
        return positions  # To be refused for its shape.
    old, new = (math.isqrt(max(n - prefix, 0)) for n in (positions.shape[1], tokens))
    if old in (0, new) or old**2 + prefix != positions.shape[1]:
        return positions
    grid = rearrange(positions[0, prefix:], "(h w) d -> h w d", h=old)
    grid = jax.image.resize(jnp.asarray(grid), (new, new, grid.shape[-1]), "cubic", antialias=True)
    grid = rearrange(np.asarray(grid), "h w d -> 1 (h w) d")
    return np.concatenate([positions[:, :prefix], grid], axis=1)


def _refuse(verb: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names, key=_natural)[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UserError(f"they {verb} {shown}{more}: the model is another one")


def _natural(name: str) -> list[str | int]:
    """Orders block 2 before block 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _sides(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
