"""Trained models, and readers of their parameters from a run's folder."""

import contextlib
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.choices import CUSTOM
from hypjax.config.custom import custom_name
from hypjax.errors import UserError
from hypjax.geometry import Space, learned
from hypjax.geometry.registry import describe_space
from hypjax.inference.embedding import fingerprint, part_of, scored_spaces
from hypjax.models import Embedder, model_shapes, pretrained
from hypjax.models.custom import CUSTOM_ENCODERS, is_custom
from hypjax.models.weight_files import read_state_dict
from hypjax.objectives import Objective
from hypjax.retrieval.projection import Projection
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.workdir import has_checkpoint, read_if_intact, saved_fields
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
        """The spaces in which evaluation compares the model's embeddings, see `scored_spaces`."""
        return scored_spaces(self.config, self.objective, self.params)

    def fingerprint(self, name: str) -> str:
        """Hash of all that determines the embeddings `name` (see `scored_spaces`) but images."""
        data, model = self.config.data, self.config.model
        view = View.of(data), tuple(data.mean), tuple(data.std)
        scales = [*map(float, self.config.eval.scales)]
        space = describe_space(self.spaces[name])
        facts = [name, space, view, scales, model.eval_pooling, model.head]
        if model.eval_pooling == "gem":
            facts.append(model.gem_exponent)
        # The parameters of a custom module do not show its activation or stride.
        if (module := CUSTOM_ENCODERS.get(model.architecture)) is not None:
            facts.append(custom_name(module))
        return fingerprint(facts, self.params)

    def save_projections(self, folder: pathlib.Path, projections: Projections) -> None:
        """Saves the projections of the model's embeddings in the run's folder."""
        for name, projection in projections.items():
            (folder / files.PROJECTIONS).mkdir(exist_ok=True)
            projection.save(folder / _projection_file(name, self.fingerprint(name)))

    def projection(self, folder: pathlib.Path, name: str) -> tuple[Projection | None, str]:
        """Reads the projection of `eval.pca`, if any; also returns the embeddings' fingerprint."""
        fingerprint = self.fingerprint(name)
        if self.config.eval.pca[part_of(name)] is None:
            return None, fingerprint
        path = folder / _projection_file(name, fingerprint)
        if not path.is_file():
            problem = f"{folder} holds no projection of the embeddings {name!r}"
            raise UserError(f"{problem}; finish the run, or copy its folder {files.PROJECTIONS}")
        projection = Projection.load(path, self.spaces[name])
        return projection, projection.fingerprint(fingerprint)


def _projection_file(name: str, fingerprint: str) -> str:
    return f"{files.PROJECTIONS}{part_of(name)}-{fingerprint}.npz"


def read_models(folder: pathlib.Path, config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the parameters of a run's last model, "final" or "step N", and its best, "best"."""
    if files.is_published(folder):
        return {"final": _read_published(folder, config, model)}
    if not has_checkpoint(folder):
        raise UserError(f"{folder} holds no checkpoint; train first, or name another --workdir")
    shapes = None  # As saved: to trace an encoder takes longer than to search with it.
    if is_custom(model.encoder) or config.objective.name.startswith(CUSTOM):  # May have changed.
        scalars = learned.initial_scalars(config.objective)
        shapes = model_shapes(model, View.of(config.data), scalars)
    with contextlib.closing(Checkpoints(folder / files.CHECKPOINTS, read_only=True)) as checkpoints:
        latest = checkpoints.restore_latest(model=shapes)
        results = read_if_intact(folder / files.RESULTS)
        best_step = results.get("best_step", [None, *latest.record.get("best_steps", [])][-1])
        best = checkpoints.restore_best(best_step, model=shapes)
    last_step = results.get("last_step", saved_fields(folder).get("train.total_steps"))
    finished = latest.step == last_step and (folder / files.RESULTS).exists()
    models = {"final" if finished else f"step {latest.step}": latest.trees[0]}
    return models if best is None else models | {"best": best.trees[0]}


def _read_published(folder: pathlib.Path, config: ConfigDict, model: Embedder) -> PyTree:
    files.check_weights(folder)
    try:
        weights = read_state_dict(str(folder / files.WEIGHTS))
        params = pretrained.load_model(weights, model, config.data.channels)
        if model.head_kind == "norm_dense":
            params["head"] = pretrained.check_head(read_state_dict(str(folder / files.HEAD)), model)
        if expected := learned.scalar_parameters(learned.initial_scalars(config.objective)):
            params["scalars"] = files.published_scalars(folder, expected)
    except UserError as error:
        raise UserError(f"the model in {folder} is incomplete: {error}") from error
    return params
