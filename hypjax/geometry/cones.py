"""Entailment cones on the hyperboloid: a concept's cone holds everything that it entails.

The cone of an apex x opens away from the origin O. It holds the points y whose exterior angle at x,
between the ray from O through x and the geodesic from x to y, is at most the half-aperture of x,
which shrinks as x moves out. Points, shapes, dtypes and c follow the conventions of
`hypjax.geometry.lorentz`; `lorentz.from_poincare` converts points of the ball. At c = 0, the cone
of x is the half-space beyond it.

MERU computes the exterior angle as acos((y_t + x_t·c⟨x, y⟩)/(‖x‖·√((c⟨x, y⟩)² − 1))), which loses
half of the digits of small angles, and all digits for close points. Here it is the angle of a
vector in the plane. Let a be the component of y − x along x, ρ the length of the rest, and q the
`lorentz.separation`. The boost that moves x to the origin then moves y to the vector

    (2(1 + cq)·a − c‖x‖·ρ², (T_x + T_y)·ρ) / (T_x + T_y)

along and across x. Terms are subtracted only where the angle is close to a right angle. The table
lists the largest errors in float32, in radians, and those of MERU's formula. Points x and y lie
at distances r and r + 1/√c from the origin, seen from there at an angle of at least 0.1 or in one
direction:

    √c·r                            0.1   1     3     5     7     10
    at an angle: exterior_angle     3e-7  3e-7  3e-7  3e-7  3e-7  3e-7
                 MERU's formula     2e-5  3e-5  1e-4  4e-4  4e-4  4e-4
    in one direction:               4e-7  7e-7  5e-6  3e-5  3e-4  5e-3
                 MERU's formula     8e-4  2e-3  1e-2  1e-1  1     3

In one direction, the rounding of coordinates limits accuracy, as in `lorentz`.

Sources: Ganea et al., "Hyperbolic Entailment Cones for Learning Hierarchical Embeddings" (ICML
2018), Section 3; Desai et al. (MERU, ICML 2023), Section 3, "Entailment loss".
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from hypjax.geometry import arithmetic, lorentz
from hypjax.geometry.arithmetic import Numbers, Operand, Scalar, Vectors


def half_aperture(x: Vectors, c: Scalar, radius: Scalar = 0.1) -> Numbers:
    """Half-apertures of the cones of x, asin(2K/(√c‖x‖)), in radians (MERU, Section 3).

    Points are [..., d], apertures [...], and K > 0 is the `radius`. For √c‖x‖ ≤ 2K the aperture is
    a right angle with gradient 0. Just beyond 2K, the gradient is large; only rounding bounds it.
    """
    (x,) = arithmetic.floating(x)
    # The angle asin(a/h) in a right triangle is atan2(a, b), with b² = h² − a².
    adjacent_square = c * arithmetic.square_norm(x, keepdims=False) - 4 * radius**2
    wide = adjacent_square <= 0  # NaN must remain.
    adjacent = jnp.sqrt(jnp.where(wide, 1, adjacent_square))
    return jnp.arctan2(jnp.asarray(2 * radius, x.dtype), jnp.where(wide, 0, adjacent))


@arithmetic.broadcasting
def exterior_angle(x: Operand, y: Operand, c: Scalar) -> Numbers:
    """Exterior angles at x of the triangles O, x, y: from 0 to π radians (MERU, Section 3).

    Points are [..., d] and angles [...]. For y beyond x on the ray from the origin through x, the
    angle is 0 and has no gradient, which is set to 0. For equal points, and for x at the origin,
    the undefined angle is set to a right angle, as in MERU's formula, with gradient 0.
    """
    x, y = arithmetic.floating(x, y)
    square = arithmetic.square_norm(x)
    length = arithmetic.sqrt(square)
    direction = jnp.where(square > 0, x / jnp.where(square > 0, length, 1), 0)
    delta = y - x
    along = jnp.sum(delta * direction, axis=-1, keepdims=True)
    across = arithmetic.sqrt(arithmetic.square_norm(delta - along * direction))
    cosh_sum = jnp.sqrt(1 + c * square) + jnp.sqrt(1 + c * arithmetic.square_norm(y))
    q = lorentz.separation(x, y, c)[..., None]
    return _angle(2 * (1 + c * q) * along - c * length * across**2, cosh_sum * across)[..., 0]


def _angle(along: Array, across: Array) -> Array:
    """Angles of vectors in the plane; a right angle, with gradient 0, for a vector near 0."""
    size = lax.stop_gradient(jnp.maximum(jnp.abs(along), jnp.abs(across)))
    too_short = size < jnp.finfo(size.dtype).tiny ** 0.5
    along, across = jnp.where(too_short, 0, along), jnp.where(too_short, 1, across)
    size = jnp.where(too_short, 1, size)  # Squares of long vectors would overflow.
    return jnp.arctan2(across / size, along / size)
