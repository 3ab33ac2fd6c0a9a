#!/usr/bin/env bash
# flax.linen.LayerNorm loses the deviation of rows whose mean exceeds it by far.
#
# Versions: flax 0.12.8, jax 0.10.2, numpy 2.4.6.
#
# Source: `LayerNorm` has `use_fast_variance=True`, which its page calls faster and numerically less
# stable (https://flax-linen.readthedocs.io): the variance is E[x²] − E[x]², in float32.
#
# Input: four rows of 384 numbers with mean 1,000 and deviation 0.1, in float32, which resolves
# them to 6e-5. As a control, the same layer with `use_fast_variance=False`.
#
# Expected: outputs with deviation 1.
#
# Seen: the outputs' deviation is 71; rows whose variance is rounded to 0 or below become a thousand
# times too long. The control's is 1.0.
#
# Why it matters: token streams of Transformers have coordinates of some hundreds, and features that
# were not centred are rows of this kind. hypjax subtracts the mean first.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet flax==0.12.8 jax==0.10.2 numpy==2.4.6

cat >"$work/norm.py" <<'PYTHON'
import flax.linen as nn
import numpy as np

x = (1000 + 0.1 * np.random.default_rng(0).normal(size=(4, 384))).astype(np.float32)
parameters = {"params": {"scale": np.ones(384), "bias": np.zeros(384)}}
fast, exact = (
    float(nn.LayerNorm(use_fast_variance=fast).apply(parameters, x).std()) for fast in (True, False)
)
print(f"deviation of the outputs: {fast:.2f} by default, {exact:.4f} without fast variance")
if fast < 5 or abs(exact - 1) > 0.01:
    raise SystemExit("this has changed")
PYTHON
JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/norm.py"
echo "as described: the fast variance cancels"
