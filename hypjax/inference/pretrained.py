"""Reads initial parameters: pretrained weights, or another run's."""

import pathlib

import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.choices import PARTS
from hypjax.config.objective_settings import loss_settings
from hypjax.errors import UserError, redacted
from hypjax.geometry import SPACES, learned
from hypjax.inference.run import Run
from hypjax.inference.weights import TrainedModel
from hypjax.models import Embedder, pretrained
from hypjax.models.architectures import published_weights, same_architecture
from hypjax.models.encoder import Encoder
from hypjax.models.weight_files import repository, timm_weights, weights_in
from hypjax.models.weight_names import PROXIES
from hypjax.objectives import create_objective
from hypjax.parallel import processes
from hypjax.runs import files
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import saved_fields, saved_fingerprint
from hypjax.system import console
from hypjax.system.cloud import is_url


def pretrained_encoder(config: ConfigDict, encoder: Encoder) -> PyTree:
    """Reads the encoder's parameters from `model.weights`: a name of the hub, a file, or a run."""
    weights = config.model.weights
    if not weights:
        raise UserError("config.model.weights is None; name weights, as configs/cub.py does")
    if _is_run(weights):
        return _restore(config, encoder).params["encoder"]
    published = published_weights(timm_weights(weights))
    scaling = tuple(config.data.mean), tuple(config.data.std)
    expected = published and (published.mean, published.std)
    if published and config.data.channels == 1:  # Kernels are summed over the channels.
        expected = tuple((round(sum(x) / len(x), 3),) for x in expected)
    if published and scaling != expected:
        mean, std = (",".join(map(str, x)) for x in expected)
        flags = f"--config.data.mean={mean} --config.data.std={std}"
        console.warn(f"{weights} was pretrained with pixels scaled otherwise; set {flags}")
    return pretrained.load_timm(weights, encoder, config.data.channels)


def released_model(run: Run, *, encoder_only: bool = False) -> PyTree:
    """Reads `released_parameters` without proxies; sets `run.parts` to the scored parts."""
    params = learned.initial_parameters(learned.initial_scalars(run.config.objective))
    if not run.model.encoder.takes_pixels:
        return params
    released: dict[str, PyTree] = {}  # Filled in the first process, which reads for all.

    def read_parts() -> list[str]:
        if encoder_only:
            released["encoder"] = pretrained_encoder(run.config, run.model.encoder)
        else:
            released.update(released_parameters(run.config, run.model))
        return list(released)

    available = processes.from_first(read_parts)
    run.parts = [part for part in PARTS if part in available]
    shapes = {part: run.shapes[part] for part in run.parts}
    scored = processes.arrays_from_first(lambda: {part: released[part] for part in shapes}, shapes)
    return params | scored


def pretrained_parameters(config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the parameters with which training starts, by part of the model.

    The parts are the "encoder" and, with `model.load_head`, a run's "head" and "scalars", or all
    `released_parameters`.
    """
    weights = config.model.weights
    if not config.model.load_head:
        return {"encoder": pretrained_encoder(config, model.encoder)}
    if not _is_run(weights):
        params = released_parameters(config, model)
        if "head" not in params:
            problem = f"config.model.load_head is set, but {weights} holds no head"
            raise UserError(f"{problem}; name a run, or a file of the papers' code")
        return params
    trained = _restore(config, model.encoder)
    for field in ("head", "head_dim"):
        value, saved_value = config.model[field], trained.config.model[field]
        if value != saved_value:
            problem = f"config.model.{field} is {value}, but {saved_value} in the run {weights}"
            raise UserError(f"{problem}, whose head is loaded; set both alike")
    params = {part: trained.params[part] for part in ("encoder", "head") if part in trained.params}
    return params | _starting_scalars(config, trained.params.get("scalars", {}))


def released_parameters(config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the parameters that `model.weights` holds, by part of the model.

    The parts are the "encoder", the only one of a run or a model on the hub, and from a file by the
    code of Hyp-ViT, HypMix or HIER also the "head" and the "hierarchy", which is HIER's proxies.
    """
    weights = config.model.weights
    if not weights or _is_run(weights) or repository(weights):
        return {"encoder": pretrained_encoder(config, model.encoder)}
    try:
        state = pretrained.read_weights(weights, model.encoder, config.data.channels)
        params = {"encoder": pretrained.convert_timm(state, model.encoder, config.data.channels)}
        if (head := pretrained.released_head(state, model)) is not None:
            params["head"] = head
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
    landmarks = create_objective(loss_settings(config)).landmarks if PROXIES in state else None
    if landmarks:
        proxies = state[PROXIES]
        if proxies.shape != (landmarks.count, model.head_dim):
            problem = f"{PROXIES} has the shape {list(proxies.shape)}"
            advice = "set --config.objective.hier_proxies and --config.model.head_dim accordingly"
            raise UserError(f"weights {weights}: {problem}; {advice}")
        params[landmarks.name] = np.asarray(landmarks.parameters(proxies))
    return params


def _starting_scalars(config: ConfigDict, params: learned.ScalarParameters) -> dict[str, PyTree]:
    """Scalars to start with: the saved run's `params` where shapes agree, else as configured."""
    fields, weights = config.objective, config.model.weights
    saved_c = learned.scalar_values(params).get("c")
    fixes_c = learned.has_curvature(SPACES[fields.space]) and not fields.learn_c
    if fixes_c and saved_c not in (None, fields.c):
        learned_c = f"the run in {weights} learned c = {saved_c:g}"
        console.warn(f"{learned_c}; config.objective.c is {fields.c:g}")
    initial = learned.scalar_parameters(learned.initial_scalars(fields))
    if not initial:
        return {}
    for name in initial.keys() & params.keys():
        if np.shape(params[name]) == np.shape(initial[name]):
            initial[name] = params[name]
    return {"scalars": learned.within_bounds(initial, learned.bounds(fields))}


def warn_of_known_classes(config: ConfigDict, images_fingerprint: str) -> None:
    """Warns if the run in `model.weights` may have been trained on this run's test images."""
    weights = config.model.weights
    if not weights or not _is_run(weights):
        return
    with reading(weights) as folder:
        fields, fingerprint = saved_fields(folder), saved_fingerprint(folder)
    split_fields = ("split", "split_seed", "test_classes")
    same_split = all(fields[f"data.{name}"] == config.data[name] for name in split_fields)
    same_dataset = fields["data.name"] == config.data.name
    if same_dataset and not (same_split and fingerprint == images_fingerprint):
        problem = f"the run in {redacted(weights)} had other images or another split"
        console.warn(f"{problem}; if its training images are test images here, recall is too high")


def _is_run(weights: str) -> bool:
    folder = pathlib.Path(weights).expanduser()
    is_run = files.is_published(folder) or (folder / files.CHECKPOINTS).exists()
    return is_url(weights) or is_run or (folder.is_dir() and not weights_in(folder))


def _restore(config: ConfigDict, encoder: Encoder) -> TrainedModel:
    """Restores the run in `model.weights`; converts its parameters to fit the encoder."""
    weights = config.model.weights
    with reading(weights) as folder:
        trained = Run.saved(folder).restore_best(folder)
    if not same_architecture(trained.model.encoder, encoder):
        problem = f"the run in {weights} has a different architecture or size"
        raise UserError(f"{problem}; copy its config.model")
    data = trained.config.data
    if (data.mean, data.std) != (config.data.mean, config.data.std):
        console.warn(f"the run in {weights} uses a different data.mean and data.std")
    if not encoder.takes_pixels:
        return trained
    try:
        state = pretrained.timm_state_dict(trained.params["encoder"], trained.model.encoder)
        converted = pretrained.convert_timm(state, encoder, config.data.channels)
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
    return trained._replace(params={**trained.params, "encoder": converted})
