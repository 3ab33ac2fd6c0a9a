"""Exports a trained model to one ONNX file, from pixels to points, and checks its points."""

import json
import logging
import os
import pathlib
import warnings

import jax
import numpy as np
import onnx
import onnxruntime
import torch
from jaxtyping import Float, Shaped
from onnx import compose, parser
from PIL import Image

from hypjax import __version__, parallel
from hypjax.data.pixels import array, from_array
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space
from hypjax.inference.embedding import embed_function
from hypjax.inference.model import Model
from hypjax.inference.run import Run
from hypjax.integrations.torch_model import TorchModel
from hypjax.system.files import replacing
from hypjax.types import View

_OPSET, _IR_VERSION = 18, 8  # The first Resize with antialiasing, and the format of that time.
_MAX_FILE_BYTES = 2**31 - 1  # Of a protocol buffer.
# Largest errors of coordinates, relative to the longest point or to 1, and of distances, relative
# to their median.
_MAX_COORDINATE_ERROR, _MAX_DISTANCE_ERROR = 1e-4, 1e-3
_NUM_INPUTS = 64  # Random images or features for comparing the file with hypjax.
_BATCH = 8
Batch = Shaped[np.ndarray, "batch ..."]

# The test view of `hypjax.data.views`, for images of any size. Each channel is resized as an image:
# otherwise ONNX Runtime 1.32 moves the transposition behind the resizing, and then refuses it.
_VIEW = """
<ir_version: {ir}, opset_import: ["" : {opset}]>
view (uint8[batch, height, width, {channels}] images)
  => (uint8[batch, {side}, {side}, {channels}] seen)
<int64[1] v_1 = {{1}}, int64[1] v_3 = {{3}}, int64[2] v_side = {{{side}, {side}}},
 int64[2] v_flat = {{-1, 1}}, int64[4] v_channels = {{-1, {channels}, {side}, {side}}}>
{{
  v_shape = Shape(images)
  v_given = Slice(v_shape, v_1, v_3)
  v_turned = Transpose<perm = [0, 3, 1, 2]>(images)
  v_wanted = Concat<axis = 0>(v_flat, v_given)
  v_planes = Reshape(v_turned, v_wanted)
  %(size)s
  v_resized = Resize<axes = [2, 3], mode = "cubic", cubic_coeff_a = -0.5, antialias = 1,
    exclude_outside = 1>(v_planes, , , v_size)
  %(crop)s
  v_square = Reshape(v_cropped, v_channels)
  seen = Transpose<perm = [0, 2, 3, 1]>(v_square)
}}
"""
_SQUASH = {"size": "v_size = Identity(v_side)", "crop": "v_cropped = Identity(v_resized)"}
_CENTRE = {
    "size": """v_resize = Constant<value_ints = [{resize}]>()
  v_shorter = ReduceMin<keepdims = 1>(v_given)
  v_longer = Mul(v_given, v_resize)
  v_size = Div(v_longer, v_shorter)""",
    # The margin is half the rest, halves rounded to even numbers.
    "crop": """v_two = Constant<value_ints = [2, 2]>()
  v_axes = Constant<value_ints = [2, 3]>()
  v_rest = Sub(v_size, v_side)
  v_half = Div(v_rest, v_two)
  v_odd = Mod(v_rest, v_two)
  v_odd_half = Mod(v_half, v_two)
  v_up = Mul(v_odd, v_odd_half)
  v_first = Add(v_half, v_up)
  v_last = Add(v_first, v_side)
  v_cropped = Slice(v_resized, v_first, v_last, v_axes)""",
}


def _require_agreement(
    space: Space, inputs: str, expected: np.ndarray, exported: np.ndarray
) -> str:
    """Reports how far points of the same inputs agree; raises a `UserError` if too little."""
    with jax.enable_x64(True):
        points = np.float64(expected), np.float64(exported)
        matrices = [np.array(space.distance_matrix(each, each)) for each in points]
    change = np.abs(matrices[0] - matrices[1]).max() / max(np.median(matrices[0]), 1e-30)
    error = np.abs(expected - exported).max()
    summary = (
        f"for {inputs}, coordinates differ from hypjax's by at most {error:.1g} and distances by "
        f"at most {change:.2%} of the median"
    )
    # Near a ball's boundary, small errors of coordinates change distances, so both count.
    max_error = _MAX_COORDINATE_ERROR * max(1, np.abs(expected).max())
    if not (error <= max_error and change <= _MAX_DISTANCE_ERROR):
        raise UserError(f"nothing was written: {summary}; please report it")
    return summary


def write_onnx(embedder: Model, path: str | os.PathLike[str]) -> str:
    """Writes a model to an ONNX file; returns a sentence on the agreement of its points.

    Raises a `UserError` if timm has no such encoder, the weights exceed 2 GB, or the file's points
    disagree with hypjax's.
    """
    path = pathlib.Path(path).expanduser()
    model = exported(embedder)
    view = View.of(embedder.config.data)
    facts = {
        "space": describe_space(embedder.space),
        "fingerprint": embedder.fingerprint,
        "embedding": embedder.part,
        "version": __version__,
    }
    if embedder.takes_pixels:
        data, fields = embedder.config.data, ("test_view", "image_size", "resize", "channels")
        facts["view"] = {field: data[field] for field in fields}
        facts |= {"mean": list(data.mean), "std": list(data.std)}
    onnx.helper.set_model_props(model, {f"hypjax.{k}": json.dumps(v) for k, v in facts.items()})
    description, images = _random_inputs(embedder, view)
    expected = _expected_points(embedder, images)
    with writing(path), replacing(path) as temporary:
        onnx.save(model, temporary)
        inputs = _add_margin(images, view) if embedder.takes_pixels else images
        points = _run(temporary, inputs)
        return _require_agreement(embedder.space, description, expected, points)


def exported(embedder: Model) -> onnx.ModelProto:
    """Converts a model, from `images` of any size, or `features`, to `points`, for any batch."""
    torch_model, view = TorchModel(embedder).eval(), View.of(embedder.config.data)
    size = sum(weights.nbytes for weights in torch_model.state_dict().values())
    if size > _MAX_FILE_BYTES:
        raise UserError(f"an ONNX file holds 2 GB; the model has {size / 1e9:.1f} GB of weights")
    shape, dtype, name = (embedder.module.encoder.dim,), torch.float32, "features"
    if embedder.takes_pixels:
        shape, dtype, name = (view.side, view.side, view.channels), torch.uint8, "seen"
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # Hides missed optimisations.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            torch_model,
            (torch.zeros((2, *shape), dtype=dtype),),
            input_names=[name],
            output_names=["points"],
            opset_version=_OPSET,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    model = program.model_proto
    model.ir_version = _IR_VERSION
    for message in (model, model.graph, *model.graph.node, *model.graph.value_info):
        message.ClearField("metadata_props")  # They hold paths of this machine.
    if not embedder.takes_pixels:
        return model
    model = compose.merge_models(view_model(view), model, io_map=[("seen", "seen")])
    del model.opset_import[1:]  # The merged model imports the standard operators twice.
    return model


def view_model(view: View) -> onnx.ModelProto:
    """The model that resizes and crops `images` as a test view does; its output is `seen`."""
    steps = _SQUASH if view.test == "squash" else _CENTRE
    sizes = {"side": view.side, "resize": view.resize, "channels": view.channels}
    return parser.parse_model((_VIEW % steps).format(ir=_IR_VERSION, opset=_OPSET, **sizes))


def _random_inputs(embedder: Model, view: View) -> tuple[str, Batch]:
    """A description, and random images or features."""
    rng = np.random.default_rng(0)
    if not embedder.takes_pixels:
        shape = (_NUM_INPUTS, embedder.module.encoder.dim)
        return f"{_NUM_INPUTS} random features", rng.normal(size=shape).astype(np.float32)
    # Smooth patterns: to a model, all images of independent pixels look alike.
    shape, size = (_NUM_INPUTS, 4, 4, view.channels), (view.side, view.side)
    coarse = [from_array(pixels) for pixels in rng.integers(0, 256, shape, np.uint8)]
    smooth = [array(image.resize(size, Image.Resampling.BICUBIC)) for image in coarse]
    return f"{_NUM_INPUTS} random patterns", np.stack(smooth)


def _add_margin(images: Batch, view: View) -> Batch:
    """Adds the margin that the exported model crops, so that it embeds the images unchanged."""
    if view.test == "squash":
        return images
    before = round((view.resize - view.side) / 2)
    margins = (before, view.resize - view.side - before)
    return np.pad(images, ((0, 0), margins, margins, (0, 0)))


def _expected_points(embedder: Model, images: Batch) -> Float[np.ndarray, "batch dim"]:
    """Points by hypjax's model, in float32 on the CPU."""
    config, device = embedder.config.copy_and_resolve_references(), jax.devices("cpu")[0]
    config.model.precision = "float32"
    model = Run(config, mesh=parallel.create_mesh(devices=[device])).model
    scaling, spaces = (config.data.mean, config.data.std), {embedder.part: embedder.space}
    embed = embed_function(model, scaling, spaces, config.eval.scales)
    with jax.default_device(device):
        program, params = jax.jit(embed), jax.device_put(embedder.params, device)
        outputs = [program(params, batch) for batch in np.split(images, len(images) // _BATCH)]
        points = np.concatenate([np.asarray(batch[embedder.part]) for batch in outputs])
        return points if embedder.projection is None else embedder.projection.apply(points)


def _run(path: pathlib.Path, images: Batch) -> Float[np.ndarray, "batch dim"]:
    """Points by ONNX Runtime, in batches of several sizes."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # Errors need no log: they are raised.
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    batches = [images[:1], *np.split(images[1:], range(_BATCH, len(images) - 1, _BATCH))]
    return np.concatenate([session.run(None, {name: batch})[0] for batch in batches])
