"""Matrix products behind all distances, in full float32 precision on every device."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.geometry import smooth


def inner_products(x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]) -> Float[Array, "n m"]:
    """Inner products ⟨x_i, y_j⟩ of all pairs.

    By default GPUs multiply float32 matrices in TF32 and TPUs in bfloat16, which leaves three
    digits. Results on a CPU do not show the difference.

    Args:
        x: Left vectors, [n, d].
        y: Right vectors, [m, d], of the same dtype.

    Returns:
        Products, [n, m], in the dtype of the inputs.
    """
    x, y = smooth.inexact(x, y)
    return jnp.matmul(x, y.T, precision="highest")


def square_distances(x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]) -> Float[Array, "n m"]:
    """Squared Euclidean distances ‖x_i − y_j‖² of all pairs from inner products, at least 0.

    Two measures limit the float32 rounding error to a few 2⁻²³·(‖x‖² + ‖y‖²): coordinates are
    summed in two halves, and ⟨x, y⟩ is subtracted from each squared norm before the two differences
    are added.

    Args:
        x: Left vectors, [n, d].
        y: Right vectors, [m, d], of the same dtype.

    Returns:
        Squared distances, [n, m], in the dtype of the inputs.
    """
    x, y = smooth.inexact(x, y)
    half = x.shape[-1] // 2
    xy = inner_products(x[:, :half], y[:, :half]) + inner_products(x[:, half:], y[:, half:])
    s = (jnp.sum(x * x, axis=-1)[:, None] - xy) + (jnp.sum(y * y, axis=-1) - xy)
    return jnp.where(s > 0, s, 0)
