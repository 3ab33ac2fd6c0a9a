"""Where a model's parameters come from: a run's checkpoints, or weights pretrained elsewhere."""

import contextlib
import pathlib

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.models import Embedder, create_embedder, model_shapes
from hypjax.models.architectures import Encoder, same_architecture
from hypjax.models.pretrained import convert_timm, load_timm, timm_state_dict
from hypjax.runs.cloud_read import reading
from hypjax.runs.workdir import Workdir, saved_config
from hypjax.system import console
from hypjax.system.cloud import is_url
from hypjax.types import View


def restore_models(
    config: ConfigDict, workdir: str | pathlib.Path
) -> tuple[Embedder, dict[str, PyTree]]:
    """The model of a run as it is evaluated, and its parameters by the names `evaluate` gives them.

    Raises:
        UserError: The folder holds no checkpoint, or one of another run.
    """
    run = Workdir(pathlib.Path(workdir), config, compared=("data.", "model.", "objective."))
    model = create_embedder(config, evaluating=True)
    view = View(config.data.image_size, config.data.resize, config.data.channels)
    shapes = model_shapes(model, view)
    latest = None
    if run.has_checkpoint:
        with contextlib.closing(run.checkpoints(read_only=True)) as checkpoints:
            latest = checkpoints.restore_latest(model=shapes)
            best = checkpoints.restore_best(model=shapes)
    if latest is None:
        raise UserError(
            f"{run.path} holds no checkpoint; train first, or name a run's folder with --workdir"
        )
    finished = run.results is not None and latest.step == run.total_steps
    states = {"final" if finished else f"step {latest.step}": latest.trees[0]}
    return model, states if best is None else states | {"best": best.trees[0]}


def restore_best(workdir: pathlib.Path) -> tuple[Embedder, PyTree]:
    """The model of a run as it is evaluated, with its best parameters, or its last.

    Raises:
        UserError: The folder holds no trained run.
    """
    model, states = restore_models(saved_config(workdir), workdir)
    return model, states.get("best", next(iter(states.values())))


def pretrained_encoder(config: ConfigDict, encoder: Encoder) -> PyTree:
    """The encoder's parameters that `model.weights` names: of the hub, a file, or another run.

    Of another run it is the best model, or the last one.

    Raises:
        UserError: There are none, or they do not fit the encoder.
    """
    weights = config.model.weights
    if not weights:
        raise UserError("config.model.weights is None; name weights, as configs/cub.py does")
    if not is_url(weights) and not pathlib.Path(weights).expanduser().is_dir():
        return load_timm(weights, encoder, config.data.channels)
    with reading(weights) as folder:
        other = saved_config(folder)
        model, params = restore_best(folder)
    if not same_architecture(model.encoder, encoder):
        raise UserError(f"the encoder of the run in {weights} is of another architecture or size")
    if (other.data.mean, other.data.std) != (config.data.mean, config.data.std):
        console.warn(f"the run in {weights} scales pixels by another data.mean and data.std")
    try:
        state = timm_state_dict(params["encoder"], model.encoder)
        return convert_timm(state, encoder, config.data.channels)
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
