"""Reads initial parameters: pretrained weights, or another run's; and encoders without a run."""

import dataclasses
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hypjax.assemble import assemble_method, saved_method
from hypjax.config import default_config, validate
from hypjax.config.choices import IN_MEMORY, PARTS
from hypjax.config.recipes import ENCODERS
from hypjax.errors import UserError, redacted, writing
from hypjax.experiment.method import Method
from hypjax.experiment.trained import TrainedModel, restore_best
from hypjax.geometry import SPACES, learned
from hypjax.models import create_encoder, pretrained
from hypjax.models.architectures import ARCHITECTURES, published_weights, same_architecture
from hypjax.models.tokens import find_tokenizer
from hypjax.models.weight_files import repository, timm_weights, weights_in
from hypjax.models.weight_names import PROXIES
from hypjax.parallel import processes
from hypjax.runs import files
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import saved_fields, saved_fingerprint
from hypjax.settings import TextSettings
from hypjax.system import console
from hypjax.system.cloud import is_url
from hypjax.system.files import replacing

_TEXT_DESIGN = {
    f"model.text.{name}"
    for name in {field.name for field in dataclasses.fields(TextSettings)} | {"head"}
} - {f"model.text.{name}" for name in ("precision", "remat", "attention", "residual")}


def is_encoder(spec: str) -> bool:
    """Whether a text names an encoder as for `pretrained_model`."""
    name = spec.partition("@")[0]
    return name in ENCODERS or name.partition(".")[0] in ARCHITECTURES


def pretrained_model(spec: str) -> TrainedModel:
    """Reads a pretrained encoder as a model without a head.

    Photographs are cropped to the encoder's own size, without a margin.

    Args:
        spec: A name in `ENCODERS`, such as 'lite', with their pooling; or timm's name of weights,
            with timm's pooling, whose tag may be left out for weights of `ENCODERS`. 'NAME@FILE'
            reads the weights from a file.
    """
    name, _, file = spec.partition("@")
    recipe = None if name in ARCHITECTURES else ENCODERS.get(name)
    known = [x.weights for x in ENCODERS.values() if x.weights.startswith(f"{name}.")]
    weights = recipe.weights if recipe else [*known, name][0]
    architecture, _, tag = weights.partition(".")
    if not tag or (scaling := published_weights(weights)) is None:
        problem = f"{name} names no weights"
        raise UserError(f"{problem}; add the tag of timm's name, as in resnet50.a1_in1k")
    encoder = create_encoder(architecture)
    pooling = (recipe.eval_pooling or recipe.pooling) if recipe else encoder.pooling
    # DINOv2's own 518 pixels, of the last epochs of its training, take six times as long.
    side = 224 if "dinov2" in architecture else encoder.image_size
    config = default_config()
    config.data.update(name=IN_MEMORY, image_size=side, resize=side)
    config.data.update(mean=scaling.mean, std=scaling.std)
    config.model.update(architecture=architecture, weights=file or weights, head="none")
    config.model.update(pooling=pooling, eval_pooling=pooling)
    config.run.eval_batch_size = 64  # As fast on a CPU as 256.
    config.optim.frozen = ()
    validate(config)
    method = assemble_method(config)
    return TrainedModel(method, {"encoder": pretrained_encoder(method)})


def pretrained_encoder(method: Method) -> PyTree:
    """Reads the encoder's parameters from `model.weights`: a name of the hub, a file, or a run."""
    weights, pixels, encoder = method.start.weights, method.pixels, method.model.encoder
    if not weights:
        raise UserError("config.model.weights is None; name weights, as configs/cub.py does")
    if _is_run(weights):
        return _restore(method).params["encoder"]
    published = published_weights(timm_weights(weights))
    channels = pixels.view.channels
    if published:
        expected: list[tuple[float, ...]] = [published.mean, published.std]
        if channels == 1:  # Kernels are summed over the channels.
            expected = [(round(sum(x) / len(x), 3),) for x in expected]
        if [pixels.mean, pixels.std] != expected:
            mean, std = (",".join(map(str, x)) for x in expected)
            flags = f"--config.data.mean={mean} --config.data.std={std}"
            console.warn(f"{weights} was pretrained with pixels scaled otherwise; set {flags}")
    return pretrained.load_timm(weights, encoder, channels)


def released_model(method: Method, *, encoder_only: bool = False) -> tuple[PyTree, list[str]]:
    """Reads `released_parameters` without proxies, for all processes.

    Returns the parameters, and the parts of the model that they have.
    """
    params = method.initial_parameters()
    if not method.model.encoder.takes_pixels:
        return params, ["encoder"]
    released: dict[str, PyTree] = {}  # Filled in the first process, which reads for all.

    def read_parts() -> list[str]:
        if encoder_only:
            released["encoder"] = pretrained_encoder(method)
        else:
            released.update(released_parameters(method))
        return list(released)

    available = processes.from_first(read_parts)
    parts = [part for part in PARTS if part in available]
    shapes = {part: method.shapes[part] for part in parts}
    scored = processes.arrays_from_first(lambda: {part: released[part] for part in parts}, shapes)
    return params | scored, parts


def starting_parameters(method: Method) -> dict[str, PyTree] | None:
    """Reads the parts of a model in `model.weights`, for all processes; None without weights."""
    if method.start.weights is None:
        return None
    params: dict[str, PyTree] = {}  # In the first process.

    def read() -> list[str]:
        params.update(_pretrained_parameters(method))
        parts = [name.replace("towers_", "tower of ") for name in params]
        verb = "start" if len(params) > 1 else "starts"
        console.say(f"the {' and the '.join(parts)} {verb} from {method.start.weights}")
        return [*params]

    names, shapes = processes.from_first(read), dict(method.shapes)
    if (landmarks := method.objective.landmarks) and landmarks.name in names:
        shape = landmarks.count, method.model.head_dim
        shapes |= {landmarks.name: jax.ShapeDtypeStruct(shape, jnp.float32)}
    return processes.arrays_from_first(lambda: params, {name: shapes[name] for name in names})


def _pretrained_parameters(method: Method) -> dict[str, PyTree]:
    """Reads the parameters with which training starts, by part of the model.

    The parts are the "encoder" and, with `model.load_head`, a run's "head", towers and "scalars",
    or all `released_parameters`.
    """
    weights = str(method.start.weights)
    if not method.start.load_head:
        return {"encoder": pretrained_encoder(method)}
    if not _is_run(weights):
        params = released_parameters(method)
        if "head" not in params:
            problem = f"config.model.load_head is set, but {weights} holds no head"
            raise UserError(f"{problem}; name a run, or a file of the papers' code")
        return params
    trained = _restore(method)
    for field, here, there in (
        ("head", method.model.head_kind, trained.model.head_kind),
        ("head_dim", method.model.head_dim, trained.model.head_dim),
    ):
        if here != there:
            problem = f"config.model.{field} is {here}, but {there} in the run {weights}"
            raise UserError(f"{problem}, whose head is loaded; set both alike")
    parts = (method.shapes.keys() & trained.params.keys()) - {"scalars"}
    params = {part: trained.params[part] for part in sorted(parts)}
    for field in (x for x in method.fields if parts - {"encoder", "head"} and x in _TEXT_DESIGN):
        here, there = method.fields[field], trained.method.fields[field]
        if here != there:
            problem = f"config.{field} is {here}, but {there} in the model {weights}"
            raise UserError(f"{problem}, whose tower of texts is loaded; set both alike")
    return params | _starting_scalars(method, trained)


def released_parameters(method: Method) -> dict[str, PyTree]:
    """Reads the parameters that `model.weights` holds, by part of the model.

    The parts are the "encoder", the only one of a run or a model on the hub, and from a file by the
    code of Hyp-ViT, HypMix or HIER also the "head" and the "hierarchy", which is HIER's proxies.
    """
    weights, model, channels = method.start.weights, method.model, method.pixels.view.channels
    if not weights or _is_run(weights) or repository(weights):
        return {"encoder": pretrained_encoder(method)}
    try:
        state = pretrained.read_weights(weights, model.encoder, channels)
        params = {"encoder": pretrained.convert_timm(state, model.encoder, channels)}
        if (head := pretrained.released_head(state, model)) is not None:
            params["head"] = head
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
    landmarks = method.objective.landmarks if PROXIES in state else None
    if landmarks:
        proxies = state[PROXIES]
        if proxies.shape != (landmarks.count, model.head_dim):
            problem = f"{PROXIES} has the shape {list(proxies.shape)}"
            advice = "set --config.objective.hier_proxies and --config.model.head_dim accordingly"
            raise UserError(f"weights {weights}: {problem}; {advice}")
        params[landmarks.name] = np.asarray(landmarks.parameters(jnp.asarray(proxies)))
    return params


def _starting_scalars(method: Method, trained: TrainedModel) -> dict[str, PyTree]:
    """Scalars to start with: the saved run's where shapes agree, else as configured.

    A temperature is that of one space: another one starts with its own.
    """
    params: learned.ScalarParameters = trained.params.get("scalars", {})
    saved_c, fields = learned.scalar_values(params).get("c"), method.objective_fields
    c, fixes_c = fields["c"], not fields["learn_c"]
    if fixes_c and learned.has_curvature(SPACES[fields["space"]]) and saved_c not in (None, c):
        learned_c = f"the run in {method.start.weights} learned c = {saved_c:g}"
        console.warn(f"{learned_c}; config.objective.c is {c:g}")
    initial = method.initial_parameters().get("scalars", {})
    if not initial:
        return {}
    saved_fields = trained.method.objective_fields
    has_other_space = any(fields[x] != saved_fields[x] for x in ("space", "parts"))
    for name in initial.keys() & params.keys():
        is_other = has_other_space and name == "log_temperature"
        if np.shape(params[name]) == np.shape(initial[name]) and not is_other:
            initial[name] = params[name]
    return {"scalars": learned.within_bounds(initial, method.scalar_bounds)}


def copy_tokenizer(method: Method, folder: pathlib.Path) -> None:
    """Copies the tokenizer in `model.weights` to a run's folder, which then needs no other."""
    if not (method.model.towers and method.start.weights) or find_tokenizer(folder):
        return
    beside = pathlib.Path(method.start.weights).expanduser()
    for file in (beside / name for name in files.TOKENS):
        if file.is_file():
            with writing(folder), replacing(folder / file.name) as temporary:
                shutil.copyfile(file, temporary)


def warn_of_known_classes(method: Method, images_fingerprint: str) -> None:
    """Warns if the run in `model.weights` may have been trained on this run's test images."""
    weights = method.start.weights
    if not weights or not _is_run(weights) or method.fields["data.split"] == "none":
        return
    with reading(weights) as folder:
        fields, fingerprint = saved_fields(folder), saved_fingerprint(folder)
    split_fields = ("data.split", "data.split_seed", "data.test_classes")
    same_split = all(fields[name] == method.fields[name] for name in split_fields)
    same_dataset = fields["data.name"] == method.fields["data.name"]
    if same_dataset and not (same_split and fingerprint == images_fingerprint):
        problem = f"the run in {redacted(weights)} had other images or another split"
        console.warn(f"{problem}; if its training images are test images here, recall is too high")


def _is_run(weights: str) -> bool:
    folder = pathlib.Path(weights).expanduser()
    is_run = files.is_published(folder) or (folder / files.CHECKPOINTS).exists()
    return is_url(weights) or is_run or (folder.is_dir() and not weights_in(folder))


def _restore(method: Method) -> TrainedModel:
    """Restores the run in `model.weights`; converts its parameters to fit the encoder."""
    weights, encoder, pixels = str(method.start.weights), method.model.encoder, method.pixels
    with reading(weights) as folder:
        trained = restore_best(folder, saved_method(folder))
    if not same_architecture(trained.model.encoder, encoder):
        problem = f"the run in {weights} has a different architecture or size"
        raise UserError(f"{problem}; copy its config.model")
    theirs = trained.method.pixels
    if (theirs.mean, theirs.std) != (pixels.mean, pixels.std):
        console.warn(f"the run in {weights} uses a different data.mean and data.std")
    if not encoder.takes_pixels:
        return trained
    try:
        state = pretrained.timm_state_dict(trained.params["encoder"], trained.model.encoder)
        converted = pretrained.convert_timm(state, encoder, pixels.view.channels)
    except UserError as error:
        raise UserError(f"weights {weights}: {error}") from error
    return dataclasses.replace(trained, params={**trained.params, "encoder": converted})
