"""The folder of a published model: what is in it, and how it is replaced at once."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from hypjax.config import identity
from hypjax.config.choices import GIVEN, OWN
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space
from hypjax.models import Embedder
from hypjax.models.encoder import FEATURES
from hypjax.models.own import OwnEncoder
from hypjax.models.pretrained import save_timm, timm_config
from hypjax.runs import files
from hypjax.runs.workdir import SPACE
from hypjax.system.files import replacing, sha256, write_json


def describe(config: ConfigDict) -> str:
    """Says in one line what a run's model is: encoder, head, dataset and loss."""
    model, data = config.model, config.data
    encoder, loss = (name.removeprefix(OWN) for name in (model.architecture, config.objective.name))
    head = f"a head of {model.head_dim} coordinates"
    images = "images given from Python" if data.name == GIVEN else data.name
    if encoder == FEATURES:
        return f"features of {model.width} coordinates with {head}, trained by {loss}"
    if encoder == "vit":
        encoder = f"ViT ({model.depth} blocks of width {model.width})"
    return (
        f"{encoder} with {'no head' if model.head == 'none' else head}, for {data.image_size} × "
        f"{data.image_size} pixels, trained on {images} with {loss}"
    )


_FILES = {files.CONFIG, files.PUBLISHED, files.PROJECTIONS.rstrip("/"), "README.md", *files.HASHED}


@contextlib.contextmanager
def replacing_model(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder, which replaces the model in a folder if the body succeeds."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    others = names - _FILES if files.PUBLISHED in names else names
    if others:
        raise UserError(
            f"{folder} holds {min(others)}, which is no part of a model of hypjax; name another "
            "folder"
        )
    with replacing(folder.resolve()) as staged:
        staged.mkdir()
        yield staged


def write_model(
    folder: pathlib.Path,
    config: ConfigDict,
    model: Embedder,
    params: PyTree,
    space: Space,
    provenance: Mapping[str, Any],
) -> None:
    """Writes a model: weights, timm's config.json if timm has such a model, and hypjax.json, last.

    That holds the configuration, the head's space, and the hashes of the other files in the folder.
    """
    save_timm(folder / files.WEIGHTS, params, model)
    if model.head_kind == "norm_dense":  # timm has no such head.
        save_file(jax.tree.map(np.asarray, params["head"]), folder / files.HEAD)
    if not isinstance(model.encoder, OwnEncoder):
        write_json(folder / files.CONFIG, timm_config(params, model, config.data))
    fields = identity(config)  # How the run was executed is left out.
    parts = {"identity": fields, "provenance": provenance, "all": fields}
    parts[SPACE] = describe_space(space)
    if "space" in params:
        logs = params["space"].items()
        parts[files.LEARNED] = {name: np.asarray(log).tolist() for name, log in logs}
    hashes = {file: sha256(folder / file) for file in files.hashed_files(folder)}
    write_json(folder / files.PUBLISHED, {**parts, "files": hashes})
