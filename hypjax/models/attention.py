"""Scaled dot-product attention with the fastest kernel of each device."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import pathlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxtyping import Array, Float

from hypjax.errors import UserError

Heads: TypeAlias = Float[Array, "batch tokens heads dim"]
_MAX_ERROR = 0.05  # Of gradients, relative to their size; bfloat16 rounds by 1% at most.


def attend(
    query: Heads, key: Heads, value: Heads, length: int | None = None, kernel: str = "auto"
) -> Heads:
    """Scaled dot-product attention, softmax(q·kᵀ / √dim)·v in each head (Vaswani et al., Eq. 1).

    The softmax is always float32.

    Args:
        query: Queries of all images.
        key: Keys; their number of tokens may be another one.
        value: Values of the keys.
        length: Of keys and values, the first so many tokens count; None for all.
        kernel: In half precision on NVIDIA GPUs, `cudnn` is cuDNN's fused kernel, which does not
            store the matrix of probabilities (Dao et al., FlashAttention, NeurIPS 2022), and `xla`
            the program of other devices. `auto` times both for these shapes, with their gradients,
            and takes the faster one, unless cuDNN's gradients are wrong.

    Raises:
        UserError: The kernel is `cudnn`, which this GPU does not support for these shapes.
    """
    kernels = {"cpu": _by_head, "default": _by_xla}
    if _cudnn_is_chosen(kernel, query, key, length):
        kernels["cuda"] = _by_cudnn
    kernels = {name: functools.partial(kernel, length=length) for name, kernel in kernels.items()}
    return jax.lax.platform_dependent(query, key, value, **kernels)


def _by_xla(query: Heads, key: Heads, value: Heads, length: int | None = None) -> Heads:
    lengths = None if length is None else jnp.full(len(query), length, jnp.int32)
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths, implementation="xla"
    )


def _by_head(query: Heads, key: Heads, value: Heads, length: int | None = None) -> Heads:
    """Attention for CPUs, where products take a third of the time if each head is contiguous."""
    scale = 1 / math.sqrt(query.shape[-1])
    if query.dtype == jnp.float32:  # Half precision would round the scaled queries.
        query, scale = query * scale, 1
    heads = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query, key, value = jax.lax.optimization_barrier(tuple(heads))  # Or XLA undoes it.
    key, value = key[:, :, :length], value[:, :, :length]
    full = {"preferred_element_type": jnp.float32}
    logits = scale * jnp.einsum("bhqd,bhkd->bhqk", query, key, **full)
    # The softmax's sums divide the result, which is smaller than the matrix of probabilities.
    weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value, **full)
    mixed = (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(value.dtype)
    return jnp.swapaxes(jax.lax.optimization_barrier(mixed), 1, 2)


def _by_cudnn(query: Heads, key: Heads, value: Heads, length: int | None = None) -> Heads:
    """Attention by cuDNN's kernel, whose gradient requires even numbers of tokens."""
    outputs, tokens = query.shape[1], key.shape[1]
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)
    )
    length = tokens if length is None else length
    lengths = None if length == key.shape[1] else jnp.full(len(key), length, jnp.int32)
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths, implementation="cudnn"
    )[:, :outputs]


def _cudnn_is_chosen(kernel: str, query: Heads, key: Heads, length: int | None) -> bool:
    if kernel == "xla" or query.dtype.itemsize != 2:
        return False
    if kernel == "auto" and len(query) == 1:  # Such as where a model is initialised.
        return False
    if jax.default_backend() != "gpu":
        return kernel == "cudnn"  # For a program that is compiled for a GPU, but not here.
    found = _comparison(query.shape, key.shape, jnp.dtype(query.dtype), length)
    if found.failure and (kernel == "cudnn" or jax.process_count() > 1):
        raise UserError(
            f"cuDNN's fused attention cannot be used ({found.failure}); set run.attention to xla"
        )
    if found.failure:
        _warn_once(found.failure)
    return kernel == "cudnn" or found.faster


class _Comparison(NamedTuple):
    """Of cuDNN's kernel with XLA's program, on this device."""

    failure: str  # Why the kernel cannot be used; empty if it can.
    faster: bool


@functools.cache
def _comparison(
    queries: tuple[int, ...], keys: tuple[int, ...], dtype: jnp.dtype, length: int | None
) -> _Comparison:
    """Compares both with their gradients, for these shapes; or reads what was found before."""
    device = jax.local_devices()[0]
    versions = jaxlib.__version__, device.client.platform_version, _cudnn_version()
    case = (queries, keys, str(dtype), length, device.device_kind, jax.process_count(), versions)
    folder = jax.config.jax_compilation_cache_dir or "://"
    name = f"attention-{hashlib.sha256(repr(case).encode()).hexdigest()[:32]}.json"
    path = None if "://" in folder else pathlib.Path(folder) / name
    with contextlib.suppress(OSError, ValueError, TypeError):
        return _Comparison(**json.loads(path.read_text() if path else ""))
    with jax.ensure_compile_time_eval():  # Models call this while they are traced.
        found = _compare(queries, keys, dtype, length)
    if path and not found.failure:  # A failure may pass.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found._asdict()))
    return found


def _cudnn_version() -> str:
    for package in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def _compare(
    queries: tuple[int, ...], keys: tuple[int, ...], dtype: jnp.dtype, length: int | None
) -> _Comparison:
    # The real shapes, since a kernel may be right and fast for few images, and not for many.
    rng = np.random.default_rng(0)
    heads = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in (queries, keys, keys)]
    try:
        ours, seconds = _gradients(_by_cudnn, heads, length)
    except Exception as failure:  # Its type depends on the GPU and on libraries.
        reason = (str(failure).splitlines() or [type(failure).__name__])[0]
        return _Comparison(reason, faster=False)
    try:
        expected, others_seconds = _gradients(_by_xla, heads, length)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or len(heads[0]) == 1:
            raise
        # XLA's program stores all probabilities. A part of the images tells whether cuDNN is right.
        fewer = [(shape[0] // 2, *shape[1:]) for shape in (queries, keys)]
        found = _compare(*fewer, dtype, length)
        return found._replace(faster=not found.failure)
    error = max(map(_relative_error, ours, expected), key=lambda error: (math.isnan(error), error))
    if not error < _MAX_ERROR:
        return _Comparison(f"its gradients are off by {error:.0%}", faster=False)
    # Processes of one run must not decide by time: if their programs differ, they wait forever.
    return _Comparison("", faster=seconds < others_seconds or jax.process_count() > 1)


def _gradients(
    attention: Callable[..., Heads], heads: Sequence[Heads], length: int | None
) -> tuple[tuple[Heads, ...], float]:
    """Gradients by queries, keys and values; and the seconds that they take with the forward."""

    def total(query: Heads, key: Heads, value: Heads) -> Array:
        return jnp.sum(attention(query, key, value, length=length) * query)

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    found = jax.block_until_ready(gradient(*heads))
    return found, min(_seconds(gradient, heads) for _ in range(3))


def _relative_error(x: Heads, expected: Heads) -> float:
    """Root mean square of the error, relative to that of the values."""
    x, expected = (each.astype(jnp.float32) for each in (x, expected))
    return float(jnp.sqrt(jnp.mean((x - expected) ** 2) / jnp.mean(expected**2)))


def _seconds(function: Callable[..., Any], arguments: Sequence[Heads]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - started


@functools.cache
def _warn_once(failure: str) -> None:
    warnings.warn(
        f"cuDNN's fused attention cannot be used ({failure}); XLA's is used instead", stacklevel=2
    )
