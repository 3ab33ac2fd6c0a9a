"""A trained model in one ONNX file: pixels in, points out; checked before it is in its place."""

import contextlib
import json
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
from jaxtyping import Array, Float, PyTree, Shaped, UInt8
from onnxruntime.quantization import QuantType, quantize_dynamic
from PIL import Image

from hypjax import __version__
from hypjax.data.pipeline import readable_batches
from hypjax.data.pixels import array, from_array
from hypjax.data.splits import open_splits
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.inference.embedder import TrainedEmbedder
from hypjax.inference.embedding import embed_function
from hypjax.integrations.to_onnx import onnx_model
from hypjax.models import Embedder
from hypjax.models.vit import VisionTransformer
from hypjax.retrieval.embeddings import describe_space
from hypjax.retrieval.projection import Projection
from hypjax.system.files import replacing
from hypjax.types import View

_TOLERANCE = 1e-4  # Of coordinates, relative to the longest point or to 1, in float32.
_LARGEST_CHANGE = 1e-3  # Of distances, relative to their median, in float32.
_LEAST_AGREEMENT = 0.9  # Share of the nearest neighbours that lower precision must leave.
_SAMPLE = 256  # Test images on which lower precision is measured,
_PATTERNS = 64  # and random pictures where there are fewer than these.
_BATCH = 8
_NEIGHBOURS = 10
_Function = Callable[[PyTree, Array], Array]
Batch = Shaped[np.ndarray, "batch ..."]


class Written(NamedTuple):
    """What was written, and how its results differ from hypjax's.

    Attributes:
        images: On which it was measured, in words.
        error: Largest difference of a coordinate.
        agreement: Share of the ten nearest neighbours among these images that remain.
        change: Largest change of a distance, relative to the median distance.
    """

    images: str
    error: float
    agreement: float
    change: float

    def __str__(self) -> str:
        return (
            f"for {self.images}, coordinates differ from hypjax's by at most {self.error:.1g} and "
            f"distances by at most {self.change:.2%} of the median; {self.agreement:.1%} of the "
            f"{_NEIGHBOURS} nearest neighbours are the same"
        )


def write_onnx(embedder: TrainedEmbedder, path: pathlib.Path, precision: str) -> Written:
    """Writes a trained run's model into an ONNX file.

    Args:
        embedder: The model.
        path: The file, which is replaced if it exists.
        precision: 'float32'; 'float16' for weights and products of the encoder; or 'int8' for its
            weights and, in ONNX Runtime, its products.

    Raises:
        UserError: The model has an operation that is not converted, has too many weights, or
            disagrees with hypjax, or the file cannot be written.
    """
    model, view = _plain(embedder.model, jnp.float32), View.of(embedder.config.data)
    pixels = model.encoder.takes_pixels
    if precision == "float16" and not hasattr(model.encoder, "dtype"):
        raise UserError(
            "only the encoders of hypjax can be written in float16; use --precision=float32"
        )
    written = _plain(model, jnp.float16) if precision == "float16" else model
    example = jax.ShapeDtypeStruct(
        model.encoder.example(view).shape[1:], np.uint8 if pixels else np.float32
    )
    arguments = (embedder.params, example, view if pixels else None, _metadata(embedder, precision))
    try:
        converted = onnx_model(_function(embedder, written), *arguments)
    except UserError:  # Which is a ValueError, too.
        raise
    except ValueError as error:
        raise UserError(
            f"the model has {error}, more than the 2 GB that an ONNX file can hold; use a smaller "
            "encoder, or --precision=float16"
        ) from error
    images, batch = _sample(embedder, view, measured=precision != "float32")
    expected = _points(jax.jit(_function(embedder, model)), embedder.params, batch)
    with writing(path), replacing(path) as temporary:
        if precision == "int8":
            _quantize(converted, temporary)
        else:
            temporary.write_bytes(converted.SerializeToString())
        found = _run(temporary, _uncropped(batch, view) if pixels else batch)
        compared = _compared(embedder.space, images, expected, found)
        _check(compared, expected, precision)
    return compared


def _plain(model: Embedder, dtype: jnp.dtype) -> Embedder:
    """A model without what suits one kind of device, and with a dtype of its products."""
    options = {"dtype": dtype, "remat": False} if hasattr(model.encoder, "dtype") else {}
    if isinstance(model.encoder, VisionTransformer):
        options |= {"tensor_cores": False, "attention": "xla"}
    return model.clone(encoder=model.encoder.clone(**options))


def _function(embedder: TrainedEmbedder, model: Embedder) -> _Function:
    """The function from parameters and pixels of the view, or features, to points."""
    part, space, data = embedder.part, embedder.space, embedder.config.data
    scaling = (data.mean, data.std)
    embed = embed_function(model, scaling, lambda _: {part: space}, embedder.config.eval.scales)
    projection = embedder.projection

    def points(params: PyTree, images: Array) -> Array:
        found = embed(params, images)[part]
        return found if projection is None else _projected(projection, found)

    return points


def _projected(projection: Projection, points: Array) -> Array:
    """`Projection.apply` in float32."""
    scales = np.ones_like(projection.variances)
    if projection.whiten:
        scales = np.sqrt(np.mean(projection.variances) / projection.variances)
    components = (projection.components * scales[:, None]).T.astype(np.float32)
    features = projection.space.features(points) - projection.mean.astype(np.float32)
    return projection.space.embed(jnp.matmul(features, components, precision="highest"))


def _metadata(embedder: TrainedEmbedder, precision: str) -> dict[str, str]:
    """What the file says about itself, in JSON."""
    data = embedder.config.data
    facts = {
        "space": describe_space(embedder.space),
        "fingerprint": embedder.fingerprint,
        "embedding": embedder.part,
        "precision": precision,
        "version": __version__,
    }
    if embedder.takes_pixels:
        view = ("test_view", "image_size", "resize", "channels")
        facts["view"] = {name: data[name] for name in view}
        facts |= {"mean": list(data.mean), "std": list(data.std)}
    return {f"hypjax.{name}": json.dumps(value) for name, value in facts.items()}


def _sample(embedder: TrainedEmbedder, view: View, *, measured: bool) -> tuple[str, Batch]:
    """Images of the view, or features: the run's test images to measure on, if they are there."""
    if measured:
        try:
            test = open_splits(embedder.config).test
        except (OSError, UserError):
            pass
        else:
            places = np.unique(np.linspace(0, len(test) - 1, min(_SAMPLE, len(test))).astype(int))
            (batch,) = readable_batches(test.take(places), view, len(places))
            read = np.setdiff1d(np.arange(len(places)), list(batch.broken))
            if len(read) >= _PATTERNS:
                return f"{len(read)} test images of the run", np.asarray(batch.images)[read]
    rng = np.random.default_rng(0)
    if not embedder.takes_pixels:
        shape = (_PATTERNS, embedder.model.encoder.dim)
        return f"{_PATTERNS} random features", rng.normal(size=shape).astype(np.float32)
    return f"{_PATTERNS} random patterns", np.stack([_pattern(rng, view) for _ in range(_PATTERNS)])


def _pattern(rng: np.random.Generator, view: View) -> UInt8[np.ndarray, "side side channels"]:
    """A smooth picture: pixels that are independent would all look alike to a model."""
    coarse = from_array(rng.integers(0, 256, (4, 4, view.channels), np.uint8))
    return array(coarse.resize((view.side, view.side), Image.Resampling.BICUBIC))


def _uncropped(images: Batch, view: View) -> Batch:
    """Adds the margin that the model cuts off, so that it sees images of the view as they are."""
    if view.test == "squash":
        return images
    before = round((view.resize - view.side) / 2)
    margins = (before, view.resize - view.side - before)
    return np.pad(images, ((0, 0), margins, margins, (0, 0)))


def _points(function: _Function, params: PyTree, images: Batch) -> Float[np.ndarray, "batch dim"]:
    """Points by hypjax, of whole batches."""
    padded = np.pad(images, ((0, -len(images) % _BATCH), *[(0, 0)] * (images.ndim - 1)))
    batches = np.split(padded, len(padded) // _BATCH)
    with jax.default_matmul_precision("highest"):  # Also of encoders that do not ask for it.
        found = [np.asarray(function(params, batch)) for batch in batches]
    return np.concatenate(found)[: len(images)]


def _run(path: pathlib.Path, images: Batch) -> Float[np.ndarray, "batch dim"]:
    """Points by ONNX Runtime: of one image, then of batches."""
    session = open_session(path)
    (own,) = session.get_inputs()
    batches = [images[:1], *np.split(images[1:], range(_BATCH, len(images) - 1, _BATCH))]
    with _runtime_explained():
        return np.concatenate([session.run(None, {own.name: batch})[0] for batch in batches])


def open_session(path: pathlib.Path) -> onnxruntime.InferenceSession:
    """Opens a file on the CPU; what ONNX Runtime refuses is a `UserError`."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # Errors are raised, too.
    with _runtime_explained():
        return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def _runtime_explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ONNX Runtime has many types of its own.
        raise UserError(
            f"ONNX Runtime {onnxruntime.__version__} refuses the model ({error}); with an encoder "
            "of hypjax's, please report it"
        ) from error


def _quantize(model: onnx.ModelProto, path: pathlib.Path) -> None:
    """Writes a model with the encoder's products in int8, scaled by each column of weights."""
    products = [node.name for node in model.graph.node if node.op_type == "MatMul"]
    head = [name for name in products if not name.startswith("encoder")]
    if len(head) == len(products):
        raise UserError(
            "int8 is for matrix products of the encoder, and this one has none; use "
            "--precision=float32"
        )
    logging.getLogger().addFilter(_quiet)  # It recommends a preparation that changes nothing here.
    try:
        quantize_dynamic(
            model,
            path,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=head,
        )
    finally:
        logging.getLogger().removeFilter(_quiet)


def _quiet(record: logging.LogRecord) -> bool:
    return "pre-processing" not in record.getMessage()


def _compared(space: Space, images: str, expected: np.ndarray, found: np.ndarray) -> Written:
    distances, others = (_distances(space, points) for points in (expected, found))
    change = np.abs(distances - others).max() / max(np.median(distances), 1e-30)
    for each in (distances, others):
        np.fill_diagonal(each, np.inf)  # No image is its own neighbour.
    number = min(_NEIGHBOURS, max(1, (len(expected) - 1) // 4))  # More would agree by chance.
    nearest, theirs = (np.argsort(each, axis=1)[:, :number] for each in (distances, others))
    pairs = zip(nearest, theirs, strict=True)
    kept = sum(len(np.intersect1d(a, b)) for a, b in pairs)
    error = np.abs(expected - found).max()
    return Written(images, float(error), kept / max(nearest.size, 1), float(change))


def _distances(space: Space, points: np.ndarray) -> Float[np.ndarray, "n n"]:
    with jax.enable_x64(True):
        return np.array(space.distance_matrix(*[points.astype(np.float64)] * 2))


def _check(compared: Written, expected: np.ndarray, precision: str) -> None:
    """Raises an error if a model disagrees with hypjax."""
    if precision == "float32":
        scale = max(1.0, float(np.abs(expected).max()))
        # Near the edge of a ball, small differences of coordinates change distances.
        if not (compared.error <= _TOLERANCE * scale and compared.change <= _LARGEST_CHANGE):
            raise UserError(
                f"ONNX Runtime's points differ from hypjax's by up to {compared.error:.2g}, and "
                f"their distances by {compared.change:.2g} of the median, for {compared.images}; "
                "nothing was written. Please report it"
            )
    elif not (compared.agreement >= _LEAST_AGREEMENT and np.isfinite(compared.error)):
        raise UserError(
            f"in {precision}, {compared.agreement:.0%} of the nearest neighbours remain among "
            f"{compared.images}, less than {_LEAST_AGREEMENT:.0%}; nothing was written. Use "
            "--precision=float32"
        )
