"""Models to publish: a folder that hypjax and timm load, and that the Hugging Face hub holds."""

import os
import pathlib
import re

from ml_collections import ConfigDict

from hypjax.config import flatten
from hypjax.errors import UserError, writing
from hypjax.inference.matches import read_matches, write_matches
from hypjax.inference.model_card import base_model, model_card
from hypjax.inference.model_folder import replacing_model, write_contents, write_weights
from hypjax.inference.postprocess import copy_projections
from hypjax.inference.weights import restore_best
from hypjax.models.weight_files import is_hub_name
from hypjax.objectives import scored_space
from hypjax.runs import files
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import saved_fingerprint
from hypjax.system import console, hub
from hypjax.system.files import write_json, write_text

_README = "README.md"


def push(
    workdir: str | os.PathLike[str],
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    private: bool = False,
) -> pathlib.Path:
    """Publishes a run's best model or, without validation, its last, on the Hugging Face hub.

    Its weights are written under timm's names, with the head as classifier, beside the
    configuration for hypjax and one for timm, results and a model card. Of paths in the
    configuration only the last name remains, and nothing of `config.run`. These files alone are
    uploaded, in one commit, which removes those of an earlier model. Without a token, or if the hub
    cannot be reached, the folder remains, and one sentence says why. Returns the folder.

    Args:
        workdir: Folder of a run, or its URL.
        name: Name of the repository, 'OWNER/NAME'.
        folder: Folder to write, by default hub/NAME. Its files of an earlier model are
            replaced; others remain, and are not uploaded.
        private: Whether a repository that is created is private.
    """
    if not hub.is_name(name):
        raise UserError(f"{name!r} is no name of a repository; write OWNER/NAME")
    workdir = workdir if isinstance(workdir, str) else pathlib.Path(workdir)
    folder = pathlib.Path(folder or pathlib.Path("hub", name.rpartition("/")[2])).expanduser()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        written = _write(workdir, folder, name)
    try:
        address = hub.upload(folder, written, name, private=private, owned=_is_owned)
        console.say(f"published {address}")
    except UserError as error:
        console.say(f"wrote {folder}, but did not upload it: {error}")
    return folder


def _write(workdir: str | pathlib.Path, folder: pathlib.Path, name: str) -> list[str]:
    """Replaces the model in a folder, all at once, and returns the names of its files."""
    with replacing_model(folder) as staged:
        _stage(workdir, staged, name)
        for_timm = [files.CONFIG] if (staged / files.CONFIG).exists() else []
        return [files.PUBLISHED, *files.hashed_files(staged), *for_timm, _README]


def _is_owned(file: str) -> bool:
    """Whether a file of a repository is one of a model, which another one may lack."""
    return files.is_hashed(file) or file == files.CONFIG


def _stage(workdir: str | pathlib.Path, folder: pathlib.Path, name: str) -> None:
    """Writes all files of a model into an empty folder."""
    with reading(workdir) as run:
        config, model, params = restore_best(run)
        began = base_model(config)
        config = without_paths(config)
        results = files.read_results(run / files.RESULTS)
        provenance = {"images": saved_fingerprint(run)}
        copy_projections(run, folder, config, params)
        if matches := read_matches(run):
            write_matches(folder, matches)
    if results is not None:
        write_json(folder / files.RESULTS, results)
    write_weights(folder, config, model, params)
    space = scored_space(config, params)
    write_text(folder / _README, model_card(name, config, model, space, results, began))
    write_contents(folder, config, space, provenance, params.get("space"))


def without_paths(config: ConfigDict) -> ConfigDict:
    """Leaves the last name of each path and URL in a configuration, but names on the hub."""
    for field, value in flatten(config).items():
        if field in ("model.architecture", "objective.name"):
            continue  # Names of code may hold a colon.
        if isinstance(value, str) and not (field == "model.weights" and is_hub_name(value)):
            config.update_from_flattened_dict({field: _last_name(value)})
    return config


def _last_name(location: str) -> str:
    """Last name of any system's path, or of a URL below its host or bucket; 'unnamed' if none."""
    scheme, _, rest = location.rpartition("://")
    rest = re.split(r"[?#]", rest)[0].partition("/")[2] if scheme else rest
    names = [name for name in re.split(r"[/\\:]", rest) if name.strip(". ")]
    return names[-1] if names and names[-1][0] != "~" else "unnamed" if location else ""
