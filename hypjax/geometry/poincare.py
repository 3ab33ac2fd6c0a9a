"""The Poincaré ball of radius 1/√c (curvature −c), as pure functions on arrays.

The names are geoopt's. In every function the last axis holds the coordinates and the leading axes
broadcast; `c` may be a Python number or a traced scalar, and 0, which is the flat limit with the
distance 2‖x − y‖. Results are float32, or float64 where an input is. Gradients are finite
everywhere inside the ball, also at coincident points, at the origin and at c = 0: nothing below
divides by √c or by a norm, since every formula is written in the smooth variables c‖v‖² and
s = ‖x − y‖².

Float32 keeps 1 − c‖x‖² to fewer digits the nearer a point is to the boundary. Largest relative
error of `dist` and `dist_matrix` between well-separated points (√c‖x − y‖ > ½) of norm r/√c:

    r      0.5    0.9    0.99   0.999  0.9999  0.99999
    error  3e-7   5e-7   2e-6   9e-6   9e-5    5e-4

Gradients there are about five times less exact. A point on the boundary or outside has no distance:
the result is NaN or infinite. `project` brings points inside.

Notation: s = ‖x − y‖², P = (1 − c‖x‖²)(1 − c‖y‖²), and q = s / P, so that c·q = sinh²(√c·d/2).

Sources: Ganea et al., "Hyperbolic Neural Networks" (NeurIPS 2018), Section 2, for the Möbius
operations and the maps; Ermolov et al., "Hyperbolic Vision Transformers" (CVPR 2022), Eqs. 1-3.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.geometry import products

Scalar = float | Float[Array, ""]

# `project` keeps √c‖x‖ at or below this: the paper's bound, and the last norm at which float32
# still resolves 1 − c‖x‖² to a per cent.
MAX_NORM = 1 - 1e-5

_FRECHET_STEPS = 1000


def _floating(*arrays: ArrayLike) -> list[Array]:
    """Brings the inputs to one dtype: float64 where one of them is, otherwise float32."""
    dtype = jnp.result_type(jnp.float32, *arrays)
    return [jnp.asarray(array, dtype) for array in arrays]


def _square_norm(x: Float[ArrayLike, "*b d"], keepdims: bool = True) -> Array:
    return jnp.sum(x * x, axis=-1, keepdims=keepdims)


def _sqrt(u: Array) -> Array:
    """√u with the gradient 0 at u = 0, where the true one is infinite; NaN below."""
    zero = u == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, u)))


def _even(u: Array, function, series: tuple[float, ...]) -> Array:
    """A function of √u that is smooth in u: by its Taylor series near 0, directly elsewhere.

    Five terms up to u = 1e-3 leave an error below 1e-16. Above, a gradient by cancelling quotients
    loses up to three digits at the seam, where its share in any gradient of a distance is small.
    """
    near = u < 1e-3
    root = jnp.sqrt(jnp.where(near, 1, u))
    return jnp.where(
        near, jnp.polyval(jnp.asarray(series, u.dtype), jnp.where(near, u, 0)), function(root)
    )


def _tanh_ratio(u: Array) -> Array:
    """tanh(√u) / √u."""
    return _even(u, lambda r: jnp.tanh(r) / r, (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1))


def _artanh_ratio(u: Array) -> Array:
    """artanh(√u) / √u, held at its largest representable value from u = 1 on."""
    u = jnp.minimum(u, 1 - jnp.finfo(u.dtype).eps)
    return _even(u, lambda r: jnp.arctanh(r) / r, (1 / 9, 1 / 7, 1 / 5, 1 / 3, 1))


def _asinh_ratio(u: Array) -> Array:
    """asinh(√u) / √u."""
    return _even(u, lambda r: jnp.arcsinh(r) / r, (35 / 1152, -5 / 112, 3 / 40, -1 / 6, 1))


@jax.custom_jvp
def _distance_from_ratio(q: Array, c: Scalar) -> Array:
    """Distance (2/√c)·asinh(√(c·q)), written so that c = 0 and q = 0 are ordinary points."""
    return 2 * _sqrt(q) * _asinh_ratio(c * q)


def _slope_in_ratio(tangent: Array, distance: Array, q: Array, c: Scalar) -> Array:
    """Derivative 1/√(q·(1 + c·q)): cheaper than differentiating asinh, and 0 at q = 0."""
    del distance
    apart = q != 0
    return jnp.where(apart, lax.rsqrt(jnp.where(apart, q * (1 + c * q), 1)), 0) * tangent


def _slope_in_curvature(tangent: Array, distance: Array, q: Array, c: Scalar) -> Array:
    del distance
    return jax.jvp(lambda c: 2 * _sqrt(q) * _asinh_ratio(c * q), (c,), (tangent,))[1]


_distance_from_ratio.defjvps(_slope_in_ratio, _slope_in_curvature)


def lambda_x(x: Float[ArrayLike, "*b d"], c: Scalar) -> Float[Array, "*b 1"]:
    """Conformal factor λ_x = 2 / (1 − c‖x‖²)."""
    (x,) = _floating(x)
    return 2 / (1 - c * _square_norm(x))


def clip_features(v: Float[ArrayLike, "*b d"], radius: float | None) -> Float[Array, "*b d"]:
    """Shortens vectors longer than `radius` to that length (Guo et al., CVPR 2022, Eq. 5).

    Args:
        v: Tangent vectors at the origin.
        radius: Largest Euclidean norm; None switches clipping off.
    """
    (v,) = _floating(v)
    if radius is None:
        return v
    square = _square_norm(v)
    outside = square > radius**2
    return jnp.where(outside, v * (radius / jnp.sqrt(jnp.where(outside, square, 1))), v)


def project(x: Float[ArrayLike, "*b d"], c: Scalar) -> Float[Array, "*b d"]:
    """Moves points outside the ball of radius (1 − 1e-5)/√c radially onto its surface."""
    (x,) = _floating(x)
    u = c * _square_norm(x)
    outside = u > MAX_NORM**2
    return jnp.where(outside, x * (MAX_NORM / jnp.sqrt(jnp.where(outside, u, 1))), x)


def mobius_add(
    x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"], c: Scalar
) -> Float[Array, "*b d"]:
    """Möbius addition x ⊕ y (Hyp-ViT, Eq. 1)."""
    x, y = _floating(x, y)
    xx, yy = _square_norm(x), _square_norm(y)
    xy = jnp.sum(x * y, axis=-1, keepdims=True)
    numerator = (1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y
    return numerator / (1 + 2 * c * xy + c**2 * xx * yy)


def expmap0(v: Float[ArrayLike, "*b d"], c: Scalar) -> Float[Array, "*b d"]:
    """Exponential map at the origin, tanh(√c‖v‖)·v / (√c‖v‖) (Hyp-ViT, Eq. 3 at x = 0).

    Far out tanh rounds to 1 and the result lies on the boundary; `project` brings it inside.
    """
    (v,) = _floating(v)
    return v * _tanh_ratio(c * _square_norm(v))


def logmap0(x: Float[ArrayLike, "*b d"], c: Scalar) -> Float[Array, "*b d"]:
    """Logarithmic map at the origin, artanh(√c‖x‖)·x / (√c‖x‖): the inverse of `expmap0`."""
    (x,) = _floating(x)
    return x * _artanh_ratio(c * _square_norm(x))


def expmap(
    x: Float[ArrayLike, "*#b d"], v: Float[ArrayLike, "*#b d"], c: Scalar
) -> Float[Array, "*b d"]:
    """Exponential map at x of the tangent vector v (Hyp-ViT, Eq. 3)."""
    x, v = _floating(x, v)
    return mobius_add(x, expmap0(v * lambda_x(x, c) / 2, c), c)


def logmap(
    x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"], c: Scalar
) -> Float[Array, "*b d"]:
    """Logarithmic map at x of the point y: the inverse of `expmap` in its second argument."""
    x, y = _floating(x, y)
    difference, q = _moved_to_origin(x, y, c)
    length = _asinh_ratio(c * q) * jnp.sqrt(1 + c * q)  # artanh(√c‖w‖) / (√c‖w‖), w = −x ⊕ y
    return difference * length * (1 - c * _square_norm(x))


def _moved_to_origin(x: Array, y: Array, c: Scalar) -> tuple[Array, Array]:
    """(−x) ⊕ y and q = s/P, in a form that is exactly zero where x = y.

    The numerator of the textbook formula, (1 − c‖x‖²)·y − (1 − 2c⟨x,y⟩ + c‖y‖²)·x, is regrouped
    around y − x, and its denominator is P + c·s.
    """
    delta = y - x
    s = _square_norm(delta)
    inside = 1 - c * _square_norm(x)
    p = inside * (1 - c * _square_norm(y))
    return (inside * delta - c * s * x) / (p + c * s), s / p


def dist(
    x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"], c: Scalar
) -> Float[Array, "*b"]:
    """Geodesic distance of points, pairwise along the leading axes (Hyp-ViT, Eq. 2).

    Computed as (2/√c)·asinh(√(c·s/P)), which equals the paper's (2/√c)·artanh(√c‖−x ⊕ y‖) and,
    unlike it, neither saturates near the boundary nor loses digits for close points.
    """
    x, y = _floating(x, y)
    s = _square_norm(x - y, keepdims=False)
    p = (1 - c * _square_norm(x, keepdims=False)) * (1 - c * _square_norm(y, keepdims=False))
    return _distance_from_ratio(s / p, c)


def dist_matrix(
    x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"], c: Scalar
) -> Float[Array, "n m"]:
    """Geodesic distances of all pairs, by one matrix product and O(n·m) memory.

    s comes from ‖x‖² + ‖y‖² − 2⟨x, y⟩, whose float32 error of a few 2⁻²³·(‖x‖² + ‖y‖²) shows for
    close points: at c = 0.1 and the clip radius 2.3, up to 4e-3 in the distance of coincident
    ones, and gradients of distances below about 0.01 are too small. Where single distances matter
    to the last digit, use `dist`.
    """
    x, y = _floating(x, y)
    # Multiplying by 1/P one factor at a time makes no other matrix of this size.
    q = products.square_distances(x, y) * (lambda_x(x, c) / 2) * (lambda_x(y, c) / 2).T
    return _distance_from_ratio(q, c)


def to_lorentz(x: Float[ArrayLike, "*b d"], c: Scalar) -> Float[Array, "*b d+1"]:
    """Coordinates on the unit hyperboloid ⟨X, X⟩_L = −1, the time coordinate first.

    Distances there are √c times those in the ball, hence c > 0.
    """
    (x,) = _floating(x)
    u = c * _square_norm(x)
    return jnp.concatenate([1 + u, 2 * jnp.sqrt(c) * x], axis=-1) / (1 - u)


def from_lorentz(x: Float[ArrayLike, "*b d+1"], c: Scalar) -> Float[Array, "*b d"]:
    """Ball coordinates of points on the unit hyperboloid: the inverse of `to_lorentz`; c > 0."""
    (x,) = _floating(x)
    return x[..., 1:] / (jnp.sqrt(c) * (1 + x[..., :1]))


def frechet_mean(
    x: Float[ArrayLike, "*b n d"], c: Scalar, weights: Float[ArrayLike, "*b n"] | None = None
) -> Float[Array, "*b d"]:
    """The point with the least weighted sum of squared distances to n points.

    In hyperboloid coordinates a squared distance is a concave function of the inner product, so
    the minimiser of its tangents, a normalised sum, never increases the objective: iterating it
    needs no step size and converges from anywhere. One Newton step at the end makes the result
    differentiable in x, c and the weights, by the implicit function theorem.

    Args:
        x: Points of the ball.
        c: Negative curvature; 0 gives the arithmetic mean.
        weights: Non-negative, not all 0; they are normalised. None weighs all points equally.

    Returns:
        The mean, one for each leading index of x.
    """
    weights = jnp.ones(jnp.shape(x)[:-1], jnp.float32) if weights is None else weights
    x, weights = _floating(x, weights)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    mean = lax.stop_gradient(_descend(*lax.stop_gradient((x, c, weights))))
    return _newton_step(mean, x, c, weights)


def _descend(x: Array, c: Scalar, weights: Array) -> Array:
    """Majorise-minimise steps until the mean's move drowns in rounding."""
    tolerance = 4 * jnp.finfo(x.dtype).eps

    def step(carry):
        mean, _, count = carry
        w, q = _moved_to_origin(mean[..., None, :], x, c)
        move = _majorised_move(w, q, c, weights)
        moving = jnp.any(_square_norm(move) > tolerance**2 * jnp.max(q, axis=-2))
        return mobius_add(mean, move, c), moving, count + 1

    def unfinished(carry):
        _, moving, count = carry
        return moving & (count < _FRECHET_STEPS)

    return lax.while_loop(unfinished, step, (jnp.zeros_like(x[..., 0, :]), True, 0))[0]


def _majorised_move(w: Array, q: Array, c: Scalar, weights: Array) -> Array:
    """The next mean, seen from the present one at the origin, where the points are at w.

    With D = √c·d, the tangent of D² = arccosh² at the present mean weighs a point by D/sinh D; the
    weighted sum of hyperboloid coordinates (time T, space S) is minimal at (T, S)/√(T² − c‖S‖²).
    """
    a = weights[..., None] * _asinh_ratio(c * q) / jnp.sqrt(1 + c * q)
    time = jnp.sum(a * (1 + 2 * c * q), axis=-2)
    space = jnp.sum(a * (1 + c * q) * 2 * w, axis=-2)
    return space / (time + jnp.sqrt(time**2 - c * _square_norm(space)))


def _newton_step(mean: Array, x: Array, c: Scalar, weights: Array) -> Array:
    """One Newton step of the Fréchet objective, with the Hessian held constant.

    Seen from the mean, half a squared distance has the Hessian uuᵀ + D·coth(D)·(I − uuᵀ), u being
    the direction of the point and D = √c times its distance.
    """
    w, q = _moved_to_origin(mean[..., None, :], x, c)
    logs = 2 * w * _asinh_ratio(c * q) * jnp.sqrt(1 + c * q)  # of length d
    gradient = -jnp.sum(weights[..., None] * logs, axis=-2)
    hessian = lax.stop_gradient(_hessian(logs, c, weights))
    step = -jnp.linalg.solve(hessian, gradient[..., None])[..., 0]
    return mobius_add(mean, expmap0(step / 2, c), c)


def _hessian(logs: Array, c: Scalar, weights: Array) -> Array:
    square = _square_norm(logs)
    across = 1 / _tanh_ratio(c * square)
    along = (1 - across) / jnp.where(square > 0, square, 1)
    outer = jnp.einsum(
        "...n,...ni,...nj->...ij", weights * along[..., 0], logs, logs, precision="highest"
    )
    identity = jnp.eye(logs.shape[-1], dtype=logs.dtype)
    return outer + jnp.sum(weights[..., None] * across, axis=-2)[..., None] * identity
