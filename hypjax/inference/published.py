"""Models to publish: a folder that hypjax and timm load, and that the Hugging Face hub holds."""

import os
import pathlib
import shutil

import jax
import numpy as np
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from hypjax.config import for_files, identity
from hypjax.errors import UserError
from hypjax.inference.weights import restore_best
from hypjax.models.pretrained import pools_as_timm, save_timm, timm_config
from hypjax.reports.model_card import model_card
from hypjax.runs.cloud_read import reading
from hypjax.runs.files import CONFIG, HEAD, PROJECTIONS, PUBLISHED, RESULTS, WEIGHTS
from hypjax.runs.workdir import read_results, saved_config, saved_fingerprint
from hypjax.system import console, hub
from hypjax.system.files import write_json, write_text


def push(
    workdir: str | os.PathLike[str],
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    private: bool = False,
) -> pathlib.Path:
    """Publishes a run's best model or, without validation, its last, on the Hugging Face hub.

    Its weights are written under timm's names, with the head as classifier, beside the
    configuration for hypjax and one for timm, results and a model card. Local paths are left out of
    the configuration. Without a token, or if the hub cannot be reached, the folder remains, and one
    sentence says why.

    Args:
        workdir: Folder of a run, or its URL.
        name: Name of the repository, 'OWNER/NAME'.
        folder: Folder to write, by default hub/NAME. Files of the same names are replaced.
        private: Whether a repository that is created is private.

    Returns:
        The folder.

    Raises:
        UserError: There is no trained model, the name is not that of a repository, or the folder
            cannot be written.
    """
    if not hub.is_name(name):
        raise UserError(f"{name!r} is no name of a repository; write OWNER/NAME")
    workdir = workdir if isinstance(workdir, str) else pathlib.Path(workdir)
    folder = pathlib.Path(folder or pathlib.Path("hub", name.rpartition("/")[2])).expanduser()
    try:
        _write(workdir, folder, name)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror or error})") from error
    try:
        address = hub.upload(folder, name, private=private)
        console.say(f"published {address}")
    except UserError as error:
        console.say(f"wrote {folder}, but did not upload it: {error}")
    return folder


def _write(workdir: str | pathlib.Path, folder: pathlib.Path, name: str) -> None:
    with reading(workdir) as run:
        config = _without_paths(saved_config(run))
        model, params = restore_best(run)
        results = read_results(run / RESULTS)
        circumstances = {"images": saved_fingerprint(run)}
        folder.mkdir(parents=True, exist_ok=True)
        if results is not None:
            write_json(folder / RESULTS, results)
        if (run / PROJECTIONS).is_dir():
            shutil.copytree(run / PROJECTIONS, folder / PROJECTIONS, dirs_exist_ok=True)
    save_timm(folder / WEIGHTS, params, model)
    if model.head_kind == "norm_dense":  # timm has no such head.
        save_file(jax.tree.map(np.asarray, params["head"]), folder / HEAD)
    write_json(folder / CONFIG, timm_config(params, model, config.data))
    parts = {"identity": identity(config), "circumstances": circumstances, "all": for_files(config)}
    write_json(folder / PUBLISHED, parts)
    card = model_card(
        name, config, results, pools_as_timm(model.encoder), model.head_kind == "dense"
    )
    write_text(folder / "README.md", card)


def _without_paths(config: ConfigDict) -> ConfigDict:
    """Leaves out the paths of this machine; of the images and weights, the last name remains."""
    config.run.data_dir = config.run.cache_dir = config.run.wandb_project = None
    if config.data.path:
        config.data.path = pathlib.Path(config.data.path).name
    if config.model.weights and pathlib.Path(config.model.weights).expanduser().exists():
        config.model.weights = pathlib.Path(config.model.weights).name
    return config
