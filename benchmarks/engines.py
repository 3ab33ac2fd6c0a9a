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
_ENGINES = ("openvino", "openvino:bfloat16", "onnxruntime")
_HALF = (0.5, 0.5, 0.5)


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times embedding of images of noise with random weights.

    The peer has the same engine's best from timm's model, and for `jax` PyTorch's. OpenVINO is also
    timed in bfloat16 where the processor multiplies it.
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

    peers = _peers(name, side, images)
    title = f"embedding of {count} images, {name}, {side} pixels"
    ours: Any = functools.partial(by_jax, jax.jit(embed))
    peer, peer_name = peers["jax"]
    yield measure.Task(f"{title}, jax", ours, peer, peer_name, items=count)
    for engine in _ENGINES:
        engine_name, _, precision = engine.partition(":")
        open_program: Any = integrations.find("run", engine_name)
        example = jax.ShapeDtypeStruct((side, side, 3), np.uint8)
        content = open_program.translate(functools.partial(embed, params), example)
        program = open_program(content, precision or "float32")
        if precision and program.precision != precision:
            continue
        ours = functools.partial(program, images)
        peer, peer_name = peers[engine]
        yield measure.Task(f"{title}, {engine}", ours, peer, peer_name, items=count)


def _peers(name: str, side: int, images: np.ndarray) -> dict[str, tuple[Any, str]]:
    """The model of timm in PyTorch and as engines convert it; or None and what is missing."""
    try:
        import onnxruntime
        import openvino
        import timm
        import torch
    except ImportError as error:
        return dict.fromkeys(("jax", *_ENGINES), (None, f"{error.name}"))
    pixels = np.moveaxis(np.float32(images), -1, 1).copy()
    sizes = {"img_size": side} if name.startswith("vit") else {}
    model, inputs = timm.create_model(name, num_classes=0, **sizes).eval(), torch.tensor(pixels)
    last = inputs.to(memory_format=torch.channels_last)
    converted = openvino.convert_model(
        model, example_input=inputs[:2], input=[-1, *pixels.shape[1:]]
    )
    # The engine's own layers take pixels as they are decoded, as ours do.
    steps = openvino.preprocess.PrePostProcessor(converted)
    steps.input().model().set_layout(openvino.Layout("NCHW"))
    steps.input().tensor().set_layout(openvino.Layout("NHWC"))
    steps.input().tensor().set_element_type(openvino.Type.u8)
    scaled = steps.input().preprocess().convert_element_type(openvino.Type.f32)
    scaled.mean([255 * x for x in _HALF]).scale([255 * x for x in _HALF])
    converted = steps.build()

    def by_openvino(precision: str) -> Any:
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
        request = openvino.compile_model(converted, "CPU", hints).create_infer_request()
        return lambda: request.infer({0: images}), f"OpenVINO {openvino.__version__[:8]}"

    file = io.BytesIO()
    axes = {"x": {0: "batch"}}
    torch.onnx.export(
        model, (inputs[:2],), file, input_names=["x"], dynamic_axes=axes, dynamo=False
    )
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return {
        "jax": (torch.inference_mode()(lambda: model(last)), f"torch {torch.__version__}"),
        "openvino": by_openvino("f32"),
        "openvino:bfloat16": by_openvino("bf16"),
        "onnxruntime": (
            lambda: session.run(None, {"x": pixels}),
            f"ONNX Runtime {onnxruntime.__version__}",
        ),
    }
