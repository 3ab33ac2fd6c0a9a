"""Scaled dot-product attention with the fastest kernel of each device."""

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
_MAX_ERROR = 0.05  # Largest rounding error of bfloat16 sums for values around 1.


def attend(query: Heads, key: Heads, value: Heads) -> Heads:
    """Scaled dot-product attention, softmax(q·kᵀ / √dim)·v in each head (Vaswani et al., Eq. 1).

    In half precision on NVIDIA GPUs this is cuDNN's fused kernel, which does not store the matrix
    of probabilities (Dao et al., FlashAttention, NeurIPS 2022); otherwise it is compiled by XLA.
    The softmax is always float32.
    """
    kernels = {"cpu": _by_head, "default": _by_xla}
    if query.dtype in (jnp.bfloat16, jnp.float16):
        if _cudnn_supports(query.shape[1], query.shape[3], query.dtype):
            kernels["cuda"] = _by_cudnn
    return jax.lax.platform_dependent(query, key, value, **kernels)


_by_xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def _by_head(query: Heads, key: Heads, value: Heads) -> Heads:
    """Attention for CPUs, where products take a third of the time if each head is contiguous."""
    heads = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query, key, value = jax.lax.optimization_barrier(tuple(heads))  # Or XLA undoes it.
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits / math.sqrt(query.shape[-1]), axis=-1)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    return jnp.swapaxes(jax.lax.optimization_barrier(mixed), 1, 2)


def _by_cudnn(query: Heads, key: Heads, value: Heads) -> Heads:
    """Attention by cuDNN's kernel, whose gradient requires an even number of tokens."""
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    batch, tokens, *_ = query.shape
    if tokens % 2 == 0:
        return attention(query, key, value)
    query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
    real = jnp.full(batch, tokens, jnp.int32)
    return attention(query, key, value, key_value_seq_lengths=real)[:, :tokens]


@functools.cache
def _cudnn_supports(tokens: int, dim: int, dtype: DTypeLike) -> bool:
    """Whether cuDNN's kernel runs on this device for these sizes, and its gradients match XLA's."""
    if jax.default_backend() != "gpu":
        return False

    def probe(attention: object) -> jax.stages.Wrapped:
        def total(heads: Float[Array, "3 batch tokens heads dim"]) -> Array:
            return jnp.sum(attention(*heads) * heads[0])

        return jax.jit(jax.grad(total))

    try:
        with jax.ensure_compile_time_eval():  # Models call this while they are traced.
            heads = np.random.default_rng(0).normal(size=(3, 2, tokens, 1, dim))
            heads = jnp.asarray(heads, dtype)
            gradient, expected = (probe(attention)(heads) for attention in (_by_cudnn, _by_xla))
            error = np.max(np.abs(np.asarray(gradient - expected, np.float32)))
            reason = None if error < _MAX_ERROR else f"its gradients are off by {error:.2g}"
    except Exception as failure:  # Its type depends on the GPU and on the versions of libraries.
        reason = (str(failure).splitlines() or [type(failure).__name__])[0]
    if reason:
        warnings.warn(
            f"cuDNN's fused attention cannot be used ({reason}); XLA's is used instead",
            stacklevel=2,
        )
    return reason is None
