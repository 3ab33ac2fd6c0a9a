"""Trained models: restored from a run's folder, with the projections of their embeddings."""

import contextlib
import pathlib
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.own import own_name
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.learned import first_parameters, learned_values
from hypjax.geometry.registry import describe_space
from hypjax.inference.embedding import fingerprint, part_of, scored_spaces
from hypjax.models import Embedder, create_embedder, model_shapes
from hypjax.models.own import ENCODERS
from hypjax.models.pretrained import check_head, load_model
from hypjax.models.weight_files import read_state_dict
from hypjax.objectives import Objective
from hypjax.retrieval.projection import Projection
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.files import (
    CHECKPOINTS,
    HEAD,
    PROJECTIONS,
    RESULTS,
    WEIGHTS,
    is_published,
    published_numbers,
    require_published,
)
from hypjax.runs.workdir import has_checkpoint, require_identity, saved_config, saved_objective
from hypjax.types import View

# By the names of `scored_spaces`; parts without PCA (`eval.pca`) have no projection.
Projections = Mapping[str, Projection]


class TrainedModel(NamedTuple):
    """A run's model as it is evaluated.

    Attributes:
        config: The run's configuration.
        model: The encoder and the head.
        params: Their parameters, in full in this process.
        objective: The run's objective; its numbers are those before training.
    """

    config: ConfigDict
    model: Embedder
    params: PyTree
    objective: Objective

    @property
    def spaces(self) -> dict[str, Space]:
        """The spaces of the embeddings, see `scored_spaces`."""
        return scored_spaces(self.config, self.objective, self.params)

    @property
    def score_space(self) -> Space:
        """Space in which the objective scores the head."""
        scalars = learned_values(self.config.objective, self.params)
        return self.objective.with_scalars(scalars).score_space

    def fingerprint(self, name: str, projection: Projection | None = None) -> str:
        """Hash of everything that the embeddings of a name depend on besides the images."""
        data, model = self.config.data, self.config.model
        view = View.of(data), tuple(data.mean), tuple(data.std)
        scales = [float(scale) for scale in self.config.eval.scales]
        space = describe_space(self.spaces[name])
        facts = [name, space, view, scales, model.eval_pooling, model.head]
        # What parameters do not show of a module of the user's: an activation, or a stride.
        module = ENCODERS.get(model.architecture)
        facts += [] if module is None else [own_name(module)]
        own = fingerprint(facts, self.params)
        return own if projection is None else projection.fingerprint(own)

    def save_projections(self, folder: pathlib.Path, projections: Projections) -> None:
        """Saves the projections of the model's embeddings in the run's folder."""
        for name, projection in projections.items():
            path = self._projection_path(folder, name)
            path.parent.mkdir(exist_ok=True)
            projection.save(path)

    def projection(self, folder: pathlib.Path, name: str) -> Projection | None:
        """Reads the projection of embeddings; None if the run does not ask for one."""
        if self.config.eval.pca.get(part_of(name)) is None:
            return None
        path = self._projection_path(folder, name)
        if not path.is_file():
            raise UserError(
                f"{folder} holds no projection of its {name}'s embeddings, which training fits "
                "after its last step; finish the run, or copy its projections, too"
            )
        return Projection.load(path, self.spaces[name])

    def copy_projections(self, source: pathlib.Path, target: pathlib.Path) -> None:
        """Copies the model's projections; those of a run that is not finished are absent."""
        for name in self.spaces:
            path, copy = (self._projection_path(folder, name) for folder in (source, target))
            if path.exists():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)

    def _projection_path(self, folder: pathlib.Path, name: str) -> pathlib.Path:
        return folder / PROJECTIONS / f"{name.replace(':', '-')}-{self.fingerprint(name)}.npz"


def restore_models(workdir: pathlib.Path, config: ConfigDict) -> dict[str, TrainedModel]:
    """Restores a run's last model and its best one, if there is one, named as by `evaluate`.

    Fields of the configuration that shape neither the images nor the model may differ from the
    run's.
    """
    published = is_published(workdir)
    if not published:
        require_identity(workdir, config, ("data.", "model.", "objective."))
    model = create_embedder(config, evaluating=True)
    states = (
        _read_published(workdir, model, config) if published else _restore(workdir, model, config)
    )
    objective = saved_objective(workdir, config)
    return {name: TrainedModel(config, model, params, objective) for name, params in states.items()}


def restore_best(workdir: pathlib.Path) -> TrainedModel:
    """Restores a run's best model, or else its last."""
    return [*restore_models(workdir, saved_config(workdir)).values()][-1]


def _restore(workdir: pathlib.Path, model: Embedder, config: ConfigDict) -> dict[str, PyTree]:
    """Reads the parameters in a run's checkpoints."""
    shapes, latest = model_shapes(model, View.of(config.data)), None
    if has_checkpoint(workdir):
        with contextlib.closing(Checkpoints(workdir / CHECKPOINTS, read_only=True)) as checkpoints:
            latest = checkpoints.restore_latest(model=shapes)
            best = checkpoints.restore_best(model=shapes)
    if latest is None:
        raise UserError(
            f"{workdir} holds no checkpoint; train first, or name a run's folder with --workdir"
        )
    finished = (workdir / RESULTS).exists()
    finished &= latest.step == saved_config(workdir).train.total_steps
    states = {"final" if finished else f"step {latest.step}": latest.trees[0]}
    return states if best is None else states | {"best": best.trees[0]}


def _read_published(folder: pathlib.Path, model: Embedder, config: ConfigDict) -> dict[str, PyTree]:
    """Reads the parameters of a published model."""
    require_published(folder)
    try:
        params = load_model(read_state_dict(str(folder / WEIGHTS)), model, config.data.channels)
        if model.head_kind == "norm_dense":
            params["head"] = check_head(read_state_dict(str(folder / HEAD)), model)
        if model.learned:
            params["space"] = published_numbers(folder, first_parameters(dict(model.learned)))
    except UserError as error:
        raise UserError(f"the model in {folder} is incomplete: {error}") from error
    return {"final": params}
