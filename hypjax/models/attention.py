"""Scaled dot-product attention, with a kernel that suits the device."""

import functools
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hypjax.errors import UserError
from hypjax.models.layers import cuda_capability

Heads: TypeAlias = Float[Array, "batch tokens heads dim"]
Queries: TypeAlias = Float[Array, "batch queries heads dim"]


def attend(
    query: Queries,
    key: Heads,
    value: Heads,
    length: int | None = None,
    kernel: str = "auto",
    causal: bool = False,
) -> Queries:
    """Scaled dot-product attention, softmax(q·kᵀ / √dim)·v in each head (Vaswani et al., Eq. 1).

    The softmax is always float32. Only the first `length` keys and values count. If `causal`, a
    query attends to the keys up to its own position.

    `kernel` applies to half precision on NVIDIA GPUs. "cudnn" is cuDNN's fused kernel, which does
    not store the matrix of probabilities (FlashAttention, Dao et al., NeurIPS 2022); a `UserError`
    says where the GPU does not support it. "xla" is the program of other accelerators. "auto" is
    "cudnn" if JAX's first device and the heads' dimension allow it.
    """
    if kernel == "auto":
        # A fixed rule, since a choice by measured time could differ between processes, which then
        # wait for each other forever, and after a resume. On an H100, A100 and L4, XLA's program
        # takes 1.6 to 1.8 times the roofline time of a ViT-S/16 step, and 2.6 to 3.3 of a ViT-S/8.
        supported = query.shape[-1] % 8 == 0 and query.shape[-1] <= 128
        kernel = "cudnn" if supported and cuda_capability() >= 8 else "xla"
    if causal:
        length = None  # Queries that count do not see the padding, which lies behind them.
    attentions = {"cpu": _by_head, "default": _by_xla}
    if kernel == "cudnn" and query.dtype.itemsize == 2:
        attentions["cuda"] = _by_cudnn
    by_platform = {
        name: functools.partial(attention, length=length, causal=causal)
        for name, attention in attentions.items()
    }
    return jax.lax.platform_dependent(query, key, value, **by_platform)


def _by_xla(query: Queries, key: Heads, value: Heads, length: int | None, causal: bool) -> Queries:
    lengths = None if length is None else jnp.full(len(query), length, jnp.int32)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, key_value_seq_lengths=lengths, implementation="xla"
    )


def _by_head(query: Queries, key: Heads, value: Heads, length: int | None, causal: bool) -> Queries:
    """Attention for CPUs, where products take a third of the time if each head is contiguous."""
    scale = 1 / math.sqrt(query.shape[-1])
    if query.dtype == jnp.float32:  # Half precision would round the scaled queries.
        query, scale = query * scale, 1
    heads = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    # Without the barrier, XLA undoes the transposition.
    query, key, value = jax.lax.optimization_barrier(tuple(heads))
    key, value = key[:, :, :length], value[:, :, :length]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = scale * product("bhqd,bhkd->bhqk", query, key)
    if causal:
        logits = jnp.where(jnp.tri(query.shape[2], key.shape[2], dtype=bool), logits, -jnp.inf)
    # The softmax's sums divide the result, which is smaller than the matrix of probabilities.
    weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    mixed = product("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    mixed = (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(value.dtype)
    return jnp.swapaxes(jax.lax.optimization_barrier(mixed), 1, 2)


def _by_cudnn(
    query: Queries, key: Heads, value: Heads, length: int | None, causal: bool
) -> Queries:
    """Attention by cuDNN's kernel, whose gradient requires even numbers of tokens."""
    num_queries = query.shape[1]
    length = key.shape[1] if length is None else length
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)
    )
    lengths = None if length == key.shape[1] else jnp.full(len(key), length, jnp.int32)
    try:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )[:, :num_queries]
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(f"cuDNN's attention failed ({error}); set run.attention=xla") from error
