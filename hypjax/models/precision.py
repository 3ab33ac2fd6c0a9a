"""In which precision a model multiplies."""

import contextlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def compute_dtype(precision: str) -> jnp.dtype:
    """Of the encoder's products: what `model.precision` says, or what suits the device."""
    if precision == "auto":
        precision = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(precision)


def full_products_in(dtype: DTypeLike) -> contextlib.AbstractContextManager:
    """Keeps float32 products float32 where a device would round their factors."""
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
