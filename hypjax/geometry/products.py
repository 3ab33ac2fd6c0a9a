"""Products of vectors that distances are made of, at full float32 precision on every device."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float


def inner_products(x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]) -> Float[Array, "n m"]:
    """Inner products ⟨x_i, y_j⟩ of all pairs.

    GPUs and TPUs would otherwise multiply float32 matrices in TF32 or bfloat16, which leaves three
    digits; results on a CPU cannot show the difference.
    """
    return jnp.matmul(x, y.T, precision="highest")


def square_distances(x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]) -> Float[Array, "n m"]:
    """Squared distances ‖x_i − y_j‖² of all pairs from inner products, never below 0.

    Two habits hold the rounding error down to a few 2⁻²³·(‖x‖² + ‖y‖²): coordinates are summed in
    two halves, and ⟨x, y⟩ is taken from each norm before the differences are added.
    """
    half = x.shape[-1] // 2
    xy = inner_products(x[:, :half], y[:, :half]) + inner_products(x[:, half:], y[:, half:])
    s = (jnp.sum(x * x, axis=-1)[:, None] - xy) + (jnp.sum(y * y, axis=-1) - xy)
    return jnp.where(s > 0, s, 0)
