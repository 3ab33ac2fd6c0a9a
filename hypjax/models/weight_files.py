"""Reading weights: from the hub, or from a file of one of three formats."""

import difflib
import pathlib
import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
from einops import EinopsError, rearrange

from hypjax.errors import UserError
from hypjax.models.architectures import ARCHITECTURES

StateDict = dict[str, np.ndarray]  # Arrays under timm's names.

_WRAPPERS = ("model", "state_dict", "model_state")  # Under which training scripts save a model.
_FILE = "model.safetensors"
_TORCH = (2, 6)  # Before, weights_only could be got round (CVE-2025-32434).


def read_state_dict(name_or_path: str) -> StateDict:
    """Arrays under timm's names.

    Args:
        name_or_path: See `hypjax.models.pretrained.load_timm`.

    Raises:
        UserError: There are none, or they are damaged.
    """
    path = pathlib.Path(name_or_path).expanduser()
    readers = {
        ".safetensors": _read_safetensors,
        ".npz": _read_npz,
        ".pth": _read_torch,
        ".pt": _read_torch,
        ".bin": _read_torch,
    }
    if path.suffix not in readers:
        return _read_safetensors(_downloaded(name_or_path))
    if not path.is_file():
        raise UserError("there is no such file")
    return readers[path.suffix](path)


def _downloaded(name: str) -> pathlib.Path:
    """The file of weights on the hub, from the cache if it is there (HF_HOME)."""
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # It would tell of each of its attempts.
    repository = name.removeprefix("hf-hub:")
    if "/" in name and not name.startswith(("timm/", "hf-hub:")):
        raise UserError(
            "there is no such file or folder; models of others than timm on the hub are written "
            "hf-hub:OWNER/NAME"
        )
    if "/" not in repository:
        architecture = repository.split(".")[0]
        if architecture not in ARCHITECTURES:
            near = difflib.get_close_matches(architecture, ARCHITECTURES, n=3, cutoff=0)
            raise UserError(
                f"no file, and no name of timm's either; near ones begin with {', '.join(near)}"
            )
        repository = f"timm/{repository}"
    try:
        return pathlib.Path(huggingface_hub.hf_hub_download(repository, _FILE))
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(repository, constants.HF_HUB_CACHE) from error
        raise UserError(f"the hub has no {_FILE} in {repository}") from error
    except errors.HFValidationError as error:
        raise UserError("neither a file nor a name on the hub") from error
    except (OSError, errors.HfHubHTTPError) as error:
        raise _unreachable(repository, constants.HF_HUB_CACHE) from error


def _unreachable(repository: str, cache: str) -> UserError:
    return UserError(
        f"not in {cache}, and the hub cannot be reached; download "
        f"https://huggingface.co/{repository}/resolve/main/{_FILE} and give its path instead"
    )


def _read_safetensors(path: pathlib.Path) -> StateDict:
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        return {name: np.asarray(value) for name, value in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged, or no .safetensors ({error})") from error


def _read_torch(path: pathlib.Path) -> StateDict:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"reading {path.suffix} needs torch (pip install torch); .safetensors does not"
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _TORCH:
        raise UserError(
            f"torch {torch.__version__} can be made to run code by a {path.suffix} file; "
            f"install {_TORCH[0]}.{_TORCH[1]} or later"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is damaged, or holds more than tensors, which could be code and is not loaded"
        ) from error
    except Exception as error:  # The reader of old files fails in many ways.
        raise UserError(f"{path} is damaged, or no checkpoint of torch") from error
    for wrapper in _WRAPPERS:
        state = state.get(wrapper, state) if isinstance(state, Mapping) else state
    tensors = isinstance(state, Mapping) and all(
        isinstance(name, str) and torch.is_tensor(x) for name, x in state.items()
    )
    if not tensors:
        raise UserError(f"{path} holds no dict of tensors")
    return {name: value.detach().float().numpy() for name, value in state.items()}


def _read_npz(path: pathlib.Path) -> StateDict:
    """An original checkpoint of ViT (Dosovitskiy et al., ICLR 2021; Steiner et al., TMLR 2022)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged, or holds more than arrays") from error
    arrays = {name.removeprefix("opt/target/"): value for name, value in arrays.items()}
    state = {}
    for name, value in arrays.items():
        for pattern, replacement, change in _ORIGINAL:
            if re.fullmatch(pattern, name):
                try:
                    state[re.sub(pattern, replacement, name)] = change(value)
                except EinopsError as error:
                    raise UserError(f"{name} has the shape {value.shape}, not its own") from error
                break
        else:
            if not name.startswith(("head/", "pre_logits/")):
                state[name] = value  # To be named as unknown.
    return _with_fused_attention(state)


_BLOCK = r"Transformer/encoderblock_(\d+)/"
_DENSE = [("kernel", "weight", np.transpose), ("bias", "bias", np.asarray)]
_NORM = [("scale", "weight", np.asarray), ("bias", "bias", np.asarray)]
# Pattern of the original name, timm's name, and what happens to the array. Queries, keys and values
# are three tensors there, and fused later.
_ORIGINAL = [
    ("cls", "cls_token", np.asarray),
    ("Transformer/posembed_input/pos_embedding", "pos_embed", np.asarray),
    (
        "embedding/kernel",
        "patch_embed.proj.weight",
        lambda x: rearrange(x, "h w i o -> o i h w"),
    ),
    ("embedding/bias", "patch_embed.proj.bias", np.asarray),
    *((f"Transformer/encoder_norm/{a}", f"norm.{b}", f) for a, b, f in _NORM),
    *((f"{_BLOCK}LayerNorm_0/{a}", rf"blocks.\1.norm1.{b}", f) for a, b, f in _NORM),
    *((f"{_BLOCK}LayerNorm_2/{a}", rf"blocks.\1.norm2.{b}", f) for a, b, f in _NORM),
    *((f"{_BLOCK}MlpBlock_3/Dense_0/{a}", rf"blocks.\1.mlp.fc1.{b}", f) for a, b, f in _DENSE),
    *((f"{_BLOCK}MlpBlock_3/Dense_1/{a}", rf"blocks.\1.mlp.fc2.{b}", f) for a, b, f in _DENSE),
    (
        f"{_BLOCK}MultiHeadDotProductAttention_1/out/kernel",
        r"blocks.\1.attn.proj.weight",
        lambda x: rearrange(x, "h d o -> o (h d)"),
    ),
    (
        f"{_BLOCK}MultiHeadDotProductAttention_1/out/bias",
        r"blocks.\1.attn.proj.bias",
        np.asarray,
    ),
    (
        f"{_BLOCK}MultiHeadDotProductAttention_1/(query|key|value)/kernel",
        r"blocks.\1.attn.\2.weight",
        lambda x: rearrange(x, "i h d -> (h d) i"),
    ),
    (
        f"{_BLOCK}MultiHeadDotProductAttention_1/(query|key|value)/bias",
        r"blocks.\1.attn.\2.bias",
        np.ravel,
    ),
]


def _with_fused_attention(state: StateDict) -> StateDict:
    for name in [name for name in state if ".attn.query." in name]:
        parts = [name.replace("query", part) for part in ("query", "key", "value")]
        if all(part in state for part in parts):
            fused = np.concatenate([state.pop(part) for part in parts])
            state[name.replace("query", "qkv")] = fused
    return state
