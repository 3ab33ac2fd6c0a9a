"""A trained model, and how its parameters are read from a run's folder."""

import contextlib
import pathlib
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.custom import custom_name
from hypjax.errors import UserError
from hypjax.geometry import Space, learned
from hypjax.geometry.registry import describe_space
from hypjax.inference.embedding import fingerprint, part_of, scored_spaces
from hypjax.models import Embedder, model_shapes, pretrained
from hypjax.models.custom import CUSTOM_ENCODERS
from hypjax.models.weight_files import read_state_dict
from hypjax.objectives import Objective
from hypjax.retrieval.projection import Projection
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.workdir import has_checkpoint, saved_fields
from hypjax.types import View

Projections = Mapping[str, Projection]  # By name of `scored_spaces`, where `eval.pca` is set.


class TrainedModel(NamedTuple):
    """A trained model with its configuration and objective, as evaluation and search use it."""

    config: ConfigDict
    model: Embedder
    params: PyTree
    objective: Objective  # With the scalars that the model has learned.

    @property
    def spaces(self) -> dict[str, Space]:
        """The spaces of the model's embeddings, by the names of `scored_spaces`."""
        return scored_spaces(self.config, self.objective, self.params)

    def fingerprint(self, name: str, projection: Projection | None = None) -> str:
        """Hash of all that the embeddings of a name depend on, except the images."""
        data, model = self.config.data, self.config.model
        view = View.of(data), tuple(data.mean), tuple(data.std)
        scales, space = [*map(float, self.config.eval.scales)], describe_space(self.spaces[name])
        facts = [name, space, view, scales, model.eval_pooling, model.head]
        facts += [model.gem_exponent] if model.eval_pooling == "gem" else []
        # Parameters do not show a custom module's activation or stride.
        if (module := CUSTOM_ENCODERS.get(model.architecture)) is not None:
            facts.append(custom_name(module))
        digest = fingerprint(facts, self.params)
        return digest if projection is None else projection.fingerprint(digest)

    def save_projections(self, folder: pathlib.Path, projections: Projections) -> None:
        """Saves the projections of the model's embeddings in the run's folder."""
        for name, projection in projections.items():
            (folder / files.PROJECTIONS).mkdir(exist_ok=True)
            projection.save(folder / _projection_file(name, self.fingerprint(name)))

    def projection(self, folder: pathlib.Path, name: str) -> tuple[Projection | None, str]:
        """Reads the projection of `eval.pca`, if any, and the fingerprint of the embeddings."""
        fingerprint = self.fingerprint(name)
        if self.config.eval.pca[part_of(name)] is None:
            return None, fingerprint
        path = folder / _projection_file(name, fingerprint)
        if not path.is_file():
            problem = f"{folder} holds no projection of its {name}'s embeddings"
            raise UserError(f"{problem}; finish the run, or copy its projections, too")
        projection = Projection.load(path, self.spaces[name])
        return projection, projection.fingerprint(fingerprint)

    def copy_projections(self, source: pathlib.Path, target: pathlib.Path) -> None:
        """Copies the model's projections; an unfinished run has none."""
        pca = self.config.eval.pca
        for name in (name for name in self.spaces if pca[part_of(name)] is not None):
            file = _projection_file(name, self.fingerprint(name))
            if (source / file).exists():
                (target / files.PROJECTIONS).mkdir(exist_ok=True)
                shutil.copyfile(source / file, target / file)


def _projection_file(name: str, embeddings: str) -> str:
    return f"{files.PROJECTIONS}{part_of(name)}-{embeddings}.npz"


def read_models(folder: pathlib.Path, config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the parameters of a run's last model and of its best one, named as by `evaluate`."""
    read = _read_published if files.is_published(folder) else _read_checkpoints
    return read(folder, config, model)


def _read_checkpoints(run: pathlib.Path, config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    scalars, latest = learned.initial_scalars(config.objective), None
    shapes = model_shapes(model, View.of(config.data), scalars)
    if has_checkpoint(run):
        checkpoints = Checkpoints(run / files.CHECKPOINTS, read_only=True)
        with contextlib.closing(checkpoints):
            latest = checkpoints.restore_latest(model=shapes)
            best = checkpoints.restore_best(model=shapes)
    if latest is None:
        raise UserError(f"{run} holds no checkpoint; train first, or name another --workdir")
    finished = (run / files.RESULTS).exists()
    finished &= latest.step == saved_fields(run).get("train.total_steps")
    states = {"final" if finished else f"step {latest.step}": latest.trees[0]}
    return states if best is None else states | {"best": best.trees[0]}


def _read_published(folder: pathlib.Path, config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    files.require_published(folder)
    try:
        weights = read_state_dict(str(folder / files.WEIGHTS))
        params = pretrained.load_model(weights, model, config.data.channels)
        if model.head_kind == "norm_dense":
            params["head"] = pretrained.check_head(read_state_dict(str(folder / files.HEAD)), model)
        if first := learned.scalar_parameters(learned.initial_scalars(config.objective)):
            params["scalars"] = files.published_scalars(folder, first)
    except UserError as error:
        raise UserError(f"the model in {folder} is incomplete: {error}") from error
    return {"final": params}
