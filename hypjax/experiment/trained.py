"""Trained models, and readers of their parameters from a run's folder."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping

from jaxtyping import PyTree

from hypjax.errors import UserError
from hypjax.experiment.embedding import part_of
from hypjax.experiment.method import Method
from hypjax.geometry import Space
from hypjax.models import Embedder, pretrained
from hypjax.models.custom import is_custom
from hypjax.models.weight_files import read_state_dict
from hypjax.objectives import SavedObjective
from hypjax.retrieval.projection import Projection
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.workdir import has_checkpoint, read_if_intact, saved_fields

Projections = Mapping[str, Projection]  # By name of `Method.spaces`, where `eval.pca` is set.


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A method with trained parameters, as evaluation and search use it."""

    method: Method
    params: PyTree

    @property
    def model(self) -> Embedder:
        """The encoder and the head."""
        return self.method.model

    @property
    def spaces(self) -> dict[str, Space]:
        """The spaces in which evaluation compares the model's embeddings, see `Method.spaces`."""
        return self.method.spaces(self.params)

    def save_projections(self, folder: pathlib.Path, projections: Projections) -> None:
        """Saves the projections of the model's embeddings in the run's folder."""
        for name, projection in projections.items():
            (folder / files.PROJECTIONS).mkdir(exist_ok=True)
            projection.save(
                folder / _projection_file(name, self.method.fingerprint(self.params, name))
            )

    def projection(self, folder: pathlib.Path, name: str) -> tuple[Projection | None, str]:
        """Reads the projection of `eval.pca`, if any; also returns the embeddings' fingerprint."""
        fingerprint = self.method.fingerprint(self.params, name)
        if self.method.scoring.pca[part_of(name)] is None:
            return None, fingerprint
        path = folder / _projection_file(name, fingerprint)
        if not path.is_file():
            problem = f"{folder} holds no projection of the embeddings {name!r}"
            raise UserError(f"{problem}; finish the run, or copy its folder {files.PROJECTIONS}")
        projection = Projection.load(path, self.spaces[name])
        return projection, projection.fingerprint(fingerprint)


def _projection_file(name: str, fingerprint: str) -> str:
    return f"{files.PROJECTIONS}{part_of(name)}-{fingerprint}.npz"


def restore(folder: pathlib.Path, method: Method) -> dict[str, TrainedModel]:
    """Restores a run's last model, named "final" or "step N", and its best, "best", if any."""
    if files.is_published(folder):
        return {"final": TrainedModel(method, _read_published(folder, method))}
    with _opened(folder) as checkpoints:
        shapes = _expected_shapes(method)
        latest = checkpoints.restore_latest(model=shapes)
        assert latest is not None  # There is a checkpoint, and damage is an error.
        results = read_if_intact(folder / files.RESULTS)
        best_step = results.get("best_step", [None, *latest.record.get("best_steps", [])][-1])
        best = checkpoints.restore_best(best_step, model=shapes)
    last_step = results.get("last_step", saved_fields(folder).get("train.total_steps"))
    finished = latest.step == last_step and (folder / files.RESULTS).exists()
    models = {"final" if finished else f"step {latest.step}": TrainedModel(method, latest.trees[0])}
    return models if best is None else models | {"best": TrainedModel(method, best.trees[0])}


def restore_best(folder: pathlib.Path, method: Method) -> TrainedModel:
    """Restores a folder's best model, or else its last."""
    best_step = read_if_intact(folder / files.RESULTS).get("best_step")
    if best_step is None or files.is_published(folder):
        return [*restore(folder, method).values()][-1]
    with _opened(folder) as checkpoints:
        shapes = _expected_shapes(method)
        best = checkpoints.restore_best(best_step, model=shapes)
        best = best or checkpoints.restore_latest(model=shapes)
    assert best is not None  # There is a checkpoint, and damage is an error.
    return TrainedModel(method, best.trees[0])


def _opened(folder: pathlib.Path) -> contextlib.closing[Checkpoints]:
    if not has_checkpoint(folder):
        raise UserError(f"{folder} holds no checkpoint; train first, or name another --workdir")
    return contextlib.closing(Checkpoints(folder / files.CHECKPOINTS, read_only=True))


def _expected_shapes(method: Method) -> PyTree | None:
    """Shapes of a model whose code may have changed; None: the saved ones."""
    # To trace an encoder takes longer than to search.
    has_own_code = is_custom(method.model.encoder) or isinstance(method.objective, SavedObjective)
    return method.shapes if has_own_code or method.code else None


def _read_published(folder: pathlib.Path, method: Method) -> PyTree:
    model = method.model
    files.check_weights(folder)
    try:
        weights = read_state_dict(str(folder / files.WEIGHTS))
        params = pretrained.load_model(weights, model, method.pixels.view.channels)
        if model.head_kind in ("norm_dense", "linear"):
            params["head"] = pretrained.check_head(read_state_dict(str(folder / files.HEAD)), model)
        if model.towers:
            params |= pretrained.towers(read_state_dict(str(folder / files.TOWERS)), method.shapes)
        if initial := method.initial_parameters():
            params["scalars"] = files.published_scalars(folder, initial["scalars"])
    except UserError as error:
        raise UserError(f"the model in {folder} is incomplete: {error}") from error
    return params
