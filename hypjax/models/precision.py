"""The precision of a model's matrix products."""

import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Compute capabilities of NVIDIA's GPUs before Ampere, which cannot multiply bfloat16.
_BEFORE_AMPERE = re.compile(r"[1-7]\.")


def compute_dtype(precision: str, device: jax.Device | None = None) -> jnp.dtype:
    """Dtype of the encoder's matrix products.

    Args:
        precision: `float32`, `bfloat16`, or `auto`: bfloat16, but float32 on CPUs. On GPUs that
            cannot multiply bfloat16, all are float32.
        device: The device that computes; by default JAX's first one.
    """
    device = device or jax.local_devices()[0]
    if _BEFORE_AMPERE.match(getattr(device, "compute_capability", "")):
        if precision == "bfloat16":
            warnings.warn(
                f"{device.device_kind} cannot multiply bfloat16; float32 takes its place",
                stacklevel=2,
            )
        precision = "float32"
    elif precision == "auto":
        precision = "float32" if device.platform == "cpu" else "bfloat16"
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
