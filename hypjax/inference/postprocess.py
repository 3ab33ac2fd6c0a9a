"""A model's fingerprint, and the projections of its embeddings (`eval.pca`) in a run's folder."""

import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.own import own_name
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space
from hypjax.inference.embedding import part_of, scored_spaces
from hypjax.models.own import ENCODERS
from hypjax.objectives import Objective
from hypjax.retrieval.projection import Projection
from hypjax.runs.files import PROJECTIONS

# By the names of `hypjax.inference.embedding`; parts without PCA have no projection.
Projections = Mapping[str, Projection]


def model_fingerprint(config: ConfigDict, part: str, space: Space, params: PyTree) -> str:
    """Hash of everything that a model's embeddings depend on besides the images."""
    names = ("channels", "image_size", "resize", "mean", "std", "test_view")
    view = [config.data[name] for name in names]
    scales = [float(scale) for scale in config.eval.scales]
    model = config.model
    facts = [part, describe_space(space), view, scales, model.eval_pooling, model.head]
    # What parameters do not show of a module of the user's: an activation, or a stride.
    module = ENCODERS.get(model.architecture)
    facts += [] if module is None else [own_name(module)]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:32]


def save_projections(
    folder: pathlib.Path, config: ConfigDict, params: PyTree, projections: Projections
) -> None:
    """Saves a model's projections in the run's folder, under the model's fingerprints."""
    for name, projection in projections.items():
        part = part_of(name)
        path = _path(folder, part, model_fingerprint(config, part, projection.space, params))
        path.parent.mkdir(exist_ok=True)
        projection.save(path)


def saved_projection(
    folder: pathlib.Path, config: ConfigDict, part: str, space: Space, embeddings: str
) -> Projection | None:
    """Reads the projection of a model's embeddings; None if its run does not ask for one."""
    if config.eval.pca.get(part) is None:
        return None
    path = _path(folder, part, embeddings)
    if not path.is_file():
        raise UserError(
            f"{folder} holds no projection of its {part}'s embeddings, which training fits after "
            "its last step; finish the run, or copy its projections, too"
        )
    return Projection.load(path, space)


def copy_projections(
    source: pathlib.Path,
    target: pathlib.Path,
    config: ConfigDict,
    params: PyTree,
    objective: Objective,
) -> None:
    """Copies the projections of a model's parts; those of a run that is not finished are absent."""
    spaces = scored_spaces(config, objective, params)
    for part in (part for part, dim in config.eval.pca.items() if dim is not None):
        fingerprint = model_fingerprint(config, part, spaces[part], params)
        path, copy = (_path(folder, part, fingerprint) for folder in (source, target))
        if path.exists():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _path(folder: pathlib.Path, part: str, embeddings: str) -> pathlib.Path:
    return folder / PROJECTIONS / f"{part}-{embeddings}.npz"
