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
    patterns = list(map(parameter_path, frozen))
    kernels = [p for p in flat if p[-1] == "kernel" and not any(matches(x, p) for x in patterns)]
    targeted = set()
    for target in lora.targets:
        matching = {path for path in kernels if matches(parameter_path(target), path)}
        if not matching:
            raise UserError(
                f"config.train.lora_targets names {target}, but this model trains no kernel there"
            )
        targeted |= matching
    for path, path_key in zip(sorted(targeted), jax.random.split(key, len(targeted)), strict=True):
        *inputs, outputs = flat[path].shape
        size = math.prod(inputs)
        bound = 1 / math.sqrt(size)
        a = jax.random.uniform(path_key, (size, lora.rank), minval=-bound, maxval=bound)
        adapter = {"a": a, "b": jnp.zeros((lora.rank, outputs))}
        flat |= {(*path[:-1], ADAPTER, name): value for name, value in adapter.items()}
    return unflatten_dict(flat)


def merged(model: PyTree, lora: Lora | None) -> PyTree:
    """Merges each adapter into its kernel, in float32; returns the parameters of the modules."""
    if lora is None:
        return model
    flat = flatten_dict(model, keep_empty_nodes=True)
    for path in [path for path in flat if path[-2:] == (ADAPTER, "a")]:
        module = path[:-2]
        a, b = (flat.pop((*module, ADAPTER, name)) for name in ("a", "b"))
        kernel = flat[*module, "kernel"]
        change = jnp.matmul(a, b, precision="highest").reshape(kernel.shape)
        flat[*module, "kernel"] = kernel + lora.alpha / lora.rank * change
    return unflatten_dict(flat)
