"""Speed of frozen encoders on CPUs by engine, beside the engine with its own copy of timm's."""

import functools
import io
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.measure import COLUMNS as COLUMNS
from hypjax.models import create_encoder
from hypjax.models.architectures import encoder_shapes
from hypjax.models.layers import normalize
from hypjax.system import integrations

_CASES = (("tf_efficientnet_lite0", 192, 32), ("vit_small_patch16_224", 224, 16))
_QUICK = (("tf_efficientnet_lite0", 64, 2),)
_ENGINES = ("openvino", "onnxruntime")
_HALF = (0.5, 0.5, 0.5)


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times embedding of images of noise with random weights, in float32.

    The peer has the same engine's best from timm's model, and for `jax` PyTorch's.
    """
    for name, side, count in _QUICK if options.quick else _CASES:
        yield from measure.measure(_tasks(name, side, count), options)


def _tasks(name: str, side: int, count: int) -> Iterator[measure.Task]:
    encoder, rng = create_encoder(name, image_size=side), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(rng.uniform(0.5, 1, x.shape) / max(1, np.prod(x.shape[:-1])) ** 0.5),
        encoder_shapes(encoder),
    )
    images = rng.integers(0, 256, (count, side, side, 3), np.uint8)

    def embed(params: Any, images: Any) -> Any:
        return encoder.apply({"params": params}, normalize(images, _HALF, _HALF))

    def by_jax(program: Any) -> None:
        jax.block_until_ready(program(params, images))

    pixels = np.moveaxis(np.float32(images), -1, 1).copy()
    peers = _peers(name, side, pixels)
    title = f"embedding of {count} images, {name}, {side} pixels"
    ours: Any = functools.partial(by_jax, jax.jit(embed))
    peer, peer_name = peers["jax"]
    yield measure.Task(f"{title}, jax", ours, peer, peer_name, items=count)
    for engine in _ENGINES:
        open_program: Any = integrations.find("run", engine)
        example = jax.ShapeDtypeStruct((side, side, 3), np.uint8)
        content = open_program.translate(functools.partial(embed, params), example)
        ours = functools.partial(open_program(content, "float32"), images)
        peer, peer_name = peers[engine]
        yield measure.Task(f"{title}, {engine}", ours, peer, peer_name, items=count)


def _peers(name: str, side: int, pixels: np.ndarray) -> dict[str, tuple[Any, str]]:
    """The model of timm in PyTorch and as engines convert it; or None and what is missing."""
    try:
        import onnxruntime
        import openvino
        import timm
        import torch
    except ImportError as error:
        return dict.fromkeys(("jax", *_ENGINES), (None, f"{error.name}"))
    sizes = {"img_size": side} if name.startswith("vit") else {}
    model, inputs = timm.create_model(name, num_classes=0, **sizes).eval(), torch.tensor(pixels)
    last = inputs.to(memory_format=torch.channels_last)
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    shape = [-1, *pixels.shape[1:]]
    converted = openvino.convert_model(model, example_input=inputs[:2], input=shape)
    request = openvino.compile_model(converted, "CPU", hints).create_infer_request()
    file = io.BytesIO()
    axes = {"x": {0: "batch"}}
    torch.onnx.export(
        model, (inputs[:2],), file, input_names=["x"], dynamic_axes=axes, dynamo=False
    )
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return {
        "jax": (torch.inference_mode()(lambda: model(last)), f"torch {torch.__version__}"),
        "openvino": (lambda: request.infer({0: pixels}), f"OpenVINO {openvino.__version__[:8]}"),
        "onnxruntime": (
            lambda: session.run(None, {"x": pixels}),
            f"ONNX Runtime {onnxruntime.__version__}",
        ),
    }
