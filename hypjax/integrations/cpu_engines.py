"""Engines that run frozen models on CPUs: OpenVINO and ONNX Runtime.

A program maps a batch, of any size, as the function does that was translated to it.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Shaped

from hypjax.integrations.onnx_rules import translate
from hypjax.system.machine import usable_cores

# Images for each core that an engine maps at once: what more of them compute between layers leaves
# the caches, which costs OpenVINO a fifth of its speed, and ONNX Runtime more than half.
_SLICE = 4


def _import_openvino() -> Any:
    """Imports OpenVINO without its telemetry, which otherwise reports each import to its makers."""
    if "openvino" not in sys.modules and "openvino_telemetry" not in sys.modules:
        modules: dict[str, Any] = sys.modules
        modules["openvino_telemetry"] = None  # As if it were not installed.
        try:
            return importlib.import_module("openvino")
        finally:
            del modules["openvino_telemetry"]
    return importlib.import_module("openvino")


def _in_slices(
    function: Callable[[np.ndarray], np.ndarray], inputs: Shaped[np.ndarray, "b ..."]
) -> Float[np.ndarray, "b ..."]:
    """Maps one slice of a batch after another."""
    size = _SLICE * usable_cores()
    starts = range(0, max(len(inputs), 1), size)
    return np.concatenate([function(inputs[i : i + size]) for i in starts])


class _Program:
    @staticmethod
    def translate(function: Callable[[Any], Any], example: jax.ShapeDtypeStruct) -> bytes:
        """Translates a function of a batch of examples to the content of an ONNX file."""
        return translate(function, example, "inputs", "outputs").SerializeToString()


class OpenVinoProgram(_Program):
    """A program of OpenVINO, in float32 or, where the processor multiplies it, in bfloat16."""

    def __init__(self, content: bytes, precision: str) -> None:
        openvino = _import_openvino()
        core = openvino.Core()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",  # All cores share a batch.
            "INFERENCE_NUM_THREADS": usable_cores(),
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
        }
        model = core.compile_model(core.read_model(content), "CPU", settings)
        self._request, self._lock = model.create_infer_request(), threading.Lock()
        # Where the processor has no bfloat16, OpenVINO takes float32 without a word.
        used = model.get_property("INFERENCE_PRECISION_HINT").to_string()
        self.precision = {"f32": "float32", "bf16": "bfloat16"}[used]
        self.description = f"OpenVINO {openvino.__version__.partition('-')[0]} in {self.precision}"

    def __call__(self, inputs: Shaped[np.ndarray, "b ..."]) -> Float[np.ndarray, "b ..."]:
        """Maps a batch."""
        return _in_slices(self._map, inputs)

    def _map(self, inputs: np.ndarray) -> np.ndarray:
        with self._lock:
            (outputs,) = self._request.infer({0: inputs}, share_inputs=True).values()
            return np.array(outputs)  # A copy, since the next slice uses the same memory.


class OnnxRuntimeProgram(_Program):
    """A program of ONNX Runtime, in float32."""

    precision = "float32"

    def __init__(self, content: bytes, precision: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = usable_cores()
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(content, options, providers=providers)
        self.description = f"ONNX Runtime {onnxruntime.__version__} in float32"

    def __call__(self, inputs: Shaped[np.ndarray, "b ..."]) -> Float[np.ndarray, "b ..."]:
        """Maps a batch."""
        return _in_slices(self._map, inputs)

    def _map(self, inputs: np.ndarray) -> np.ndarray:
        (outputs,) = self._session.run(None, {"inputs": inputs})
        return outputs
