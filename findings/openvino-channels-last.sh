#!/usr/bin/env bash
# OpenVINO normalises bytes with three channels last several times slower than with channels first.
#
# Versions: openvino 2026.4.1, numpy 2.4.6.
#
# Source: https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference/optimize-preprocessing/preprocessing-api-details.html
# describes steps of preprocessing, whose own pipeline moves bytes to channels first by itself. That
# a graph which does it afterwards, as ONNX files do, is slower is not said.
#
# Input: 32 images of 192 x 192 x 3 bytes through x -> x * scale + shift for each channel, then a
# transposition to channels first and a mean; or transposed first, as bytes, and then scaled.
#
# Expected: the same time, since the same numbers are read and computed.
#
# Seen: on two cores with AVX-512 the fused layer takes 5.7 ms with channels last and 1.0 ms with
# channels first.
#
# Why it matters: decoders return channels last. hypjax's translation transposes bytes before
# anything else.
#
# The script exits with 0 while this is so, and with 1 once it has changed, for instance if the layer
# is fused no longer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet openvino==2026.4.1 numpy==2.4.6
# OpenVINO reports each import to its makers through this package.
"$work/venv/bin/pip" uninstall --quiet --yes openvino-telemetry

"$work/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import openvino
from openvino import opset13 as ops

images = np.random.default_rng(0).integers(0, 256, (32, 192, 192, 3), np.uint8)
scale, shift = np.float32([0.02, 0.03, 0.04]), np.float32([-1, -2, -3])


def program(transposed_first):
    given = ops.parameter([-1, 192, 192, 3], np.uint8)
    order, shape = [0, 3, 1, 2], [1, 1, 1, 3]
    x = ops.transpose(given, order) if transposed_first else given
    shape = [1, 3, 1, 1] if transposed_first else shape
    x = ops.convert(x, np.float32)
    x = ops.add(ops.multiply(x, scale.reshape(shape)), shift.reshape(shape))
    x = x if transposed_first else ops.transpose(x, order)
    model = openvino.Model([ops.reduce_mean(x, [2, 3])], [given])
    hints = {"PERF_COUNT": True, "INFERENCE_PRECISION_HINT": "f32"}
    return openvino.compile_model(model, "CPU", hints).create_infer_request()


seconds, results = {}, {}
for first in (False, True):
    request, rows = program(first), []
    for _ in range(20):
        results[first] = request.infer({0: images})[0]
        layers = request.get_profiling_info()
        rows.append(sum(x.real_time.total_seconds() for x in layers if x.node_type == "MulAdd"))
    seconds[first] = np.median(rows)
np.testing.assert_allclose(results[False], results[True], rtol=1e-4, atol=1e-4)
print(f"channels last {1e3 * seconds[False]:.2f} ms, first {1e3 * seconds[True]:.2f} ms")
sys.exit(not seconds[False] > 2 * seconds[True] > 0)
PYTHON
