#!/usr/bin/env bash
# On CPUs, jax.lax.optimization_barrier does not keep XLA from computing a value twice.
#
# Versions: jax 0.10.2, jaxlib 0.10.2.
#
# Source: https://docs.jax.dev/en/latest/_autosummary/jax.lax.optimization_barrier.html: it "prevents
# the compiler from moving operations across the barrier", and preserves scheduling.
#
# Input: a depthwise convolution of 5 x 5 as a sum of 25 shifted products, as Lite encoders have; its
# clamped result enters a matrix product, and its gradient's mask another array. Between sum and use
# stands nothing, or a barrier, or a loop of two iterations over halves of the batch.
#
# Expected: the barrier makes XLA write the clamped result once, and read it twice.
#
# Seen: with the barrier, as without, the program for a CPU holds the sum twice, in two fusions: the
# barrier is removed before XLA fuses. Only the loop holds it once. On EfficientNet-Lite0's step
# that saves no time, though: the loop was slower (32 images/s in place of 41) than the second sum.
#
# Why it matters: barriers cannot keep a CPU from computing a layer twice. Whether it does, only the
# compiled program shows.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2

JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import re
import sys

import jax
import jax.numpy as jnp


def shifted(x, kernel):
    side = x.shape[1] - 4
    terms = [x[:, i : i + side, j : j + side] * kernel[i, j] for i in range(5) for j in range(5)]
    return sum(terms)


def by_halves(x, kernel):
    halves = x.reshape(2, -1, *x.shape[1:])
    sums = jax.lax.map(lambda half: shifted(half, kernel), halves)
    return sums.reshape(-1, *sums.shape[2:])


def products(convolve, barrier):
    def step(x, kernel, weights, grad):
        y = jnp.clip(convolve(x, kernel), 0, 6)
        y = jax.lax.optimization_barrier(y) if barrier else y
        return y.reshape(-1, y.shape[-1]) @ weights, jnp.where((y > 0) & (y < 6), grad, 0)

    shapes = (64, 12, 12, 96), (5, 5, 96), (96, 32), (64, 8, 8, 96)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.jit(step).lower(*given).compile().as_text()
    return len(re.findall(r" multiply\(", program))


counts = products(shifted, False), products(shifted, True), products(by_halves, False)
print("products of the sum in the program: plain {}, with a barrier {}, in a loop {}".format(*counts))
sys.exit(not (counts[0] == counts[1] >= 50 and 25 <= counts[2] < 50))
PYTHON
