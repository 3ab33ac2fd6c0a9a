#!/usr/bin/env bash
# torch.compile on CPUs loses the digits of small values of atanh and expm1.
#
# Version: torch 2.13.0, on a CPU with AVX2; the compiler is the system's g++.
#
# Source: `torch.compile` is to return what the function returns, up to rounding. Its code for CPUs
# computes these functions by formulas of its own.
#
# Input: atanh(1e-7), by which Poincaré distances of 2e-7 are computed, expm1(1e-7) and acosh(2e19)
# in float32, for 4 and for 128 numbers at once.
#
# Expected: the values of the function without `torch.compile`, which are right to 1e-7.
#
# Seen: atanh and expm1 are off by 19%, of 4 numbers as of 128, and acosh(2e19), which is 45.1, is
# infinite.
#
# Why it matters: distances of near neighbours, which decide Recall@1, and gradients of close
# positives depend on the compiler. hypjax computes such distances
# without cancellation on all devices.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 setuptools==84.2.1

cat >"$work/small.py" <<'PYTHON'
import torch


def functions(small, large):
    return torch.atanh(small), torch.expm1(small), torch.acosh(large)


def errors(count):
    """Largest relative errors of the compiled functions, to the same in float64."""
    inputs = torch.full([count], 1e-7), torch.full([count], 2e19)
    exact = functions(*(x.double() for x in inputs))
    compiled = torch.compile(functions, dynamic=False)(*inputs)
    pairs = zip(compiled, exact, strict=True)
    return [float(((x.double() - y) / y).abs().max()) for x, y in pairs]


seen = {count: errors(count) for count in (4, 128)}
for count, off in seen.items():
    print(f"{count} numbers, relative errors of atanh, expm1, acosh:", *(f"{x:.1e}" for x in off))
if min(*seen[4], *seen[128]) < 0.01:
    raise SystemExit("this has changed")
PYTHON
TORCHINDUCTOR_CACHE_DIR="$work/cache" "$work/venv/bin/python" -W ignore "$work/small.py"
echo "as described: compiled atanh and expm1 of small numbers cancel"
