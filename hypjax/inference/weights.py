"""A model's parameters: from a run's folder, or pretrained."""

import contextlib
import pathlib
import shutil
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.custom import custom_name
from hypjax.errors import UserError, redacted
from hypjax.geometry import SPACES, Space, learned
from hypjax.geometry.registry import describe_space
from hypjax.inference.embedding import fingerprint, part_of, scored_spaces
from hypjax.models import Embedder, create_embedder, model_shapes, pretrained
from hypjax.models.architectures import published_weights, same_architecture
from hypjax.models.custom import CUSTOM_ENCODERS
from hypjax.models.encoder import Encoder
from hypjax.models.weight_files import read_state_dict, timm_weights
from hypjax.objectives import Objective
from hypjax.retrieval.projection import Projection
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import (
    has_checkpoint,
    require_identity,
    saved_config,
    saved_fields,
    saved_fingerprint,
    saved_objective,
)
from hypjax.system import console
from hypjax.system.cloud import is_url
from hypjax.types import View

# By the names of `scored_spaces`; parts without PCA (`eval.pca`) have no projection.
Projections = Mapping[str, Projection]


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
        """Hash of everything but the images that the embeddings of a name depend on."""
        data, model = self.config.data, self.config.model
        view = View.of(data), tuple(data.mean), tuple(data.std)
        scales = [float(scale) for scale in self.config.eval.scales]
        space = describe_space(self.spaces[name])
        facts = [name, space, view, scales, model.eval_pooling, model.head]
        # What parameters do not show of a module of the user's: an activation, or a stride.
        module = CUSTOM_ENCODERS.get(model.architecture)
        facts += [] if module is None else [custom_name(module)]
        own = fingerprint(facts, self.params)
        return own if projection is None else projection.fingerprint(own)

    def save_projections(self, folder: pathlib.Path, projections: Projections) -> None:
        """Saves the projections of the model's embeddings in the run's folder."""
        for name, projection in projections.items():
            path = folder / self._projection_file(name, self.fingerprint(name))
            path.parent.mkdir(exist_ok=True)
            projection.save(path)

    def projection(self, folder: pathlib.Path, name: str) -> tuple[Projection | None, str]:
        """Reads the projection of `eval.pca`, if any; returns also the embeddings' fingerprint."""
        embeddings = self.fingerprint(name)
        if self.config.eval.pca[part_of(name)] is None:
            return None, embeddings
        path = folder / self._projection_file(name, embeddings)
        if not path.is_file():
            raise UserError(
                f"{folder} holds no projection of its {name}'s embeddings, which training fits "
                "after its last step; finish the run, or copy its projections, too"
            )
        projection = Projection.load(path, self.spaces[name])
        return projection, projection.fingerprint(embeddings)

    def copy_projections(self, source: pathlib.Path, target: pathlib.Path) -> None:
        """Copies the model's projections; an unfinished run has none."""
        pca = self.config.eval.pca
        for name in (name for name in self.spaces if pca[part_of(name)] is not None):
            file = self._projection_file(name, self.fingerprint(name))
            if (source / file).exists():
                (target / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / file, target / file)

    def _projection_file(self, name: str, embeddings: str) -> str:
        return f"{files.PROJECTIONS}{part_of(name)}-{embeddings}.npz"


def restore_models(workdir: pathlib.Path, config: ConfigDict) -> dict[str, TrainedModel]:
    """Restores a run's last model and its best one, if there is one, named as by `evaluate`.

    Only fields of the configuration that shape the images or the model must be the run's.
    """
    read = _read_published
    if not files.is_published(workdir):
        require_identity(workdir, config, ("data.", "model.", "objective."))
        read = _read_checkpoints
    model, models = create_embedder(config, evaluating=True), {}
    states, objective = read(workdir, config, model), saved_objective(workdir, config)
    for name, params in states.items():
        scalars = learned.learned_scalars(config.objective, params)
        models[name] = TrainedModel(config, model, params, objective.with_scalars(scalars))
    return models


def restore_best(workdir: pathlib.Path, config: ConfigDict | None = None) -> TrainedModel:
    """Restores a run's best model, or else its last; by default, its configuration is read."""
    return [*restore_models(workdir, config or saved_config(workdir)).values()][-1]


def _read_checkpoints(run: pathlib.Path, config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    scalars, latest = learned.initial_scalars(config.objective), None
    shapes = model_shapes(model, View.of(config.data), scalars)
    if has_checkpoint(run):
        checkpoints = Checkpoints(run / files.CHECKPOINTS, read_only=True)
        with contextlib.closing(checkpoints):
            latest = checkpoints.restore_latest(model=shapes)
            best = checkpoints.restore_best(model=shapes)
    if latest is None:
        raise UserError(
            f"{run} holds no checkpoint; train first, or name a run's folder with --workdir"
        )
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


def pretrained_encoder(config: ConfigDict, encoder: Encoder) -> PyTree:
    """Reads the encoder's parameters that `model.weights` names: a hub id, a file, or a run."""
    weights = config.model.weights
    if not weights:
        raise UserError("config.model.weights is None; name weights, as configs/cub.py does")
    if not _is_run(weights):
        published = published_weights(timm_weights(weights))
        scaling = tuple(config.data.mean), tuple(config.data.std)
        if published and scaling != (published.mean, published.std):
            mean, std = (",".join(map(str, each)) for each in (published.mean, published.std))
            console.warn(
                f"in pretraining of {weights}, pixels were scaled otherwise; set "
                f"--config.data.mean={mean} --config.data.std={std}"
            )
        return pretrained.load_timm(weights, encoder, config.data.channels)
    return _restored(config, encoder).params["encoder"]


def pretrained_parameters(config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the "encoder" with which training starts; `load_head` adds the "head" and "scalars"."""
    weights = config.model.weights
    if not config.model.load_head:
        return {"encoder": pretrained_encoder(config, model.encoder)}
    if not _is_run(weights):
        raise UserError(
            f"config.model.load_head is set, but config.model.weights is {weights}; name the "
            "folder or URL of a run, since only runs have a head"
        )
    run = _restored(config, model.encoder)
    for field in ("head", "head_dim"):
        if run.config.model[field] != config.model[field]:
            raise UserError(
                f"config.model.{field} is {config.model[field]}, but in the run in {weights} it is "
                f"{run.config.model[field]}, so its head does not fit"
            )
    parts = {part: run.params[part] for part in ("encoder", "head") if part in run.params}
    return parts | _learned_by_run(config, run.params.get("scalars", {}))


def _learned_by_run(config: ConfigDict, params: learned.ScalarParameters) -> dict[str, PyTree]:
    """The "scalars" with the values that the run in `model.weights` learned.

    Scalars that it did not learn, or of another number of values, start from the configuration.
    """
    fields, weights = config.objective, config.model.weights
    c, curved = learned.scalar_values(params).get("c"), learned.has_curvature(SPACES[fields.space])
    if not fields.learn_c and curved and c not in (None, fields.c):
        console.warn(
            f"the run in {weights} has learned c = {c:g}, but config.objective.c is {fields.c:g}"
        )
    first = learned.scalar_parameters(learned.initial_scalars(fields))
    known = {k: v for k, v in params.items() if k in first and np.shape(v) == np.shape(first[k])}
    bounded = learned.within_bounds(first | known, learned.bounds(fields))
    return {"scalars": bounded} if first else {}


def warn_of_known_classes(config: ConfigDict, images: str) -> None:
    """Warns if the run in `model.weights` had other images of this dataset, or another split."""
    weights = config.model.weights
    if not weights or not _is_run(weights):
        return
    with reading(weights) as folder:
        fields, fingerprint = saved_fields(folder), saved_fingerprint(folder)
    same_name, *same_split = (
        fields[f"data.{name}"] == config.data[name]
        for name in ("name", "split", "split_seed", "test_classes")
    )
    if same_name and not (all(same_split) and fingerprint == images):
        console.warn(
            f"the run in {redacted(weights)} had other images or another split; if it was trained "
            "on images or classes of this test, the recall here is too high"
        )


def _is_run(weights: str) -> bool:
    return is_url(weights) or pathlib.Path(weights).expanduser().is_dir()


def _restored(config: ConfigDict, encoder: Encoder) -> TrainedModel:
    """Restores the run in `model.weights`, and converts its parameters to those of the encoder."""
    weights = config.model.weights
    with reading(weights) as folder:
        run = restore_best(folder)
    if not same_architecture(run.model.encoder, encoder):
        raise UserError(
            f"the encoder of the run in {weights} has a different architecture or size; set "
            "model.architecture and its sizes as in that run's config.json"
        )
    data = run.config.data
    if (data.mean, data.std) != (config.data.mean, config.data.std):
        console.warn(f"the run in {weights} uses a different data.mean and data.std")
    if not encoder.takes_pixels:
        return run
    try:
        state = pretrained.timm_state_dict(run.params["encoder"], run.model.encoder)
        converted = pretrained.convert_timm(state, encoder, config.data.channels)
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
    return run._replace(params={**run.params, "encoder": converted})
