"""The hyperboloid of curvature −c, or Lorentz model, as pure functions on arrays.

A point is stored by its d space components x, as in MERU; any x in R^d is a point. Its time
component is x_t = √(1/c + ‖x‖²), and T = √c·x_t is cosh(√c·r) at the distance r from the origin.
Coordinates, shapes, dtypes and c follow the conventions of `hypjax.geometry.poincare`. The space is
isometric to the ball of the same c, by `to_poincare` and `from_poincare`; for c → 0 it is flat,
with the distance ‖x − y‖, which is twice the distance of x/2 and y/2, their images in the ball.

The textbook distance arccosh(−c⟨x, y⟩)/√c, with ⟨x, y⟩ = xᵀy − x_t·y_t, loses all digits for close
points. Here everything follows from q = sinh²(√c·d/2)/c = (−⟨x, y⟩ − 1/c)/2 as the square of one
vector,

    q = ‖x/λ − λy‖² / 4,    λ² = (1 + T_x)/(1 + T_y),

which is computed from x − y and T_x − T_y = c⟨x − y, x + y⟩/(T_x + T_y). The vector and its
gradients are smooth in x, y and c, also at the origin, at coincident points and at c = 0. Unlike
the ball's 1 − c‖x‖², T keeps its digits everywhere. The table lists the largest relative errors in
float32, next to the errors of `poincare.dist` for the same points in the ball. Two points lie at
distance r from the origin, at an angle of at least 0.1, or in one direction and at most 0.1/√c
apart:

    √c·r                         0.1   1     3     5     7     10    12
    at an angle: dist            4e-7  4e-7  4e-7  4e-7  4e-7  4e-7  4e-7
                 dist_matrix     7e-6  1e-5  1e-5  1e-5  1e-5  1e-5  1e-5
                 poincare.dist   4e-7  5e-7  1e-6  4e-6  2e-5  2e-4  2e-3
    in one direction: dist       4e-7  4e-7  5e-6  4e-5  3e-4  5e-3  5e-2
                 poincare.dist   4e-7  2e-6  3e-5  2e-4  2e-3  4e-2  3e-1

For points in one direction, the rounding of coordinates limits accuracy: an error of 1e-7·‖x‖
across the direction is an error of 1e-7·sinh(√c·r)/√c in distance.

Sources: Nickel & Kiela, "Learning Continuous Hierarchies in the Lorentz Model of Hyperbolic
Geometry" (ICML 2018), Section 3; Desai et al., "Hyperbolic Image-Text Representations" (MERU, ICML
2023), Section 3.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hypjax.geometry import arithmetic, poincare
from hypjax.geometry.arithmetic import Cols, Matrix, Numbers, Operand, Points, Rows, Scalar, Vectors

# Largest √c·r that `expmap0` and `poincare.project` allow: about 12.2.
MAX_RADIUS = 2 * float(np.arctanh(poincare.MAX_NORM))


def with_time(x: Vectors, c: Scalar) -> Float[Array, "*b d+1"]:
    """Points with the time component √(1/c + ‖x‖²) before their d space components, for c > 0."""
    (x,) = arithmetic.floating(x)
    return jnp.concatenate([_cosh(x, c) / jnp.sqrt(c), x], axis=-1)


def to_poincare(x: Vectors, c: Scalar) -> Points:
    """The isometry to the ball of the same c, x / (1 + T), for points [..., d]."""
    (x,) = arithmetic.floating(x)
    return x / (1 + _cosh(x, c))


def from_poincare(x: Vectors, c: Scalar) -> Points:
    """The isometry from the ball, 2x / (1 − c‖x‖²): the inverse of `to_poincare`."""
    (x,) = arithmetic.floating(x)
    return 2 * x / (1 - c * arithmetic.square_norm(x))


def expmap0(v: Vectors, c: Scalar) -> Points:
    """Exponential map at the origin, sinh(√c‖v‖)·v / (√c‖v‖) (MERU, Section 3).

    Maps tangent vectors at the origin, whose ‖v‖² is finite, to points at distance ‖v‖ from the
    origin, both [..., d], but at most 12.2/√c. There float32 directions still resolve distances of
    0.01/√c; at 88/√c, the map would overflow. `poincare.expmap0` maps vectors to the distance 2‖v‖,
    since the ball's metric at the origin is 4·⟨u, v⟩.
    """
    v = poincare.shorten(v, c, MAX_RADIUS)
    return v * arithmetic.sinh_ratio(c * arithmetic.square_norm(v))


def logmap0(x: Vectors, c: Scalar) -> Points:
    """Logarithmic map at the origin, arsinh(√c‖x‖)·x / (√c‖x‖): the inverse of `expmap0`."""
    (x,) = arithmetic.floating(x)
    return x * arithmetic.asinh_ratio(c * arithmetic.square_norm(x))


def dist(x: Operand, y: Operand, c: Scalar) -> Numbers:
    """Geodesic distances [...] of points [..., d], elementwise: (2/√c)·arsinh(√(c·q))."""
    return poincare.dist_at(separation(x, y, c), c)


@arithmetic.broadcasting
def separation(x: Operand, y: Operand, c: Scalar) -> Numbers:
    """Separations q = sinh²(√c·d/2)/c, elementwise, which increase with the distance d."""
    x, y = arithmetic.floating(x, y)
    return arithmetic.square_norm(_difference(x, y, c), keepdims=False)


@arithmetic.broadcasting
def dist_matrix(x: Rows, y: Cols, c: Scalar, *, subtract: bool | Bool[Array, ""] = True) -> Matrix:
    """Geodesic distances of all pairs, in O(n·m) memory, gradients included.

    Points are compared in the ball, after an isometry that moves `poincare.best_origin` to the
    origin. `subtract`, and errors for close points, are as in `poincare.dist_matrix`.
    """
    x, y = arithmetic.floating(x, y)
    centre = poincare.best_origin(separation, lax.stop_gradient(x), c)
    (x, x_gap), (y, y_gap) = (_moved_into_ball(z, centre, c) for z in (x, y))
    q = arithmetic.square_distances(x, y, subtract) * (1 / x_gap) * (1 / y_gap).T
    return arithmetic.distance_from_ratio(q, c)


def _moved_into_ball(x: Array, centre: Array, c: Scalar) -> tuple[Array, Array]:
    """The ball's points p after a boost of the centre to the origin, and 1 − c‖p‖²."""
    moved, q = moved_to_origin(x, centre, c)
    gap = 1 / (1 + c * q)
    return moved * gap / 2, gap


@arithmetic.broadcasting
def moved_to_origin(
    x: Float[Array, "n d"], centre: Float[Array, "*#n d"], c: Scalar
) -> tuple[Float[Array, "n d"], Float[Array, "n 1"]]:
    """Applies the boost that moves a centre m to the origin.

    Returns the moved points and their separations q from the centre. All points may share a centre,
    or each may have its own. The textbook formula x + (c⟨m, x⟩/(1 + T_m) − T_x)·m is rearranged as
    (x/λ − λm)·λ − 2cq·m/(1 + T_m) with λ² = (1 + T_x)/(1 + T_m), so that points close to the centre
    keep their digits.
    """
    half_difference = _difference(x, centre, c)
    q = arithmetic.square_norm(half_difference)
    one_plus_x, one_plus_m = 1 + _cosh(x, c), 1 + _cosh(centre, c)  # 1 + T_x, 1 + T_m.
    scaled = half_difference * jnp.sqrt(one_plus_x / one_plus_m)
    return 2 * (scaled - c * q * (centre / one_plus_m)), q


def frechet_mean(x: arithmetic.PointSets, c: Scalar, weights: arithmetic.Weights = None) -> Points:
    """Fréchet means, [..., d], of sets of n points, [..., n, d], as by `poincare.frechet_mean`."""
    return from_poincare(poincare.frechet_mean(to_poincare(x, c), c, weights), c)


def centroids(
    x: Rows, groups: Int[arithmetic.AnyArray, " n"], count: int, c: Scalar
) -> Float[Array, "count d"]:
    """Centroids of `count` groups of points; the origin for an empty group.

    `groups` holds each point's group. A centroid is Σx/√((ΣT)² − c‖Σx‖²) (Law et al., "Lorentzian
    Distance Learning", ICML 2019), in the ball Einstein's midpoint (HypStructure, NeurIPS 2024,
    Eq. 6). Far from the origin, the difference under the root loses digits. The sums are therefore
    taken a second time, after boosts that move the first centroids to the origin, where T = 1 + 2cq
    is small. The first centroids have no gradient: boosts to any points nearby have equal results.
    """
    (x,) = arithmetic.floating(x)
    sums = functools.partial(jax.ops.segment_sum, segment_ids=groups, num_segments=count)
    # Without rounding errors, (ΣT)² − c‖Σx‖² is at least the square of the number of points.
    least = jnp.maximum(sums(jnp.ones_like(x[:, :1])), 1) ** 2

    def centroid(x: Array, cosh: Array) -> Array:
        x, cosh = sums(x), sums(cosh)
        return x / jnp.sqrt(jnp.maximum(cosh**2 - c * arithmetic.square_norm(x), least))

    first = lax.stop_gradient(centroid(x, _cosh(x, c)))
    moved, q = moved_to_origin(x, first[jnp.asarray(groups)], c)
    return moved_to_origin(centroid(moved, 1 + 2 * c * q), -first, c)[0]


def _cosh(x: Array, c: Scalar) -> Array:
    """T = √(1 + c‖x‖²), [..., 1]."""
    return jnp.sqrt(1 + c * arithmetic.square_norm(x))


def _difference(x: Array, y: Array, c: Scalar) -> Array:
    """(x/λ − λy)/2, of length √q; exactly 0 for equal points."""
    # It equals (x·(1 + T_y) − y·(1 + T_x)) / (2√(1 + T_x)√(1 + T_y)), whose numerator is written as
    # (x − y)·(1 + T_z) − z·(T_x − T_y), where z is the point that is nearer to the origin.
    x_cosh, y_cosh = _cosh(x, c), _cosh(y, c)
    delta, total = x - y, x + y
    rise = c * jnp.sum(delta * total, axis=-1, keepdims=True) / (x_cosh + y_cosh)  # T_x − T_y.
    scale = 2 * jnp.sqrt(1 + x_cosh) * jnp.sqrt(1 + y_cosh)
    x_is_nearer = x_cosh < y_cosh
    nearer = jnp.where(x_is_nearer, x, y)
    nearer_cosh = jnp.where(x_is_nearer, x_cosh, y_cosh)
    return delta * ((1 + nearer_cosh) / scale) - nearer * (rise / scale)
