"""The parameters with which a model starts: pretrained, or of another run."""

import pathlib
from collections.abc import Callable

import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config.choices import PARTS
from hypjax.errors import UserError, redacted
from hypjax.geometry import SPACES, learned
from hypjax.inference.run import Run
from hypjax.inference.weights import TrainedModel
from hypjax.models import Embedder, pretrained
from hypjax.models.architectures import published_weights, same_architecture
from hypjax.models.encoder import Encoder
from hypjax.models.weight_files import PROXIES, read_state_dict, repository, timm_weights
from hypjax.objectives import create_objective
from hypjax.objectives.proxy_losses import proxy_parameters
from hypjax.parallel import processes
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import saved_fields, saved_fingerprint
from hypjax.system import console
from hypjax.system.cloud import is_url


def pretrained_encoder(config: ConfigDict, encoder: Encoder) -> PyTree:
    """Reads the encoder's parameters that `model.weights` names: a hub id, a file, or a run."""
    weights = config.model.weights
    if not weights:
        raise UserError("config.model.weights is None; name weights, as configs/cub.py does")
    if not _is_run(weights):
        published = published_weights(timm_weights(weights))
        scaling = tuple(config.data.mean), tuple(config.data.std)
        if published and scaling != (published.mean, published.std):
            mean, std = (",".join(map(str, x)) for x in (published.mean, published.std))
            flags = f"--config.data.mean={mean} --config.data.std={std}"
            console.warn(f"in pretraining of {weights}, pixels were scaled otherwise; set {flags}")
        return pretrained.load_timm(weights, encoder, config.data.channels)
    return _restored(config, encoder).params["encoder"]


def only_encoder(run: Run) -> PyTree:
    """Reads the parameters of a pretrained encoder, in all processes; opens no images."""
    return _from_first(run, lambda: {"encoder": pretrained_encoder(run.config, run.model.encoder)})


def released_model(run: Run) -> PyTree:
    """Reads `released_parameters`, without proxies, in all processes; scores only these parts."""
    return _from_first(run, lambda: released_parameters(run.config, run.model))


def _from_first(run: Run, read: Callable[[], dict[str, PyTree]]) -> PyTree:
    params = learned.initial_parameters(learned.initial_scalars(run.config.objective))
    if run.model.encoder.takes_pixels:
        tree: dict[str, PyTree] = {}  # Of the first process.
        tree_parts = processes.from_first(lambda: tree.update(read()) or [*tree])
        run.parts = [part for part in PARTS if part in tree_parts]
        shapes = {part: run.shapes[part] for part in run.parts}
        params |= processes.arrays_from_first(lambda: {x: tree[x] for x in shapes}, shapes)
    return params


def pretrained_parameters(config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the "encoder" with which training starts.

    `load_head` adds a run's "head" and "scalars", or else the other `released_parameters`.
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
    run = _restored(config, model.encoder)
    for field in ("head", "head_dim"):
        if run.config.model[field] != config.model[field]:
            values = f"{config.model[field]}, but {run.config.model[field]} in the run {weights}"
            raise UserError(f"config.model.{field} is {values}, whose head you load")
    parts = {part: run.params[part] for part in ("encoder", "head") if part in run.params}
    return parts | _learned_by_run(config, run.params.get("scalars", {}))


def released_parameters(config: ConfigDict, model: Embedder) -> dict[str, PyTree]:
    """Reads the "encoder" that `model.weights` names.

    A file by the code of Hyp-ViT, HypMix or HIER also has the "head", and HIER's "hierarchy".
    """
    weights, params = config.model.weights, {"encoder": pretrained_encoder(config, model.encoder)}
    if _is_run(weights) or repository(weights):
        return params
    try:
        state = read_state_dict(weights)
        if (head := pretrained.released_head(state, model)) is not None:
            params["head"] = head
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
    if PROXIES in state and "hier_proxies" in config.objective:
        proxies, expected = state[PROXIES], (config.objective.hier_proxies, model.head_dim)
        if proxies.shape != expected:
            raise UserError(
                f"weights {weights}: {PROXIES} has the shape {list(proxies.shape)}; set "
                "--config.objective.hier_proxies and --config.model.head_dim accordingly"
            )
        objective = create_objective(config)
        proxies = proxy_parameters(proxies, objective.score_space, objective.ball_c)
        params["hierarchy"] = np.asarray(proxies)
    return params


def _learned_by_run(config: ConfigDict, params: learned.ScalarParameters) -> dict[str, PyTree]:
    """The "scalars" that the run in `model.weights` learned; others start as configured."""
    fields, weights = config.objective, config.model.weights
    c, curved = learned.scalar_values(params).get("c"), learned.has_curvature(SPACES[fields.space])
    if not fields.learn_c and curved and c not in (None, fields.c):
        console.warn(f"the run in {weights} learned c = {c:g}; config.objective.c is {fields.c:g}")
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
    names = ("name", "split", "split_seed", "test_classes")
    same_name, *same_split = (fields[f"data.{name}"] == config.data[name] for name in names)
    if same_name and not (all(same_split) and fingerprint == images):
        problem = f"the run in {redacted(weights)} had other images or another split"
        console.warn(f"{problem}; if it saw some of this test, the recall here is too high")


def _is_run(weights: str) -> bool:
    return is_url(weights) or pathlib.Path(weights).expanduser().is_dir()


def _restored(config: ConfigDict, encoder: Encoder) -> TrainedModel:
    weights = config.model.weights
    with reading(weights) as folder:
        run = Run.saved(folder).restore_best(folder)
    if not same_architecture(run.model.encoder, encoder):
        problem = f"the run in {weights} has a different architecture or size"
        raise UserError(f"{problem}; copy its config.model")
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
