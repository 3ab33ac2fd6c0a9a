#!/usr/bin/env bash
# OpenVINO turns NaN into ordinary numbers in the operations of which encoders are made.
#
# Versions: openvino 2026.4.1, onnxruntime 1.32.0, onnx 1.20.0 (opset 17), numpy 2.4.6.
#
# Source: the operators of ONNX that an encoder has in its attention (Softmax), its activations
# (Clip of ReLU6, Max of ReLU) and its pooling (ReduceMax, MaxPool), on the CPU.
#
# Input: models of one such node each, and a row of four numbers of which one is NaN, as an image of
# an overflow gives it. As a control, ONNX Runtime runs the same models.
#
# Expected: NaN, as NumPy, JAX and PyTorch return it, so that the caller sees that the embedding of
# this image is no number.
#
# Seen: by OpenVINO, Clip, Max, ReduceMax and MaxPool return finite numbers, and Softmax returns NaN
# in its place only and 0 elsewhere, not NaN for the row. ONNX Runtime keeps NaN in Softmax, Clip and
# Max; its MaxPool drops it, and its ReduceMax returns 1, the number before it, where 3 comes after.
# So a check for finite embeddings behind such an engine may find nothing.
#
# Why it matters: an image whose pixels overflow an encoder has neighbours like any other. hypjax
# refuses to translate weights with NaN, and compares each translated encoder with JAX.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet openvino==2026.4.1 onnxruntime==1.32.0 onnx==1.20.0 \
  numpy==2.4.6

cat >"$work/nodes.py" <<'PYTHON'
import sys

sys.modules["openvino_telemetry"] = None  # Imports are not to be reported.
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

ROW = np.array([[[[1.0, np.nan, -2.0, 3.0]]]], np.float32)
BOUND = {"zero": np.float32(0), "six": np.float32(6)}
NODES = {
    "Softmax": helper.make_node("Softmax", ["x"], ["y"], axis=-1),
    "Clip": helper.make_node("Clip", ["x", "zero", "six"], ["y"]),
    "Max": helper.make_node("Max", ["x", "zero"], ["y"]),
    "ReduceMax": helper.make_node("ReduceMax", ["x"], ["y"], axes=[3], keepdims=1),
    "MaxPool": helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[1, 4]),
}


def runs(node):
    """The node's output by OpenVINO and by ONNX Runtime."""
    used = [numpy_helper.from_array(BOUND[name], name) for name in node.input if name != "x"]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None if name == "y" else ROW.shape)
        for name in "xy"
    ]
    graph = helper.make_graph([node], "one node", values[:1], values[1:], used)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data = model.SerializeToString()
    yield openvino.compile_model(openvino.Core().read_model(data), "CPU")([ROW])[0]
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    yield session.run(None, {"x": ROW})[0]


changed = False
for name, node in NODES.items():
    by_openvino, by_onnxruntime = (y.ravel() for y in runs(node))
    print(f"{name}: OpenVINO {by_openvino}, ONNX Runtime {by_onnxruntime}")
    expected = {"Softmax": [1, 4], "Clip": [0, 1], "Max": [0, 1]}.get(name, [0, 0])
    changed |= [int(np.isnan(y).sum()) for y in (by_openvino, by_onnxruntime)] != expected
sys.exit(changed)
PYTHON
if ! "$work/venv/bin/python" "$work/nodes.py"; then
  echo "this has changed"
  exit 1
fi
echo "as described: OpenVINO returns numbers where NaN was"
