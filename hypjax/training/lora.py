"""LoRA (Hu et al., ICLR 2022): low-rank adapters of an encoder's kernels, as parameters.

A kernel W with an adapter acts as W + (α/r)·A·B; in the encoder, only A and B are trained. The sum
is computed in float32 before the modules are applied, so modules know nothing of adapters.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PRNGKeyArray, PyTree

from hypjax.config.choices import matches, parameter_path
from hypjax.errors import UserError
from hypjax.training.optim import ADAPTER


class Lora(NamedTuple):
    """Rank, scale and kernels of the adapters."""

    rank: int  # r, the inner dimension of A·B.
    alpha: float  # α.
    targets: tuple[str, ...]  # Names or paths of parameters; kernels below them get adapters.


def with_adapters(
    params: Mapping[str, PyTree], lora: Lora, frozen: Collection[str], key: PRNGKeyArray
) -> dict[str, PyTree]:
    """Adds an adapter to each kernel that the targets name, unless it is frozen.

    For a kernel [n, m], {"kernel": W} becomes {"kernel": W, "lora": {"a": A [n, rank], "b": B
    [rank, m]}}; a convolution's [h, w, i, o] counts as [h·w·i, o]. As in PEFT, A is uniform in
    ±1/√n (Kaiming, slope √5), and B is zero. A target without an unfrozen kernel is a
    `UserError`.
    """
    flat = flatten_dict(params, keep_empty_nodes=True)
    kernels = [path for path in flat if path[-1] == "kernel"]
    for name in frozen:
        kernels = [path for path in kernels if not matches(parameter_path(name), path)]
    targeted = set()
    for target in lora.targets:
        matching = {path for path in kernels if matches(parameter_path(target), path)}
        if not matching:
            problem = f"config.train.lora_targets names {target}"
            raise UserError(f"{problem}, but this model trains no kernel there")
        targeted |= matching
    keys = jax.random.split(key, len(targeted))
    for path, kernel_key in zip(sorted(targeted), keys, strict=True):
        *input_sizes, outputs = flat[path].shape
        inputs = math.prod(input_sizes)
        bound = 1 / math.sqrt(inputs)
        a = jax.random.uniform(kernel_key, (inputs, lora.rank), minval=-bound, maxval=bound)
        flat[*path[:-1], ADAPTER, "a"] = a
        flat[*path[:-1], ADAPTER, "b"] = jnp.zeros((lora.rank, outputs))
    return unflatten_dict(flat)


def merged(model: PyTree, lora: Lora | None) -> PyTree:
    """Merges each adapter into its kernel, in float32; returns the parameters of the modules."""
    if lora is None:
        return model
    flat = flatten_dict(model, keep_empty_nodes=True)
    for module in [path[:-2] for path in flat if path[-2:] == (ADAPTER, "a")]:
        a, b = flat.pop((*module, ADAPTER, "a")), flat.pop((*module, ADAPTER, "b"))
        kernel = flat[*module, "kernel"]
        change = jnp.matmul(a, b, precision="highest").reshape(kernel.shape)
        flat[*module, "kernel"] = kernel + lora.alpha / lora.rank * change
    return unflatten_dict(flat)
