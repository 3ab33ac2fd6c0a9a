"""A trained model in one ONNX file, from pixels to points; checked before it is saved."""

import contextlib
import json
import logging
import pathlib
import warnings

import jax
import numpy as np
import onnx
import onnxruntime
import torch
from jaxtyping import Float, Shaped
from onnx import compose, parser
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from PIL import Image

from hypjax import __version__, parallel
from hypjax.data.pipeline import readable_batches
from hypjax.data.pixels import array, from_array
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space
from hypjax.inference.embedding import embed_function
from hypjax.inference.model import Model
from hypjax.inference.run import Run
from hypjax.integrations.torch_model import TorchModel, flatten
from hypjax.system.files import replacing
from hypjax.types import View

_OPSET, _IR_VERSION = 18, 8  # The first Resize with antialiasing, and the format of that time.
_LARGEST_FILE = 2**31 - 1  # Bytes of a protocol buffer.
_TOLERANCE = 1e-4  # Of coordinates, relative to the longest point or to 1, in float32.
_LARGEST_CHANGE = 1e-3  # Of distances, relative to their median, in float32.
_LEAST_AGREEMENT = 0.9  # Share of the nearest neighbours that lower precision must leave.
_SAMPLE = 256  # Test images on which lower precision is measured,
_PATTERNS = 64  # and random pictures where there are fewer than these.
_BATCH = 8
_NEIGHBOURS = 10
Batch = Shaped[np.ndarray, "batch ..."]

# `hypjax.data.views` for images of any size. Each channel is resized as an image: otherwise ONNX
# Runtime 1.32 moves the transposition behind the resizing, which it then refuses.
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
    space: Space, images: str, expected: np.ndarray, exported: np.ndarray, precision: str
) -> str:
    """Reports how far points of the same images agree; raises a `UserError` if they do not."""
    with jax.enable_x64(True):
        doubled = expected.astype(np.float64), exported.astype(np.float64)
        matrices = [np.array(space.distance_matrix(points, points)) for points in doubled]
    change = np.abs(np.subtract(*matrices)).max() / max(np.median(matrices[0]), 1e-30)
    for matrix in matrices:
        np.fill_diagonal(matrix, np.inf)  # No image is its own neighbour.
    nearest = [np.argsort(matrix, axis=1)[:, :_NEIGHBOURS] for matrix in matrices]
    same = sum(len(np.intersect1d(a, b)) for a, b in zip(*nearest, strict=True)) / nearest[0].size
    error = np.abs(expected - exported).max()
    differ = f"coordinates differ from hypjax's by at most {error:.1g} and distances by at most"
    neighbours = f"{same:.1%} of the {_NEIGHBOURS} nearest neighbours are the same"
    summary = f"for {images}, {differ} {change:.2%} of the median; {neighbours}"
    if precision == "float32":
        # Near a ball's boundary, small differences of coordinates change distances.
        agree = error <= _TOLERANCE * max(1, np.abs(expected).max()) and change <= _LARGEST_CHANGE
        advice = "please report it"
    else:
        agree = same >= _LEAST_AGREEMENT and np.isfinite(error)
        advice = f"at least {_LEAST_AGREEMENT:.0%} should be; use --precision=float32"
    if not agree:
        raise UserError(f"nothing was written: {summary} in {precision}; {advice}")
    return summary


def write_onnx(embedder: Model, path: pathlib.Path, precision: str) -> str:
    """Writes a model into an ONNX file; returns how far its points agree with hypjax's.

    The precision is 'float32', 'float16' for weights and products of the encoder, or 'int8' for its
    weights and products except convolutions wider than a pixel. Raises a `UserError` if timm has no
    such encoder, it has too many weights, or its points disagree with hypjax's.
    """
    if precision != "float32" and not embedder.takes_pixels:
        raise UserError(f"{precision} is for encoders; a run on features needs --precision=float32")
    model, view = exported(embedder, flat=precision == "int8"), View.of(embedder.config.data)
    facts = {
        "space": describe_space(embedder.space),
        "fingerprint": embedder.fingerprint,
        "embedding": embedder.part,
        "precision": precision,
        "version": __version__,
    }
    if embedder.takes_pixels:
        data = embedder.config.data
        shape = {name: data[name] for name in ("test_view", "image_size", "resize", "channels")}
        facts |= {"view": shape, "mean": list(data.mean), "std": list(data.std)}
    onnx.helper.set_model_props(model, {f"hypjax.{k}": json.dumps(v) for k, v in facts.items()})
    images, batch = _sample(embedder, view, measured=precision != "float32")
    expected = _points(embedder, batch)
    with writing(path), replacing(path) as temporary:
        if precision == "int8":
            _quantize(model, temporary)
        else:
            if precision == "float16":  # Of what follows the encoder, the products are Gemm.
                others = {node.op_type for node in model.graph.node} - {"MatMul", "Conv"}
                model = convert_float_to_float16(model, keep_io_types=True, op_block_list=others)
            onnx.save(model, temporary)
        points = _run(temporary, _uncropped(batch, view) if embedder.takes_pixels else batch)
        return _require_agreement(embedder.space, images, expected, points, precision)


def exported(embedder: Model, *, flat: bool = False) -> onnx.ModelProto:
    """Converts a model: `images` of any size, or `features`, to `points`, for any batch.

    `flat` makes matrix products of 1 × 1 convolutions.
    """
    torch_model, view = TorchModel(embedder).eval(), View.of(embedder.config.data)
    if flat:
        flatten(torch_model)
    size = sum(weights.nbytes for weights in torch_model.state_dict().values())
    if size > _LARGEST_FILE:
        raise UserError(f"an ONNX file holds 2 GB; the model has {size / 1e9:.1f} GB of weights")
    shape, dtype, name = (embedder.module.encoder.dim,), torch.float32, "features"
    if embedder.takes_pixels:
        shape, dtype, name = (view.side, view.side, view.channels), torch.uint8, "seen"
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # It logs what it does not optimise.
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
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info):
        part.ClearField("metadata_props")  # Paths of this machine, among others.
    if not embedder.takes_pixels:
        return model
    model = compose.merge_models(view_model(view), model, io_map=[("seen", "seen")])
    del model.opset_import[1:]  # It names the standard operators twice.
    return model


def view_model(view: View) -> onnx.ModelProto:
    """The model that resizes and crops `images` to a view's images, `seen`."""
    steps = _SQUASH if view.test == "squash" else _CENTRE
    sizes = {"side": view.side, "resize": view.resize, "channels": view.channels}
    return parser.parse_model((_VIEW % steps).format(ir=_IR_VERSION, opset=_OPSET, **sizes))


def _quantize(model: onnx.ModelProto, path: pathlib.Path) -> None:
    """Writes a model with the encoder's products in int8, scaled by each column of weights."""
    # What follows the encoder, by the names that ONNX Runtime gives it when it splits off the bias.
    head = [f"{node.name}_MatMul" for node in model.graph.node if node.op_type == "Gemm"]
    options = {"weight_type": QuantType.QInt8, "per_channel": True, "nodes_to_exclude": head}
    logging.disable()  # It recommends a preparation that changes nothing here.
    quantize_dynamic(model, path, op_types_to_quantize=["MatMul"], **options)
    logging.disable(logging.NOTSET)


def _sample(embedder: Model, view: View, *, measured: bool) -> tuple[str, Batch]:
    """Test images of the run, or random images or features, and a description of them."""
    if measured:
        with contextlib.suppress(OSError, UserError):
            test = embedder.run.splits.test
            chosen = np.unique(np.linspace(0, len(test) - 1, min(_SAMPLE, len(test))).astype(int))
            ((images, broken),) = readable_batches(test.take(chosen), view, len(chosen))
            images = np.delete(images, list(broken), axis=0)
            images = images[: len(images) // _BATCH * _BATCH]
            if len(images) >= _PATTERNS:
                return f"{len(images)} test images of the run", images
    rng = np.random.default_rng(0)
    if not embedder.takes_pixels:
        shape = (_PATTERNS, embedder.module.encoder.dim)
        return f"{_PATTERNS} random features", rng.normal(size=shape).astype(np.float32)
    # Smooth patterns: to a model, all images of independent pixels look alike.
    coarse = rng.integers(0, 256, (_PATTERNS, 4, 4, view.channels), np.uint8)
    smooth = [from_array(x).resize((view.side,) * 2, Image.Resampling.BICUBIC) for x in coarse]
    return f"{_PATTERNS} random patterns", np.stack(list(map(array, smooth)))


def _uncropped(images: Batch, view: View) -> Batch:
    """Adds the margin that the model crops, so that it sees the view's images unchanged."""
    if view.test == "squash":
        return images
    before = round((view.resize - view.side) / 2)
    margins = (before, view.resize - view.side - before)
    return np.pad(images, ((0, 0), margins, margins, (0, 0)))


def _points(embedder: Model, images: Batch) -> Float[np.ndarray, "batch dim"]:
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
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # Errors are raised, too.
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    batches = [images[:1], *np.split(images[1:], range(_BATCH, len(images) - 1, _BATCH))]
    return np.concatenate([session.run(None, {name: batch})[0] for batch in batches])
