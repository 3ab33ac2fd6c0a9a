"""The Poincaré ball of radius 1/√c (curvature −c), as pure functions on arrays.

Function names follow geoopt. In every function the last axis holds the coordinates and the leading
axes broadcast. `c` is a Python number or a scalar array, which may be traced, and at least 0; c = 0
is the flat limit with the distance 2‖x − y‖. Results are float64 if an input is, otherwise float32.
No function checks values or raises. Gradients are finite everywhere inside the ball, including
coincident points, the origin and c = 0: no formula below divides by √c or by a norm, since each is
written in the smooth variables c‖v‖² and s = ‖x − y‖².

The nearer a point is to the boundary, the fewer digits of 1 − c‖x‖² float32 keeps. Largest relative
error of `dist` and `dist_matrix` between well-separated points (√c‖x − y‖ > ½) of norm r/√c:

    r      0.5    0.9    0.99   0.999  0.9999  0.99999
    error  3e-7   5e-7   2e-6   9e-6   9e-5    5e-4

Gradients there are six to nine times less accurate. A point on or outside the boundary has no
distance: the result is NaN or infinite. `project` moves points inside.

Notation: s = ‖x − y‖², P = (1 − c‖x‖²)(1 − c‖y‖²), and q = s / P, so that c·q = sinh²(√c·d/2).

Sources: Ganea et al., "Hyperbolic Neural Networks" (NeurIPS 2018), Section 2, for the Möbius
operations and the maps; Ermolov et al., "Hyperbolic Vision Transformers" (CVPR 2022), Eqs. 1-3.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from hypjax.geometry import arithmetic
from hypjax.geometry.arithmetic import Cols, Matrix, Numbers, Operand, Points, Rows, Scalar, Vectors

# Largest √c‖x‖ that `project` returns: the paper's bound, and about the largest norm at which
# float32 still resolves 1 − c‖x‖² to one per cent.
MAX_NORM = 1 - 1e-5

# Largest √c times the distance from the origin up to which products give distances; an error of
# self-distances of 0.05/√c, see `dist_matrix`.
MAX_PRODUCT_RADIUS = 5.0

_MAX_FRECHET_STEPS = 1000
_Carry = tuple[Array, Array, Array | int]  # Means, whether each still moves, and steps so far.
_LONGEST = 1e18  # Vectors are clipped to this norm, since the ‖v‖² of longer ones may overflow.
RESCALING = float(np.arctanh(0.99)) / 3  # Factor of small distances in `rescale_features`.


def lambda_x(x: Vectors, c: Scalar) -> Float[Array, "*b 1"]:
    """Conformal factors λ_x = 2 / (1 − c‖x‖²), [..., 1], of points of the ball, [..., d]."""
    (x,) = arithmetic.floating(x)
    return 2 / (1 - c * arithmetic.square_norm(x))


def clip_features(v: Vectors, radius: Scalar | Float[Array, "*b 1"]) -> Points:
    """Shortens vectors, [..., d], to at most `radius` (Guo et al., CVPR 2022, Eq. 5)."""
    (v,) = arithmetic.floating(v)
    scaled, scale = arithmetic.scaled(v)
    square = arithmetic.square_norm(scaled)
    outside = square > (radius / scale) ** 2
    return jnp.where(outside, scaled * (radius / jnp.sqrt(jnp.where(outside, square, 1))), v)


def rescale_features(v: Vectors, max_distance: Scalar) -> Points:
    """Maximum-distance rescaling of vectors, [..., d], before `expmap0` (Bdeir et al., 2024).

    `expmap0` maps v to the distance D = 2‖v‖ from the origin, and the rescaled v to the distance
    M·tanh(D·artanh(0.99)/(3M)), where M is `max_distance`; this is 0.99·M at D = 3M. Experimental:
    the formula is from code of the authors' group, not from the paper.
    """
    v = clip_features(v, _LONGEST)
    u = arithmetic.square_norm(v) * (2 * RESCALING / max_distance) ** 2
    return v * (RESCALING * arithmetic.tanh_ratio(u))


def unrescale_features(v: Vectors, max_distance: Scalar) -> Points:
    """Inverts `rescale_features`; finite even for lengths of max_distance / 2 or more."""
    (v,) = arithmetic.floating(v)
    u = arithmetic.square_norm(v) * (2 / max_distance) ** 2
    return v * arithmetic.artanh_ratio(u) / RESCALING


def shrink(x: Vectors, weight: Scalar, c: Scalar) -> Points:
    """Moves points, [..., d], towards the origin: the weight decay of Riemannian AdamW.

    A point p becomes its centroid with the origin o, the normalised (1 − w)·p + w·o on the
    hyperboloid, for a weight w from 0 to 1 (Bdeir et al., 2024; experimental, after code of the
    authors' group). A point at distance R/√c from the origin keeps its direction and moves to
    R'/√c, where tanh R' = (1 − w)·sinh R / ((1 − w)·cosh R + w); at c = 0 it becomes (1 − w)·p.
    """
    (x,) = arithmetic.floating(x)
    u = c * arithmetic.square_norm(x)
    point_weight = 1 - weight
    # Norm √((1 − w)² + w² + 2w(1 − w)·cosh R) of the sum times 1 − u, in sums of positive terms.
    square = (point_weight**2 + weight**2) * (1 - u) + 2 * weight * point_weight * (1 + u)
    norm = jnp.sqrt(square * (1 - u))
    return x * (2 * point_weight / (norm + point_weight * (1 + u) + weight * (1 - u)))


def project(x: Vectors, c: Scalar) -> Points:
    """Moves points, [..., d], whose norm exceeds (1 − 1e-5)/√c radially to that norm."""
    return shorten(clip_tangents(x, c), c, MAX_NORM)


def shorten(v: Vectors, c: Scalar, limit: float) -> Points:
    """Shortens vectors, [..., d], whose ‖v‖² is finite, to √c‖v‖ ≤ limit."""
    (v,) = arithmetic.floating(v)
    u = c * arithmetic.square_norm(v)
    outside = u > limit**2
    return jnp.where(outside, v * (limit / jnp.sqrt(jnp.where(outside, u, 1))), v)


@arithmetic.broadcasting
def mobius_add(x: Operand, y: Operand, c: Scalar) -> Points:
    """Möbius addition x ⊕ y of points of the ball, [..., d] (Hyp-ViT, Eq. 1).

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import poincare
        >>> x, y = np.array([0.3, 0.0]), np.array([0.0, 0.4])
        >>> print(np.asarray(poincare.mobius_add(x, y, 1.0)).round(3))
        [0.343 0.359]
    """
    x, y = arithmetic.floating(x, y)
    xx, yy = (arithmetic.finite_square_norm(point, c) for point in (x, y))
    xy = jnp.sum(x * y, axis=-1, keepdims=True)
    numerator = (1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y
    return numerator / (1 + 2 * c * xy + c**2 * xx * yy)


def expmap0(v: Vectors, c: Scalar) -> Points:
    """Exponential map at the origin, tanh(√c‖v‖)·v / (√c‖v‖) (Hyp-ViT, Eq. 3 at x = 0).

    Maps tangent vectors at the origin to points of the ball, both [..., d]. For long vectors tanh
    rounds to 1 and the result is on the boundary; `project` moves it inside.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import poincare
        >>> print(np.asarray(poincare.expmap0(np.array([0.5, 0.0]), 1.0)).round(3))
        [0.462 0.   ]
    """
    v = clip_tangents(v, c)
    return v * arithmetic.tanh_ratio(c * arithmetic.finite_square_norm(v, c))


def point_at(v: Vectors, c: Scalar) -> Points:
    """`project(expmap0(v, c), c)` of vectors, [..., d], that are clipped already.

    Their ‖v‖² must be finite.
    """
    (v,) = arithmetic.floating(v)
    return shorten(v * arithmetic.tanh_ratio(c * arithmetic.square_norm(v)), c, MAX_NORM)


def clip_tangents(v: Vectors, c: Scalar) -> Points:
    """Shortens vectors, [..., d], to 1e3/√c, where tanh has long been 1, and to at most 1e18."""
    # Without the barrier, XLA's constant folding overflows for vectors of 3e38.
    v = lax.optimization_barrier(arithmetic.floating(v)[0])
    return clip_features(v, lax.stop_gradient(jnp.minimum(1e3 / jnp.sqrt(c), _LONGEST)))


def logmap0(x: Vectors, c: Scalar) -> Points:
    """Logarithmic map at the origin, artanh(√c‖x‖)·x / (√c‖x‖): the inverse of `expmap0`.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import poincare
        >>> print(np.asarray(poincare.logmap0(np.array([0.462, 0.0]), 1.0)).round(2))
        [0.5 0. ]
    """
    (x,) = arithmetic.floating(x)
    return x * arithmetic.artanh_ratio(c * arithmetic.square_norm(x))


@arithmetic.broadcasting
def expmap(x: Operand, v: Operand, c: Scalar) -> Points:
    """Exponential map at the points x, [..., d], of tangent vectors v, [..., d] (Hyp-ViT, Eq. 3).

    Like `expmap0`, it may round a result to the boundary; `project` moves it inside.
    """
    x, v = arithmetic.floating(x, v)
    w = clip_tangents(clip_tangents(v, 0) * lambda_x(x, c) / 2, c)
    # On the way from far out towards the centre, the terms of the Möbius addition cancel.
    xx, ww = c * arithmetic.square_norm(x), c * arithmetic.square_norm(w)
    inward = (jnp.sum(x * w, axis=-1, keepdims=True) < 0) & (xx > 0.25) & (ww > 0.25)
    added = mobius_add(x, expmap0(jnp.where(inward, 0, w), c), c)
    return jnp.where(inward, _inward(x, w, inward, c), added)


def _inward(x: Array, w: Array, inward: Array, c: Scalar) -> Array:
    """The sum x ⊕ tanh(a)·ŵ/√c, a = √c‖w‖, where `inward` holds; any finite value elsewhere."""
    # Numerator and denominator, times cosh²(a)·e^(−2a), are written in sums of positive terms:
    # r + √c⟨x, ŵ⟩ = r·‖x̂ + ŵ‖²/2 and cosh(a) − r·sinh(a), with r = √c‖x‖.
    root = jnp.sqrt(jnp.where(c > 0, c, 1))
    x, w = jnp.where(inward, x, 0), jnp.where(inward, w, 0)
    xx, ww = c * arithmetic.square_norm(x), c * arithmetic.square_norm(w)
    r, a = (jnp.sqrt(jnp.where(inward, square, 1)) for square in (xx, ww))
    outward, direction = root * x / r, root * w / a
    turn, across = outward + direction, outward - direction
    # `turn` and `across` are orthogonal but for rounding errors, which matter for a small turn.
    radial = jnp.sum(turn * across, axis=-1, keepdims=True)
    turn -= across * radial / jnp.where(inward, arithmetic.square_norm(across), 1)
    decay = jnp.exp(-2 * a)
    cosh, sinh = (1 + decay) / 2, (1 - decay) / 2
    near = ((1 - xx) / (1 + r) + decay * (1 + r)) / 2
    denominator = near**2 + r * arithmetic.square_norm(turn) * sinh * cosh
    move = (1 - xx) * sinh * (r * sinh * turn + near * direction)
    return x + move / (root * jnp.where(inward, denominator, 1))


@arithmetic.broadcasting
def transport(x: Operand, y: Operand, v: Operand, c: Scalar) -> Points:
    """Parallel transport of tangent vectors v from x to y along their geodesic, all [..., d].

    Computes gyr[y, −x]v·λ_x/λ_y (Ungar, "A Gyrovector Space Approach to Hyperbolic Geometry",
    2009). The gyration is a rotation, so the transport preserves lengths in the ball's metric.
    """
    x, y, v = arithmetic.floating(x, y, clip_tangents(v, 0))
    # Written in δ = y − x: far out, the textbook formula subtracts numbers near 1.
    delta = y - x
    xx, yy, s = map(arithmetic.square_norm, (x, y, delta))
    xd, xv, dv = (
        jnp.sum(a * b, axis=-1, keepdims=True) for a, b in ((x, delta), (x, v), (delta, v))
    )
    inside_x, inside_y = 1 - c * xx, 1 - c * yy
    along_delta = c * (2 * c * xd * xv - inside_x * xv - c * xx * dv)
    along_x = c * (inside_x * dv - c * s * xv)
    turned = v + 2 * (along_delta * delta + along_x * x) / (inside_x * inside_y + c * s)
    return turned * inside_y / inside_x


@arithmetic.broadcasting
def logmap(x: Operand, y: Operand, c: Scalar) -> Points:
    """Logarithmic map at x of the point y, both [..., d]: the tangent that `expmap` takes to y."""
    x, y = arithmetic.floating(x, y)
    difference, s, p = _mobius_difference(x, y, c)
    q = s / p
    # artanh(√c‖w‖) / (√c‖w‖) for w = −x ⊕ y.
    ratio = arithmetic.asinh_ratio(c * q) * jnp.sqrt(1 + c * q)
    return difference * ratio * (1 - c * arithmetic.square_norm(x))


def _mobius_difference(x: Array, y: Array, c: Scalar) -> tuple[Array, Array, Array]:
    """(−x) ⊕ y, s and P, in a form that is exactly 0 for x = y."""
    # The textbook numerator, (1 − c‖x‖²)·y − (1 − 2c⟨x,y⟩ + c‖y‖²)·x, is rearranged in terms of
    # y − x. The denominator equals P + c·s.
    delta = y - x
    s = arithmetic.square_norm(delta)
    inside = 1 - c * arithmetic.square_norm(x)
    p = inside * (1 - c * arithmetic.square_norm(y))
    return (inside * delta - c * s * x) / (p + c * s), s, p


def dist(x: Operand, y: Operand, c: Scalar) -> Numbers:
    """Geodesic distances [...] of points [..., d], elementwise (Hyp-ViT, Eq. 2).

    Computed as (2/√c)·asinh(√(c·s/P)), which equals the paper's (2/√c)·artanh(√c‖−x ⊕ y‖) but
    neither saturates near the boundary nor loses digits for close points.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import poincare
        >>> distance = poincare.dist(np.array([0.3, 0.0]), np.array([0.0, 0.4]), 1.0)
        >>> print(f"{distance:.3f}")
        1.089
    """
    return dist_at(separation(x, y, c), c)


@arithmetic.broadcasting
def separation(x: Operand, y: Operand, c: Scalar) -> Numbers:
    """Separations s/P = sinh²(√c·d/2)/c, elementwise, which increase with the distance d."""
    x, y = arithmetic.floating(x, y)
    s = arithmetic.square_norm(x - y, keepdims=False)
    x_gap, y_gap = (1 - c * arithmetic.square_norm(point, keepdims=False) for point in (x, y))
    return s / (x_gap * y_gap)


def dist_at(separation: Float[arithmetic.AnyArray, "*b"], c: Scalar) -> Numbers:
    """Geodesic distances (2/√c)·asinh(√(c·q)), [...], of points with separations q, [...]."""
    (q,) = arithmetic.floating(separation)
    return arithmetic.distance_from_ratio(q, c)


@arithmetic.broadcasting
def lca_distance(x: Operand, y: Operand, c: Scalar) -> Numbers:
    """Distances [...] from the origin to the geodesics through points x and y, [..., d].

    HypHC (Chami et al., NeurIPS 2020, where c = 1) takes the point of the geodesic nearest to the
    origin as the lowest common ancestor of two leaves at equal distances from the origin. The
    distance is asinh(2√c‖m‖/√(P + c·s))/√c, where m is the part of (x + y)/2 orthogonal to y − x.
    Geodesics extend beyond x and y. Points within 1,000 rounding errors of each other, whose
    geodesic is unknown, count as equally far from the origin.
    """
    x, y = arithmetic.floating(x, y)
    delta = y - x
    _, s, p = _mobius_difference(x, y, c)
    m = (x + y) / 2
    near = s <= (1e3 * jnp.finfo(x.dtype).eps) ** 2 * arithmetic.square_norm(m) + 1e-24
    along = jnp.where(near, 0, delta) * lax.rsqrt(jnp.where(near, 1, s))
    m -= jnp.sum(m * along, axis=-1, keepdims=True) * along
    u = (4 * arithmetic.square_norm(m) / (p + c * s))[..., 0]
    return arithmetic.sqrt(u) * arithmetic.asinh_ratio(c * u)


@arithmetic.broadcasting
def dist_matrix(x: Rows, y: Cols, c: Scalar, *, subtract: bool | Bool[Array, ""] = True) -> Matrix:
    """Geodesic distances of all pairs, in O(n·m) memory, gradients included.

    If the points x are nearer to their mean than to the origin (`best_origin`), a Möbius
    translation first moves the mean to the origin, which changes no distance. Then s is computed by
    subtraction, as accurately as in `dist`, or, without `subtract`, faster from a product, as
    ‖x‖² + ‖y‖² − 2⟨x, y⟩ (`arithmetic.square_distances` has both costs). The product's float32
    error, a few 2⁻²³·(‖x‖² + ‖y‖²), matters for pairs that are much closer to each other than to
    the mean; their gradients are then too small. Errors of √c·distance, for points at the distance
    r from the origin, here and in `lorentz.dist_matrix`:

        √c·r                      1     2     3     4     5     6     8     10    12
        equal points: product     8e-4  3e-3  7e-3  2e-2  6e-2  0.14  1.1   3.9   8.1
                      subtract    0     0     0     0     0     0     0     0     0
        0.5 apart:    product     4e-7  6e-6  4e-5  4e-4  2e-3  2e-2  0.6   3.4   7.3
                      subtract    1e-7  3e-7  6e-7  2e-6  4e-6  1e-5  6e-5  6e-4  4e-3

    `distance_matrix` of a space takes the product up to √c·r = 5. `subtract` may be traced.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import poincare
        >>> x = np.array([[0.0, 0.0], [0.5, 0.0]])
        >>> print(np.asarray(poincare.dist_matrix(x, x, 1.0)).round(3))
        [[0.    1.099]
         [1.099 0.   ]]
    """
    x, y = arithmetic.floating(x, y)
    centre = best_origin(separation, lax.stop_gradient(x), c)
    (x, x_gap), (y, y_gap) = (_moved_to_origin(z, centre, c) for z in (x, y))
    # Multiplying by one factor of 1/P after the other avoids another matrix of this size.
    q = arithmetic.square_distances(x, y, subtract) * (1 / x_gap) * (1 / y_gap).T
    return arithmetic.distance_from_ratio(q, c)


def best_origin(separation: Callable[[Array, Array, Scalar], Array], x: Array, c: Scalar) -> Array:
    """The mean of x or the origin, whichever is nearer to its farthest point of x."""
    if not len(x):
        return jnp.zeros(x.shape[1:], x.dtype)
    mean, origin = jnp.mean(x, axis=0), jnp.zeros_like(x[0])
    from_mean, from_origin = (jnp.max(separation(x, centre, c)) for centre in (mean, origin))
    return jnp.where(from_mean < from_origin, mean, origin)


def _moved_to_origin(x: Array, centre: Array, c: Scalar) -> tuple[Array, Array]:
    """Moved points w = (−m) ⊕ x for a centre m, and 1 − c‖w‖²."""
    moved, s, p = _mobius_difference(centre, x, c)
    return moved, p / (p + c * s)


def frechet_mean(x: arithmetic.PointSets, c: Scalar, weights: arithmetic.Weights = None) -> Points:
    """Fréchet mean: the point with the least weighted sum of squared distances to n points.

    Points are [..., n, d] and means [..., d]. Weights, [..., n], are at least 0 and not all 0.

    In hyperboloid coordinates a squared distance is a concave function of the inner product.
    Minimising its tangent, which gives a normalised sum, therefore never increases the objective:
    the iteration needs no step size and converges from any start. The mean is differentiable in x,
    c and weights: by the implicit function theorem, its derivative is the one of a Newton step.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import poincare
        >>> x = np.array([[0.5, 0.0], [0.0, 0.5]])
        >>> print(np.asarray(poincare.frechet_mean(x, 1.0)).round(2))
        [0.22 0.22]
    """
    weights = jnp.ones(jnp.shape(x)[:-1], jnp.float32) if weights is None else weights
    x, weights = arithmetic.floating(x, weights)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return _mean(x, jnp.asarray(c, x.dtype), weights)


@jax.custom_jvp
def _mean(x: Array, c: Scalar, weights: Array) -> Array:
    """Repeats majorise-minimise steps until they are as small as rounding errors."""
    eps = jnp.finfo(x.dtype).eps
    # Balls are convex, so the mean is no farther out than the farthest point; rounding errors may
    # take it across the boundary.
    farthest = jnp.sqrt(jnp.max(arithmetic.square_norm(x), axis=-2))

    def step(carry: _Carry) -> _Carry:
        mean, moving, count = carry
        w, s, p = _mobius_difference(mean[..., None, :], x, c)
        q = s / p
        # The tangent in cosh D bounds D² = (√c·d)²; its slope weights a point by D/sinh D. In
        # coordinates with the mean at the origin, the points' weighted sum on the hyperboloid is
        # (T, S), time and space, and the bound is least at (T, S)/√(T² − c‖S‖²).
        a = weights[..., None] * arithmetic.asinh_ratio(c * q) / jnp.sqrt(1 + c * q)
        time = jnp.sum(a * (1 + 2 * c * q), axis=-2)
        space = jnp.sum(a * (1 + c * q) * 2 * w, axis=-2)
        # Far from the mean, the difference loses its digits. It is at least (Σa)².
        square = jnp.maximum(time**2 - c * arithmetic.square_norm(space), jnp.sum(a, axis=-2) ** 2)
        move = space / (time + jnp.sqrt(square))
        # The rounding error of the mean's coordinates is a move of this length.
        rounding = eps * jnp.sqrt(arithmetic.square_norm(mean)) * lambda_x(mean, c) / 2
        least = jnp.maximum(4 * eps * jnp.sqrt(jnp.max(q, axis=-2)), rounding)
        moved = clip_features(mobius_add(mean, move, c), farthest)
        mean = jnp.where(moving, moved, mean)  # Each mean stops by itself.
        moving &= arithmetic.square_norm(move) > least**2
        return mean, moving, count + 1

    def unfinished(carry: _Carry) -> Array:
        return jnp.any(carry[1]) & (carry[2] < _MAX_FRECHET_STEPS)

    origin = jnp.zeros_like(x[..., 0, :])
    start: _Carry = origin, jnp.ones_like(origin[..., :1], bool), 0
    return lax.while_loop(unfinished, step, start)[0]


@_mean.defjvp
def _mean_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    mean = _mean(*primals)
    return mean, jax.jvp(lambda *args: _newton(mean, *args), primals, tangents)[1]


@arithmetic.broadcasting
def _newton(mean: Array, x: Array, c: Scalar, weights: Array) -> Array:
    """A Newton step from the Fréchet mean, which stays in place, but gets its derivatives."""
    # At the mean, half a squared distance has the Hessian uuᵀ + D·coth(D)·(I − uuᵀ), where u is the
    # direction of the point and D is √c times its distance.
    w, s, p = _mobius_difference(mean[..., None, :], x, c)
    q = s / p
    logs = 2 * w * arithmetic.asinh_ratio(c * q) * jnp.sqrt(1 + c * q)  # of length d
    gradient = -jnp.sum(weights[..., None] * logs, axis=-2)
    square = arithmetic.square_norm(logs)
    across = 1 / arithmetic.tanh_ratio(c * square)
    along = (1 - across) / jnp.where(square > 0, square, 1)
    outer = jnp.einsum(
        "...n,...ni,...nj->...ij", weights * along[..., 0], logs, logs, precision="highest"
    )
    identity = jnp.eye(logs.shape[-1], dtype=logs.dtype)
    hessian = outer + jnp.sum(weights[..., None] * across, axis=-2)[..., None] * identity
    step = -jnp.linalg.solve(lax.stop_gradient(hessian), gradient[..., None])[..., 0]
    return mobius_add(mean, expmap0(step / 2, c), c)
