"""A model's parameters: from a run's checkpoints, or pretrained."""

import contextlib
import pathlib

import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError, redacted
from hypjax.geometry import SPACES
from hypjax.geometry.learned import (
    LearnedParameters,
    bounds,
    first_parameters,
    has_curvature,
    learned_numbers,
    learned_values,
    projected,
    values,
)
from hypjax.models import Embedder, create_embedder, model_shapes
from hypjax.models.architectures import published_weights, same_architecture
from hypjax.models.encoder import Encoder
from hypjax.models.pretrained import (
    check_head,
    convert_timm,
    load_model,
    load_timm,
    timm_state_dict,
)
from hypjax.models.weight_files import read_state_dict, timm_weights
from hypjax.objectives import Objective
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import (
    CHECKPOINTS,
    HEAD,
    RESULTS,
    WEIGHTS,
    is_published,
    published_numbers,
    require_published,
)
from hypjax.runs.workdir import (
    has_checkpoint,
    require_identity,
    saved_config,
    saved_fingerprint,
    saved_objective,
)
from hypjax.system import console
from hypjax.system.cloud import is_url
from hypjax.types import View


def restore_models(config: ConfigDict, workdir: pathlib.Path) -> tuple[Embedder, dict[str, PyTree]]:
    """Restores a run's model as it is evaluated, and its parameters, named as by `evaluate`."""
    if is_published(workdir):
        model = create_embedder(config, evaluating=True)
        return model, {"final": _published_parameters(workdir, model, config)}
    require_identity(workdir, config, ("data.", "model.", "objective."))
    model = create_embedder(config, evaluating=True)
    shapes = model_shapes(model, View.of(config.data))
    latest = None
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
    return model, states if best is None else states | {"best": best.trees[0]}


def _published_parameters(folder: pathlib.Path, model: Embedder, config: ConfigDict) -> PyTree:
    require_published(folder)
    try:
        params = load_model(read_state_dict(str(folder / WEIGHTS)), model, config.data.channels)
        if model.head_kind == "norm_dense":
            params["head"] = check_head(read_state_dict(str(folder / HEAD)), model)
        if model.learned:
            params["space"] = published_numbers(folder, first_parameters(dict(model.learned)))
    except UserError as error:
        raise UserError(f"the model in {folder} is incomplete: {error}") from error
    return params


def restore_best(workdir: pathlib.Path) -> tuple[ConfigDict, Embedder, PyTree, Objective]:
    """Restores a run's model as it is evaluated, with its best parameters, or else its last.

    The objective has the numbers that these parameters hold.
    """
    config = saved_config(workdir)
    model, states = restore_models(config, workdir)
    params = states.get("best", next(iter(states.values())))
    scalars = learned_values(config.objective, params)
    return config, model, params, saved_objective(workdir, config).with_scalars(scalars)


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
        return load_timm(weights, encoder, config.data.channels)
    return _parameters_of_run(config, encoder)["encoder"]


def pretrained_parameters(config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the parameters with which training starts: the "encoder" and perhaps the "head".

    With the head come the numbers that are learned, the "space".
    """
    weights = config.model.weights
    if not config.model.load_head:
        return {"encoder": pretrained_encoder(config, model.encoder)}
    if not _is_run(weights):
        raise UserError(
            f"config.model.load_head is set, but config.model.weights is {weights}; name the "
            "folder or URL of a run, since only runs have a head"
        )
    with reading(weights) as folder:
        other = saved_config(folder).model
    for field in ("head", "head_dim"):
        if other[field] != config.model[field]:
            raise UserError(
                f"config.model.{field} is {config.model[field]}, but in the run in {weights} it is "
                f"{other[field]}, so its head does not fit"
            )
    params = _parameters_of_run(config, model.encoder)
    parts = {part: params[part] for part in ("encoder", "head") if part in params}
    return parts | _learned_by_run(config, params.get("space", {}))


def _learned_by_run(config: ConfigDict, found: LearnedParameters) -> dict[str, LearnedParameters]:
    """Where learned numbers start: where the run in `model.weights` left them, if it learned them.

    A vector of another length is not that of this run.
    """
    fields, first = config.objective, first_parameters(learned_numbers(config.objective))
    c = values(found).get("c")
    if not fields.learn_c and has_curvature(SPACES[fields.space]) and c not in (None, fields.c):
        console.warn(
            f"the run in {config.model.weights} has learned c = {c:g}, but config.objective.c is "
            f"{fields.c:g}"
        )
    known = {k: v for k, v in found.items() if k in first and np.shape(v) == np.shape(first[k])}
    return {"space": projected({**first, **known}, bounds(fields))} if first else {}


def warn_of_known_classes(config: ConfigDict, images: str) -> None:
    """Warns if `model.weights` is a run that may know test classes of images of this fingerprint.

    It knows none of another dataset, and none if its images were the same and split alike.
    """
    weights = config.model.weights
    if not weights or not _is_run(weights):
        return
    with reading(weights) as folder:
        other, known = saved_config(folder).data, saved_fingerprint(folder)
    split = ("split", "split_seed", "test_classes")
    alike = all(other[field] == config.data[field] for field in split)
    if other.name == config.data.name and not (alike and known == images):
        console.warn(
            f"the run in {redacted(weights)} had other images or another split; if it was trained "
            "on images or classes of this test, the recall here is too high"
        )


def _is_run(weights: str) -> bool:
    return is_url(weights) or pathlib.Path(weights).expanduser().is_dir()


def _parameters_of_run(config: ConfigDict, encoder: Encoder) -> dict[str, PyTree]:
    """Reads the parameters of a run's best model, or else its last, for an encoder."""
    weights = config.model.weights
    with reading(weights) as folder:
        other, model, params, _ = restore_best(folder)
    if not same_architecture(model.encoder, encoder):
        raise UserError(
            f"the encoder of the run in {weights} has a different architecture or size; set "
            "model.architecture and its sizes as in that run's config.json"
        )
    if (other.data.mean, other.data.std) != (config.data.mean, config.data.std):
        console.warn(f"the run in {weights} uses a different data.mean and data.std")
    if not encoder.takes_pixels:
        return params
    try:
        state = timm_state_dict(params["encoder"], model.encoder)
        return {**params, "encoder": convert_timm(state, encoder, config.data.channels)}
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
