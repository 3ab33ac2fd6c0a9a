"""Certified scores: matrix products that bound the separations of all pairs of points.

For each query i and item j, the product ⟨query_i, gallery_j⟩ is a score for which

    score − 2·slack  ≤  −separation  ≤  score,      slack = a_i·b_j + b_i·a_j,

where `Space.separation` computes the separation by subtraction in float64. An item with a high
score may be near; one with a low score is certainly far.

The slack bounds the rounding error of a sum of n products in any order (Higham, *Accuracy and
Stability of Numerical Algorithms*, 2nd ed., Section 3.1): about n·u times the sum of absolute
products, with the unit roundoff u. By Cauchy-Schwarz this sum is at most q_i·q_j + o_i + o_j, where
q are the lengths of the vectors and o the offsets of the points. With f² = max(1, q²/2o), it is at
most 2·f_i·f_j·(o_i + o_j).

The separation in a `Composite` space is a combination of the distances in its parts. Distances
increase with separations, so bounds on the separations in the parts bound the combination.
"""

import dataclasses
import functools
import math
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from hypjax.geometry import Composite, InnerProductSpace, SearchTerms, Space
from hypjax.geometry.arithmetic import AnyArray, inner_products
from hypjax.geometry.spaces import Role
from hypjax.retrieval import inputs

SINGLE, DOUBLE = np.dtype("float32"), np.dtype("float64")
PADDING = -(2.0**126)  # Score of padding: below all points' scores; finite, since ∞ − ∞ is NaN.
# Smallest offset assumed in bounds, so that they exceed the errors of subnormal numbers.
_SMALLEST_OFFSET = 2.0**-80
_OTHER_ROUNDINGS = 16  # Roundings outside the sum of a product: of factors, offsets and slack.
_TERM_ELEMENTS = 2**17  # Coordinates of the points whose factors are computed at once.

Vectors = tuple[Float[Array, "n _"], ...]  # One array, or one for each part of a composite space.
ItemVectors = tuple[Float[Array, "m _"], ...]


class Factors(NamedTuple):
    """Vectors of points, whose products are scores, and the coefficients of the slack."""

    query: Vectors  # Vectors of the points as queries; () if they are gallery items only.
    gallery: Vectors  # Vectors of the points as gallery items; () if they are queries only.
    slack: tuple[Float[Array, "n 2"], ...]  # a and b of the slack; 0 for padding.


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """Space, centre and precision in which points are compared."""

    space: Space
    centre: Float[np.ndarray, " d"]  # Scores are most accurate near it; float64.
    dtype: np.dtype  # `SINGLE` or `DOUBLE`.

    @classmethod
    def around(cls, space: Space, points: inputs.Points, dtype: np.dtype = SINGLE) -> "Score":
        """Creates a score that is most accurate near these points."""
        inputs.check_space(space)
        return cls(space, np.asarray(np.mean(points, axis=0, dtype=np.float64)), dtype)

    def enabled(self) -> AbstractContextManager[None]:
        """Context in which this thread's JAX computes in the score's precision."""
        return jax.enable_x64(self.dtype == DOUBLE)

    def factors(
        self,
        x: Float[AnyArray, "n d"],
        valid: Bool[AnyArray, " m"] | None = None,
        role: Role | None = None,
    ) -> Factors:
        """Factors of points; rows that are not `valid` are padding, with the score `PADDING`.

        `x` may lack the last rows of the padding. A `role` leaves out the vectors of the other
        role, which take as much memory.
        """
        device = next(iter(x.devices())) if isinstance(x, jax.Array) else jax.local_devices()[0]
        # TPUs compute float32 from six products in bfloat16, and float64 from pairs of float32.
        tpu = device.platform == "tpu"
        roundoffs = {SINGLE: 2.0 ** -(21 if tpu else 24), DOUBLE: 2.0 ** -(44 if tpu else 53)}
        errors = roundoffs[self.dtype], roundoffs[DOUBLE]
        with jax.enable_x64(True):
            valid = jnp.ones(len(x), bool) if valid is None else valid
            return _blockwise_factors(self.space, x, valid, self.centre, self.dtype, errors, role)


def highest(space: Space, queries: Vectors, items: ItemVectors) -> Float[Array, "n m"]:
    """Scores of all pairs: upper bounds on −separation."""
    return _combined(space, list(map(inner_products, queries, items)), 1)


def lowest(space: Space, queries: Factors, items: Factors) -> Float[Array, "n m"]:
    """Lower bounds on −separation of all pairs."""
    products = map(inner_products, queries.query, items.gallery)
    bounds = []
    for product, query, item in zip(products, queries.slack, items.slack, strict=True):
        slack = query[:, :1] * item[None, :, 1] + query[:, 1:] * item[None, :, 0]
        bounds.append(product - 2 * slack)
    return _combined(space, bounds, -1)


def _combined(space: Space, bounds: list[Float[Array, "n m"]], sign: int) -> Float[Array, "n m"]:
    """Combines upper (1) or lower (−1) bounds on −separation in the parts of a space."""
    if not isinstance(space, Composite):
        return bounds[0]
    distance = space.combine(
        part.distance_at(jnp.maximum(-bound, 0))
        for (part, _), bound in zip(space.parts, bounds, strict=True)
    )
    # A bound on the relative error of distances that are computed from separations.
    error = 2.0**-16 if distance.dtype == jnp.float32 else 2.0**-36
    padding = bounds[0] <= PADDING / 2  # Its distance may not be finite.
    return jnp.where(padding, PADDING, (sign * error - 1) * distance)


def largest_slack(queries: Factors, items: Factors) -> Float[Array, " n"]:
    """Upper bound on the slack of each query with any item, in a space without parts."""
    (query_slack,), (item_slack,) = queries.slack, items.slack
    largest = jnp.max(item_slack, axis=0)
    return query_slack[:, 0] * largest[1] + query_slack[:, 1] * largest[0]


def widened(threshold: Float[Array, "..."], sign: int) -> Float[Array, "..."]:
    """Moves a threshold up (1) or down (−1) by more than its rounding errors."""
    # A threshold is a sum of few products, each off by at most half of eps.
    moved = threshold + sign * 64 * jnp.finfo(threshold.dtype).eps * jnp.abs(threshold)
    return jnp.where(jnp.isinf(threshold), threshold, moved)


@functools.partial(jax.jit, static_argnames=("dtype", "roundoffs", "role"))
def _blockwise_factors(
    space: Space,
    x: Float[AnyArray, "n d"],
    valid: Bool[AnyArray, " m"],
    centre: Float[AnyArray, " d"],
    dtype: np.dtype,
    roundoffs: tuple[float, float],
    role: Role | None,
) -> Factors:
    def block_factors(block: tuple[Array, Array]) -> Factors:
        points, valid = block
        if points.ndim == 1:  # Row numbers.
            points = jnp.asarray(x).at[points].get(mode="fill", fill_value=0)
        points = points.astype(jnp.float64)
        parts = [(cast(InnerProductSpace, space), points, jnp.asarray(centre))]
        if isinstance(space, Composite):
            spaces = [part for part, _ in space.parts]
            parts = [*zip(spaces, space.split(points), space.split(centre), strict=True)]
        part_factors = [_part_factors(*part, valid, roundoffs) for part in parts]
        query, gallery, slack = zip(*part_factors, strict=True)
        query, gallery = () if role == "gallery" else query, () if role == "query" else gallery
        return jax.tree.map(lambda x: x.astype(dtype), Factors(query, gallery, slack))

    # In blocks of a power of two, since terms in float64 take much memory.
    rows = math.gcd(len(valid), 1 << max(_TERM_ELEMENTS // x.shape[1], 1).bit_length())
    # Without the padding, points are read by row numbers: padding them would copy them all.
    points = x if len(x) == len(valid) else jnp.arange(len(valid))
    blocks = (array.reshape(-1, rows, *array.shape[1:]) for array in (points, valid))
    factors = lax.map(block_factors, tuple(blocks))
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[2]), factors)


def _part_factors(
    space: InnerProductSpace,
    x: Float[Array, "n d"],
    centre: Float[Array, " d"],
    valid: Bool[Array, " n"],
    roundoffs: tuple[float, float],
) -> tuple[Float[Array, "n v"], Float[Array, "n v"], Float[Array, "n 2"]]:
    """The arrays of `Factors` in a space without parts."""
    terms = space.search_terms(x, centre)
    a, b = _slack(terms, x.shape[1], roundoffs)
    # The product is ⟨query_i, gallery_j⟩ − offset_i − offset_j + slack. Its roundings are at most
    # the slack, so that no score falls below −separation.
    offset, ones = terms.offset[:, None], jnp.ones_like(a)
    factors = (
        jnp.concatenate([terms.query, -offset, ones, a, b], axis=1),
        jnp.concatenate([terms.gallery, ones, -offset, b, a], axis=1),
        jnp.concatenate([a, b], axis=1),
    )
    # The score of padding is `PADDING` times the 1 of the other factor.
    query, gallery = np.zeros((2, factors[0].shape[1]))
    query[-4] = gallery[-3] = PADDING
    padding = query, gallery, np.zeros(2)
    return jax.tree.map(lambda x, row: jnp.where(valid[:, None], x, row), factors, padding)


def _slack(
    terms: SearchTerms, dim: int, roundoffs: tuple[float, float]
) -> tuple[Float[Array, "n 1"], Float[Array, "n 1"]]:
    """Terms a and b of a bound on the rounding errors of scores, a_i·b_j + b_i·a_j."""
    # Relative to the sum of absolute products, a score errs by at most ε + ρ_i + ρ_j: ε for the
    # product, ρ for terms and separations in float64. This is at most e_i·e_j with
    # e = √ε·(1 + ρ/ε). With the factors f and offsets o of the module's docstring, the sum is at
    # most 2·f_i·f_j·(o_i + o_j). So the slack bounds the error with b = √2·e·f and a = b·o.
    product, double = roundoffs
    epsilon = product * (terms.query.shape[1] + 4 + _OTHER_ROUNDINGS)
    rho = 2 * double * (dim + _OTHER_ROUNDINGS) * terms.condition
    offset = jnp.maximum(terms.offset, _SMALLEST_OFFSET)
    square = jnp.sum(terms.query * terms.query, axis=1)
    f = jnp.sqrt(jnp.maximum(1, square / (2 * offset)))
    b = (2 * epsilon) ** 0.5 * (1 + rho / epsilon) * f
    return (b * offset)[:, None], b[:, None]
