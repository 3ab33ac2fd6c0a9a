"""The precision of a model's matrix products."""

import contextlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def compute_dtype(precision: str) -> jnp.dtype:
    """Dtype of the encoder's matrix products.

    Args:
        precision: `float32`, `bfloat16`, or `auto`: float32 on CPUs and bfloat16 elsewhere.
    """
    if precision == "auto":
        precision = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(precision)


def full_products_in(dtype: DTypeLike) -> contextlib.AbstractContextManager:
    """Context in which float32 products are true float32 on every device.

    By default GPUs and TPUs round the factors. Products of other dtypes are not affected.

    Args:
        dtype: Dtype of the products.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
