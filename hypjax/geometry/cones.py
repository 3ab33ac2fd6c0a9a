"""Entailment cones on the hyperboloid: everything that a point stands for lies behind it.

The cone of an apex x opens away from the origin O. It holds the points y whose exterior angle at x,
between the ray from O through x and the geodesic from x to y, is at most the half-aperture of x,
which shrinks as x moves out. Points, shapes, dtypes and c follow the conventions of
`hypjax.geometry.lorentz`; points of the ball come here by `lorentz.from_poincare`. At c = 0, the
cone of x is the half-space beyond it.

MERU has the exterior angle as acos((y_t + x_t·c⟨x, y⟩)/(‖x‖·√((c⟨x, y⟩)² − 1))), which loses half
of the digits of small angles, and all digits of close points. Here it is the angle of a vector in
the plane. With δ = y − x, of which a is the part along x, ρ the length of the rest, and with q
from `lorentz.separation`, the boost that takes x to the origin moves y to the vector

    (2(1 + cq)·a − c‖x‖·ρ², (T_x + T_y)·ρ) / (T_x + T_y)

along and across x. Terms are subtracted only where the angle is about a right one. Largest errors
in float32, in radians, for points x and y at the distances r and r + 1/√c from the origin, seen
from it at an angle of at least 0.1 or in one direction, beside the errors of MERU's formula:

    √c·r                            0.1   1     3     5     7     10
    at an angle: exterior_angle     3e-7  3e-7  3e-7  3e-7  3e-7  3e-7
                 MERU's formula     2e-5  3e-5  1e-4  4e-4  4e-4  4e-4
    in one direction:               4e-7  7e-7  5e-6  3e-5  3e-4  5e-3
                 MERU's formula     8e-4  2e-3  1e-2  1e-1  1     3

In one direction, it is rounding of the points themselves that remains, see `lorentz`.

Sources: Ganea et al., "Hyperbolic Entailment Cones for Learning Hierarchical Embeddings" (ICML
2018), Section 3; Desai et al. (MERU, ICML 2023), Section 3, "Entailment loss".
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from hypjax.geometry import arithmetic, lorentz
from hypjax.geometry.arithmetic import Numbers, Operand, Scalar, Vectors


def half_aperture(x: Vectors, c: Scalar, radius: float = 0.1) -> Numbers:
    """Half-apertures of the cones of x, asin(2K/(√c‖x‖)), in radians (MERU, Section 3).

    Points are [..., d], apertures [...], and K > 0 is the radius. The aperture is a right angle,
    with gradient 0, for √c‖x‖ ≤ 2K. The gradient is infinite in the limit there, and bounded by
    rounding.
    """
    (x,) = arithmetic.floating(x)
    square = c * arithmetic.square_norm(x, keepdims=False) - 4 * radius**2
    wide = square <= 0  # NaN must remain.
    root = jnp.sqrt(jnp.where(wide, 1, square))
    return jnp.arctan2(jnp.asarray(2 * radius, x.dtype), jnp.where(wide, 0, root))


def exterior_angle(x: Operand, y: Operand, c: Scalar) -> Numbers:
    """Exterior angles at x of the triangles O, x, y: from 0 to π radians (MERU, Section 3).

    They are 0 for y beyond x on its ray from the origin. Where there is no angle, at equal points
    or with x at the origin, it is a right one, as MERU's formula has it, with gradient 0. On the
    ray, where the angle has no gradient, it is 0. Points are [..., d] and angles [...].
    """
    x, y = arithmetic.floating(x, y)
    square = arithmetic.square_norm(x)
    length = arithmetic.sqrt(square)
    direction = jnp.where(square > 0, x / jnp.where(square > 0, length, 1), 0)
    delta = y - x
    along = jnp.sum(delta * direction, axis=-1, keepdims=True)
    across = arithmetic.sqrt(arithmetic.square_norm(delta - along * direction))
    cosh = jnp.sqrt(1 + c * square) + jnp.sqrt(1 + c * arithmetic.square_norm(y))
    gap = 1 + c * lorentz.separation(x, y, c)[..., None]
    return _angle(2 * gap * along - c * length * across**2, cosh * across)[..., 0]


def _angle(along: Array, across: Array) -> Array:
    """Angle of vectors, a right one with gradient 0 for those too short to have one."""
    size = lax.stop_gradient(jnp.maximum(jnp.abs(along), jnp.abs(across)))
    none = size < jnp.finfo(size.dtype).tiny ** 0.5
    along, across = jnp.where(none, 0, along), jnp.where(none, 1, across)
    size = jnp.where(none, 1, size)  # Squares of long vectors would overflow.
    return jnp.arctan2(across / size, along / size)
