#!/usr/bin/env bash
# safetensors 0.8.0 writes other numbers for arrays of NumPy that are not in C order.
#
# Versions: safetensors 0.8.0 (the newest) and 0.7.0, numpy 2.4.6, jax 0.10.2.
#
# Source: the docstring of `safetensors.numpy.save_file` says that tensors "need to be contiguous
# and dense" (https://huggingface.co/docs/safetensors/api/numpy); nothing checks it. Up to 0.7.0 the
# library called `tensor.tobytes()`, which copies an array in C order. Since 0.8.0 it passes the
# address of an array's memory and the number of its bytes.
#
# Input: the array [[0, 1, 2], [3, 4, 5]] in Fortran order, and as every other row and column of a
# larger array; and a contiguous array as a control.
#
# Expected: the arrays' values, as 0.7.0 writes them, or an error, as `safetensors.torch.save_file`
# raises for a tensor that is not contiguous.
#
# Seen in 0.8.0: `numpy.save_file`, `numpy.save` and, for arrays of NumPy, `flax.save_file` write a
# file of the right shape with other numbers, without a word: the memory in its own order.
#
# Why it matters: kernels are [inputs, outputs] in Flax and [outputs, inputs] in PyTorch, and
# `kernel.T` of NumPy is such an array. A model that is converted in this way loads without an
# error and has the right shapes, but its embeddings are wrong.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 jax==0.10.2

cat >"$work/write.py" <<'PYTHON'
import pathlib
import sys

import numpy as np
import safetensors
from safetensors import flax, numpy

values = np.arange(6, dtype=np.float32).reshape(2, 3)
large = np.full((4, 6), 9, np.float32)
large[::2, ::2] = values
arrays = {
    "contiguous": values,
    "Fortran order": np.asfortranarray(values),
    "every other row and column": large[::2, ::2],
}
file = pathlib.Path("a.safetensors")
writers = {
    "numpy.save_file": lambda array: numpy.save_file({"a": array}, file),
    "numpy.save": lambda array: file.write_bytes(numpy.save({"a": array})),
    "flax.save_file": lambda array: flax.save_file({"a": array}, file),
}
is_right = sys.argv[1] == "right"
changed = []
for layout, array in arrays.items():
    for name, write in writers.items():
        write(array)
        read = numpy.load_file(file)["a"]
        is_equal = read.shape == array.shape and np.array_equal(read, array)
        print(f"{safetensors.__version__}, {name}, {layout}: {'same' if is_equal else 'other'} numbers")
        if is_equal != (is_right or layout == "contiguous"):
            changed.append(f"{name} ({layout})")
if changed:
    raise SystemExit(f"this has changed: {', '.join(changed)}")
PYTHON

cd "$work"
for version in 0.7.0:right 0.8.0:wrong; do
    venv/bin/pip install --quiet "safetensors==${version%:*}"
    JAX_PLATFORMS=cpu venv/bin/python write.py "${version#*:}"
done
echo "as described: arrays that are not in C order are written as other numbers"
