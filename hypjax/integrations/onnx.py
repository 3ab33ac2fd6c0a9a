"""Exports a trained model to one ONNX file, from pixels to points, and checks its points."""

import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jinja2
import numpy as np
import onnx
import onnxruntime
from jaxtyping import Array, Float, PyTree, Shaped
from onnx import compose, parser
from PIL import Image

from hypjax import __version__
from hypjax.assemble import assemble_method
from hypjax.config import own_copy, set_fields
from hypjax.data.pixels import array, from_array
from hypjax.errors import UserError, explained, writing
from hypjax.experiment.embedding import embed_function
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space
from hypjax.inference.model import Model
from hypjax.integrations.onnx_graph import UntranslatedError
from hypjax.integrations.onnx_rules import translate
from hypjax.models import Embedder
from hypjax.models.custom import is_custom
from hypjax.models.text import TextTransformer
from hypjax.system.files import replacing
from hypjax.types import TEXTS, Outputs, View

# Largest errors of coordinates, relative to the longest point or to 1, and of distances, relative
# to their median.
_MAX_COORDINATE_ERROR, _MAX_DISTANCE_ERROR = 1e-4, 1e-3
_NUM_INPUTS = 64  # Random images or features for comparing the file with hypjax.
_BATCH = 8
Batch = Shaped[np.ndarray, "batch ..."]  # Images, features, tokens or points.
_Points = Callable[[PyTree, Array], Array]  # From parameters and a batch.

# The test view of `hypjax.data.views`, for images of any size, in ONNX's language. Each channel is
# resized as an image: otherwise ONNX Runtime 1.32 moves the transposition behind the resizing, and
# then refuses it. If one side is more than eight times the other, it is resized and cropped first:
# a line of 20,000 pixels, enlarged to the view's height, would take gigabytes. Negative padding
# crops.
_VIEW = pathlib.Path(__file__).with_name("test_view.onnx.j2")
_VIEWS = ("squash", "centre_crop", "letterbox")  # For which the template computes a size.


def write_onnx(embedder: Model, path: str | os.PathLike[str]) -> str:
    """Writes a model to an ONNX file; returns a sentence on the agreement of its points.

    The tower of texts, if any, gets a file beside it, model-texts.onnx beside model.onnx.

    Raises a `UserError` if ONNX lacks one of its operations, the weights exceed 2 GB, or the file's
    points disagree with hypjax's.
    """
    path = pathlib.Path(path).expanduser()
    module = _module_for_cpus(embedder)
    model = to_onnx(embedder, module)
    pixels, view = embedder.method.pixels, embedder.method.pixels.view
    facts: dict[str, Any] = {}
    description, inputs = _random_inputs(embedder)
    expected = _by_jax(embedder, _points_function(embedder, module, projects=False), inputs)
    if embedder.projection is not None:  # In float64: the file's projection is in float32.
        expected = embedder.projection.apply(expected)
    if embedder.takes_pixels:
        facts["view"] = {
            "test_view": view.test,
            "image_size": view.side,
            "resize": view.resize,
            "channels": view.channels,
        }
        facts |= {"mean": [*pixels.mean], "std": [*pixels.std]}
        inputs = _add_margin(inputs, view)
    agreement = f"for {description}, {_write(embedder, path, model, facts, inputs, expected)}"
    texts = module.towers.get(TEXTS)  # Towers of sentences' vectors need an encoder of others.
    if texts and isinstance(texts.encoder, TextTransformer) and embedder.part == "head":
        beside = path.with_stem(f"{path.stem}-texts")
        agreement += f"\nfor random texts in {beside}, {_write_texts(embedder, module, beside)}"
    return agreement


def _write_texts(embedder: Model, module: Embedder, path: pathlib.Path) -> str:
    """Writes the tower that maps `ids` of tokens, int32 [batch, context], to `points`."""
    tower = module.towers[TEXTS]
    settings = cast(TextTransformer, tower.encoder).settings

    def points(params: PyTree, ids: Array) -> Array:
        outputs = tower.apply({"params": params[f"towers_{TEXTS}"]}, ids)
        return embedder.space.embed(cast(Outputs, outputs).projected)

    example = jax.ShapeDtypeStruct((settings.context,), np.int32)
    shape = _NUM_INPUTS, settings.context
    ids = np.random.default_rng(0).integers(1, settings.vocabulary, shape, np.int32)
    model, expected = _translated(embedder, points, example, "ids"), _by_jax(embedder, points, ids)
    return _write(embedder, path, model, {}, ids, expected)


def _write(
    embedder: Model,
    path: pathlib.Path,
    model: onnx.ModelProto,
    facts: Mapping[str, Any],
    inputs: Batch,
    expected: Batch,
) -> str:
    """Writes a file with facts, if its points agree with hypjax's; says how far they do."""
    facts = {
        "space": describe_space(embedder.space),
        "fingerprint": embedder.fingerprint,
        "embedding": embedder.part,
        "version": __version__,
        **facts,
    }
    onnx.helper.set_model_props(model, {f"hypjax.{k}": json.dumps(v) for k, v in facts.items()})
    with writing(path), replacing(path) as temporary:
        onnx.save(model, temporary)
        with explained("ONNX Runtime cannot run the translated model"):
            points = _exported_points(temporary, inputs)
        return _require_agreement(embedder.space, path.name, expected, points)


def to_onnx(embedder: Model, module: Embedder) -> onnx.ModelProto:
    """Translates a model, from `images` of any size, or `features`, to `points`, for any batch.

    `module` is the model's, in float32 and for CPUs.
    """
    points, view = _points_function(embedder, module), embedder.method.pixels.view
    if not embedder.takes_pixels:
        example = jax.ShapeDtypeStruct((module.encoder.dim,), np.float32)
        return _translated(embedder, points, example, "features")
    example = jax.ShapeDtypeStruct((view.side, view.side, view.channels), np.uint8)
    model = _translated(embedder, points, example, "seen")  # The output of `view_model`.
    model = compose.merge_models(view_model(view), model, io_map=[("seen", "seen")])
    del model.opset_import[1:]  # The merged model imports the standard operators twice.
    return model


def _points_function(embedder: Model, module: Embedder, *, projects: bool = True) -> _Points:
    """The function of images, or features."""
    method, pca = embedder.method, embedder.projection if projects else None
    spaces = {embedder.part: embedder.space}
    embed = embed_function(module, method.pixels, spaces, method.embedding.scales)

    def points(params: PyTree, inputs: Array) -> Array:
        embedded = embed(params, inputs)[embedder.part]
        return embedded if pca is None else pca.project(embedded)

    return points


def _translated(
    embedder: Model, points: _Points, example: jax.ShapeDtypeStruct, name: str
) -> onnx.ModelProto:
    try:
        return translate(functools.partial(points, embedder.params), example, name, "points")
    except UntranslatedError as error:
        raise UserError(f"{embedder.name} cannot be written as ONNX: {error}") from error


def _module_for_cpus(embedder: Model) -> Embedder:
    """The model's module in float32 and for CPUs."""
    if is_custom(embedder.module.encoder):
        return embedder.module
    config = own_copy(embedder.config)
    set_fields(config, {"model.precision": "float32"})
    cpu = jax.devices("cpu")[0]
    return assemble_method(config, device=cpu, saved_space=embedder.space).model


def view_model(view: View) -> onnx.ModelProto:
    """The model that resizes and crops `images` as a test view does; its output is `seen`."""
    if view.test not in _VIEWS:
        raise UserError(f"ONNX files have no steps for the test view {view.test}; add them")
    return parser.parse_model(jinja2.Template(_VIEW.read_text()).render(view._asdict()))


def _random_inputs(embedder: Model) -> tuple[str, Batch]:
    """A description in words, and random features, or images of the side that the model embeds."""
    rng = np.random.default_rng(0)
    if not embedder.takes_pixels:
        shape = (_NUM_INPUTS, embedder.module.encoder.dim)
        return f"{_NUM_INPUTS} random features", rng.normal(size=shape).astype(np.float32)
    # Smooth patterns: to a model, all images of independent pixels look alike.
    view = embedder.method.pixels.view
    coarse = rng.integers(0, 256, (_NUM_INPUTS, 4, 4, view.channels), np.uint8)
    size = (view.side, view.side)
    smooth = [array(from_array(x).resize(size, Image.Resampling.BICUBIC)) for x in coarse]
    return f"{_NUM_INPUTS} random patterns", np.stack(smooth)


def _add_margin(images: Batch, view: View) -> Batch:
    """Adds the margin that the exported model crops, so that it embeds the images unchanged."""
    if view.test != "centre_crop":
        return images
    margin = view.resize - view.side
    margins = (round(margin / 2), margin - round(margin / 2))
    return np.pad(images, ((0, 0), margins, margins, (0, 0)))


def _by_jax(embedder: Model, points: _Points, inputs: Batch) -> Batch:
    """Points by hypjax's model, in float32 on the CPU."""
    cpu, function = jax.devices("cpu")[0], jax.jit(points)
    with jax.default_device(cpu):
        params = jax.device_put(embedder.params, cpu)
        batches = np.split(inputs, len(inputs) // _BATCH)
        return np.concatenate([np.asarray(function(params, batch)) for batch in batches])


def _exported_points(path: pathlib.Path, images: Batch) -> Float[np.ndarray, "batch dim"]:
    """Points by ONNX Runtime, first of a single image, then of batches."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # Errors need no log: they are raised.
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    batches = [images[:1], *np.split(images[1:], range(_BATCH, len(images) - 1, _BATCH))]
    return np.concatenate([session.run(None, {name: batch})[0] for batch in batches])


def _require_agreement(space: Space, name: str, expected: Batch, exported: Batch) -> str:
    """Reports how far points of the same inputs agree; raises a `UserError` if too little."""
    with jax.enable_x64(True):
        points, other_points = (np.asarray(x, np.float64) for x in (expected, exported))
        distances = np.array(space.distance_matrix(points, points))
        others = np.array(space.distance_matrix(other_points, other_points))
    coordinate_error = np.abs(expected - exported).max()
    distance_error = np.abs(distances - others).max() / max(np.median(distances), 1e-30)
    summary = (
        f"coordinates differ from hypjax's by at most {coordinate_error:.1g} and "
        f"distances by at most {distance_error:.2%} of the median"
    )
    # Near a ball's boundary, small errors of coordinates change distances, so both count.
    max_error = _MAX_COORDINATE_ERROR * max(1, np.abs(expected).max())
    if not (coordinate_error <= max_error and distance_error <= _MAX_DISTANCE_ERROR):
        raise UserError(f"{name} was not written: {summary}; please report it")
    return summary
