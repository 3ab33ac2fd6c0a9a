"""Arithmetic behind all distances: precise matrix products, and smooth functions.

No function has special cases at c = 0, at the origin or at equal points.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Real

_P = ParamSpec("_P")
_T = TypeVar("_T")
AnyArray = Array | np.ndarray
Scalar = float | int | np.floating | Float[Array, ""]
# Types of arguments and results. The leading axes of operands broadcast.
Vectors = Real[AnyArray, "*b d"]
Operand = Real[AnyArray, "*#b d"]
Points = Float[Array, "*b d"]
PointSets = Real[AnyArray, "*b n d"]
Weights = Real[AnyArray, "*b n"] | None  # Of the points in each set; None for equal weights.
Numbers = Float[Array, "*b"]
Rows = Real[AnyArray, "n d"]
Cols = Real[AnyArray, "m d"]
Matrix = Float[Array, "n m"]  # A value for each pair of rows.


def broadcasting(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Lets the operands of a function broadcast under jax_numpy_rank_promotion='raise', too.

    To reshape operands to one rank instead would change the lowered programs of all train steps.
    """

    @functools.wraps(function)
    def broadcast(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if jax.numpy_rank_promotion.value == "allow":  # The context would trace `where` again.
            return function(*args, **kwargs)
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return broadcast


def floating(*arrays: AnyArray) -> list[Array]:
    """Converts the inputs to one dtype: float64 if one of them is, otherwise float32."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(jnp.float32, *arrays)
    return [jnp.asarray(array, dtype) for array in arrays]


def inexact(*arrays: AnyArray) -> list[Array]:
    """Converts integers, whose differences and squares may wrap around, to floats."""
    converted = map(jnp.asarray, arrays)
    with jax.numpy_dtype_promotion("standard"):
        return [array.astype(jnp.result_type(float, array)) for array in converted]


def square_norm(x: Vectors, keepdims: bool = True) -> Array:
    """‖x‖² over the last axis, which is kept by default."""
    return jnp.sum(x * x, axis=-1, keepdims=keepdims)


def finite_square_norm(x: Vectors, c: Scalar) -> Float[Array, "*b 1"]:
    """‖x‖², or, at c = 0, 0 for ‖x‖ > 1e9: derivatives of maps by c there would overflow."""
    square = square_norm(x)
    return jnp.where((square > 1e18) & (c == 0), 0, square)


def scaled(x: Points) -> tuple[Points, Float[Array, "*b 1"]]:
    """Divides vectors whose ‖x‖² would overflow or vanish by their largest coordinate.

    Returns the quotients and the divisors, which have no gradient and are 1 for ordinary vectors.
    """
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    extreme = (largest > 1e15) | ((largest > 0) & (largest < 1e-15))
    # The reciprocal of a divisor must not vanish.
    max_divisor = jnp.finfo(x.dtype).max / 16
    scale = jnp.where(extreme & jnp.isfinite(largest), jnp.minimum(largest, max_divisor), 1)
    return x / scale, scale


def sqrt(u: Array) -> Array:
    """√u, with gradient 0 instead of infinity at u = 0; NaN for u < 0."""
    zero = u == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, u)))


def _even_function(
    u: Array, function: Callable[[Array], Array], series: tuple[float, ...]
) -> Array:
    """Evaluates an even function of √u, which is smooth in u; near 0 by its Taylor series."""
    # Below u = 1e-3, five terms leave an error below 1e-16. Just above, cancellation costs the
    # gradient up to three digits, but its share in the gradient of a distance is small there.
    near = u < 1e-3
    root = jnp.sqrt(jnp.where(near, 1, u))
    taylor = jnp.polyval(jnp.asarray(series, u.dtype), jnp.where(near, u, 0))
    return jnp.where(near, taylor, function(root))


def sinh_ratio(u: Array) -> Array:
    """sinh(√u) / √u."""
    return _even_function(u, lambda r: jnp.sinh(r) / r, (1 / 362880, 1 / 5040, 1 / 120, 1 / 6, 1.0))


def tanh_ratio(u: Array) -> Array:
    """tanh(√u) / √u."""
    return _even_function(u, lambda r: jnp.tanh(r) / r, (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0))


def artanh_ratio(u: Array) -> Array:
    """artanh(√u) / √u; its largest finite value for u ≥ 1."""
    u = jnp.minimum(u, 1 - jnp.finfo(u.dtype).eps)
    return _even_function(u, lambda r: jnp.arctanh(r) / r, (1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0))


def asinh_ratio(u: Array) -> Array:
    """asinh(√u) / √u."""
    return _even_function(
        u, lambda r: jnp.arcsinh(r) / r, (35 / 1152, -5 / 112, 3 / 40, -1 / 6, 1.0)
    )


@jax.custom_jvp
def distance_from_ratio(q: Array, c: Scalar) -> Array:
    """Distance (2/√c)·asinh(√(c·q)), written so that c = 0 and q = 0 are no special cases."""
    return 2 * sqrt(q) * asinh_ratio(c * q)


def _jvp_in_ratio(tangent: Array, _: Array, q: Array, c: Scalar) -> Array:
    """Derivative 1/√(q·(1 + c·q)), cheaper than differentiating asinh; set to 0 at q = 0."""
    distinct = q != 0
    return jnp.where(distinct, lax.rsqrt(jnp.where(distinct, q * (1 + c * q), 1)), 0) * tangent


def _jvp_in_curvature(tangent: Array, _: Array, q: Array, c: Scalar) -> Array:
    return jax.jvp(lambda c: 2 * sqrt(q) * asinh_ratio(c * q), (c,), (tangent,))[1]


distance_from_ratio.defjvps(_jvp_in_ratio, _jvp_in_curvature)


def inner_products(x: Rows, y: Cols) -> Matrix:
    """Inner products ⟨x_i, y_j⟩ of all pairs.

    Products are true float32 on every device: by default, GPUs multiply float32 matrices in TF32
    and TPUs in bfloat16, which leaves three digits. The result has the dtype of the inputs.
    """
    x, y = inexact(x, y)
    return jnp.matmul(x, y.T, precision="highest")


def square_distances(x: Rows, y: Cols, subtract: bool | Bool[Array, ""] = False) -> Matrix:
    """Squared Euclidean distances ‖x_i − y_j‖² of all pairs, at least 0, in the inputs' dtype.

    By default they come from inner products. Two measures limit the float32 rounding error to a few
    2⁻²³·(‖x‖² + ‖y‖²): coordinates are summed in two halves, and ⟨x, y⟩ is subtracted from each
    squared norm before the two differences are added.

    With `subtract`, the error is relative to ‖x_i − y_j‖². Values and gradients also take O(n·m)
    memory. On a CPU, values take 1.5 times as long, and gradients 3 (d = 128) to 8 times (512). A
    traced `subtract` compiles both forms, and runs one.
    """
    x, y = inexact(x, y)
    if isinstance(subtract, bool):
        return (_subtracted if subtract else _from_products)(x, y)
    return lax.cond(subtract, _subtracted, _from_products, x, y)


def _from_products(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Matrix:
    half = x.shape[-1] // 2
    xy = inner_products(x[:, :half], y[:, :half]) + inner_products(x[:, half:], y[:, half:])
    s = (jnp.sum(x * x, axis=-1)[:, None] - xy) + (jnp.sum(y * y, axis=-1)[None] - xy)
    return jnp.where(s > 0, s, 0)


def _subtracted(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Matrix:
    # Without the checkpoint, the gradient would hold the differences of all coordinates, [d, n, m].
    square = jax.checkpoint(lambda a, b: (a[:, None] - b[None]) ** 2)

    def add(total: Matrix, coordinate: tuple[Array, Array]) -> tuple[Matrix, None]:
        return total + square(*coordinate), None

    zeros = jnp.zeros((len(x), len(y)), jnp.result_type(x, y))
    return lax.scan(add, zeros, (x.T, y.T))[0]
