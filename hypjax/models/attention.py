"""Scaled dot-product attention by the best kernel that a device has."""

import functools
import math
import warnings
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Heads: TypeAlias = Float[Array, "batch tokens heads dim"]
_ROUNDING = 0.05  # Of bfloat16's sums, beside values around 1.


def attend(query: Heads, key: Heads, value: Heads) -> Heads:
    """Mixes values by the softmax of queries' products with keys, in each head.

    On NVIDIA GPUs bfloat16 is attended by cuDNN's fused kernel, which keeps no matrix of
    probabilities in memory (Dao et al., FlashAttention, NeurIPS 2022); all else by XLA. The softmax
    is float32 everywhere.
    """
    kernels = {"cpu": _head_by_head, "default": _by_xla}
    if jax.default_backend() == "gpu" and query.dtype in (jnp.bfloat16, jnp.float16):
        if _cudnn_can(query.shape[1], query.shape[3], query.dtype):
            kernels["cuda"] = _by_cudnn
    return jax.lax.platform_dependent(query, key, value, **kernels)


_by_xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def _head_by_head(query: Heads, key: Heads, value: Heads) -> Heads:
    """The same for CPUs, whose products take a third of the time where each head lies together."""
    heads = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query, key, value = jax.lax.optimization_barrier(tuple(heads))  # They would be swapped back.
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(logits / math.sqrt(query.shape[-1]), axis=-1)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", shares.astype(value.dtype), value)
    return jnp.swapaxes(jax.lax.optimization_barrier(mixed), 1, 2)


def _by_cudnn(query: Heads, key: Heads, value: Heads) -> Heads:
    """The same by the fused kernel, whose gradient wants an even number of tokens."""
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    batch, tokens, *_ = query.shape
    if tokens % 2 == 0:
        return attention(query, key, value)
    query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
    real = jnp.full(batch, tokens, jnp.int32)
    return attention(query, key, value, key_value_seq_lengths=real)[:, :tokens]


@functools.cache
def _cudnn_can(tokens: int, dim: int, dtype: DTypeLike) -> bool:
    """Whether cuDNN attends so many tokens on this device, and XLA agrees with what comes out."""

    def probe(attention: object) -> jax.stages.Wrapped:
        def total(heads: Float[Array, "3 batch tokens heads dim"]) -> Array:
            return jnp.sum(attention(*heads) * heads[0])

        return jax.jit(jax.grad(total))

    try:
        with jax.ensure_compile_time_eval():  # This is called while a model is traced.
            heads = np.random.default_rng(0).normal(size=(3, 2, tokens, 1, dim))
            heads = jnp.asarray(heads, dtype)
            slope, expected = (probe(attention)(heads) for attention in (_by_cudnn, _by_xla))
            error = np.max(np.abs(np.asarray(slope - expected, np.float32)))
            reason = None if error < _ROUNDING else f"it is {error:.2g} off"
    except Exception as failure:  # Of several kinds, for old cuDNN, old GPUs and other makes.
        reason = (str(failure).splitlines() or [type(failure).__name__])[0]
    if reason:
        warnings.warn(f"cuDNN's fused attention cannot be used ({reason}); XLA's is", stacklevel=2)
    return reason is None
