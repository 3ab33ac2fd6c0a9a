"""Steps towards a Fréchet mean, in coordinates that have the current mean at the origin.

The points are at w there, with q = sinh²(√c·d/2)/c for their distance d from the mean.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hypjax.geometry import smooth
from hypjax.geometry.smooth import Scalar


def majorised_step(
    w: Float[Array, "*b n d"], q: Float[Array, "*b n 1"], c: Scalar, weights: Float[Array, "*b n"]
) -> Float[Array, "*b d"]:
    """The next mean.

    With D = √c·d, the tangent of D² = arccosh² at the current mean weights a point by D/sinh D. The
    weighted sum of hyperboloid coordinates (time T, space S) is minimal at (T, S)/√(T² − c‖S‖²).
    """
    a = weights[..., None] * smooth.asinh_ratio(c * q) / jnp.sqrt(1 + c * q)
    time = jnp.sum(a * (1 + 2 * c * q), axis=-2)
    space = jnp.sum(a * (1 + c * q) * 2 * w, axis=-2)
    return space / (time + jnp.sqrt(time**2 - c * smooth.square_norm(space)))


def newton_step(
    w: Float[Array, "*b n d"], q: Float[Array, "*b n 1"], c: Scalar, weights: Float[Array, "*b n"]
) -> Float[Array, "*b d"]:
    """A Newton step on the Fréchet objective; no gradient flows through the Hessian.

    At the mean, half a squared distance has the Hessian uuᵀ + D·coth(D)·(I − uuᵀ), where u is the
    direction of the point and D is √c times its distance.
    """
    logs = 2 * w * smooth.asinh_ratio(c * q) * jnp.sqrt(1 + c * q)  # of length d
    gradient = -jnp.sum(weights[..., None] * logs, axis=-2)
    hessian = lax.stop_gradient(_hessian(logs, c, weights))
    return -jnp.linalg.solve(hessian, gradient[..., None])[..., 0]


def _hessian(logs: Array, c: Scalar, weights: Array) -> Array:
    square = smooth.square_norm(logs)
    across = 1 / smooth.tanh_ratio(c * square)
    along = (1 - across) / jnp.where(square > 0, square, 1)
    outer = jnp.einsum(
        "...n,...ni,...nj->...ij", weights * along[..., 0], logs, logs, precision="highest"
    )
    identity = jnp.eye(logs.shape[-1], dtype=logs.dtype)
    return outer + jnp.sum(weights[..., None] * across, axis=-2)[..., None] * identity
