"""How points are compared: by matrix products with a bound on their errors, or by subtraction.

`certify` is the exact search in short: it answers each query by the cheapest arithmetic that leaves
no doubt.

Products make scores. For each query i and item j, the product ⟨query_i, gallery_j⟩ is a score from
which

    score − 2·slack  ≤  −separation  ≤  score,      slack = a_i·b_j + b_i·a_j,

where the separation is the one that `Space.separation` computes by subtraction in float64. So an
item with a high score may be near, and one with a low score is certainly not.

The bound is that of a sum of products in any order (Higham, *Accuracy and Stability of Numerical
Algorithms*, 2nd ed., Section 3.1): with n terms and unit roundoff u, the error is at most about n·u
times the sum of the absolute products. By Cauchy-Schwarz these are at most q_i·q_j + o_i + o_j with
the lengths q of the vectors and the offsets o; with f² = max(1, q²/2o), this is at most
2·f_i·f_j·(o_i + o_j).

A `Fused` space adds the distances of several spaces. Distances increase with separations, so the
bounds on each separation give bounds on the sum, which is its own separation.
"""

import dataclasses
import enum
import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from hypjax.geometry import Composite, InnerProductSpace, SearchTerms, Space
from hypjax.geometry.arithmetic import inner_products
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Points, Rows

_LOG = logging.getLogger(__name__)

# Score of padding: below that of any point, and finite, since parts of infinity may be NaN.
PADDING = -(2.0**126)
# Smallest offset assumed in bounds, so that they exceed the errors of subnormal numbers.
_SMALLEST_OFFSET = 2.0**-80
# Roundings of a product besides those of its sum: of the factors, the offsets and the slack.
_OTHER_ROUNDINGS = 16
_TERM_ELEMENTS = 2**17  # Coordinates of points whose terms are computed at once.
_MAX_CROWDS, _CROWD = 16, 1024  # Largest number of groups of points, and their least mean size.
_CENTRED = 4096  # Points of a crowd whose mean is its centre, at most.
_FEW = 64  # Different queries for which subtraction costs less than products in float64.
FETCH_BYTES = 16 * 2**20  # Largest size of items that are subtracted from at once.
_SEPARATION_BYTES = 64 * 2**20  # Largest size of separations that are held at once.


class Precision(enum.Enum):
    """Floating-point format of scores."""

    SINGLE = "float32"
    DOUBLE = "float64"

    def enabled(self) -> AbstractContextManager[None]:
        """A context in which JAX computes in this format; it holds for the current thread."""
        return jax.enable_x64(self is Precision.DOUBLE)

    def roundoff(self, platform: str) -> float:
        """Unit roundoff of sums of products on a platform."""
        # TPUs compute float32 from six products in bfloat16, and float64 from pairs of float32.
        if self is Precision.SINGLE:
            return 2.0**-21 if platform == "tpu" else 2.0**-24
        return 2.0**-44 if platform == "tpu" else 2.0**-53


Vectors = tuple[Float[Array, "n v"], ...]  # Of points, for each space whose products rank them.


class Factors(NamedTuple):
    """Factors of the scores of points."""

    query: Vectors  # Of the points as queries.
    gallery: Vectors  # Of the points as gallery items.
    slack: tuple[Float[Array, "n 2"], ...]  # a and b of the bound; 0 for padding.


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """How points are compared."""

    space: Space
    centre: Float[np.ndarray, " d"]  # Where scores are most accurate, in float64.
    precision: Precision

    @classmethod
    def around(
        cls, space: Space, points: Float[np.ndarray, "n d"], precision: Precision = Precision.SINGLE
    ) -> "Score":
        """A score that is most accurate near the given points."""
        inputs.check_space(space)
        return cls(space, np.mean(points, axis=0, dtype=np.float64), precision)

    def factors(
        self, x: Float[ArrayLike, "n d"], valid: Bool[ArrayLike, " n"] | None = None
    ) -> Factors:
        """Factors of the scores of points, computed in float64 and rounded to the precision.

        Rows that are not valid are padding, which scores `PADDING` with any point.
        """
        on_devices = isinstance(x, jax.Array)
        platform = (next(iter(x.devices())) if on_devices else jax.local_devices()[0]).platform
        roundoffs = tuple(p.roundoff(platform) for p in (self.precision, Precision.DOUBLE))
        with jax.enable_x64(True):
            return _factors_of(self.space, x, valid, self.centre, self.precision, roundoffs)


def highest(space: Space, queries: Vectors, items: Vectors) -> Float[Array, "n m"]:
    """Scores of all pairs, which are upper bounds on −separation, from vectors of `Factors`."""
    return _in_space(space, list(map(inner_products, queries, items)), 1)


def lowest(space: Space, queries: Factors, items: Factors) -> Float[Array, "n m"]:
    """Lower bounds on −separation of all pairs."""
    products = map(inner_products, queries.query, items.gallery)
    slacks = (
        of_query[:, :1] * of_item[:, 1] + of_query[:, 1:] * of_item[:, 0]
        for of_query, of_item in zip(queries.slack, items.slack, strict=True)
    )
    bounds = [product - 2 * slack for product, slack in zip(products, slacks, strict=True)]
    return _in_space(space, bounds, -1)


def _in_space(space: Space, bounds: list[Float[Array, "n m"]], sign: int) -> Float[Array, "n m"]:
    """Upper (1) or lower (−1) bounds on −separation in a space from those in each of its parts."""
    if not isinstance(space, Composite):
        return bounds[0]
    distance = space.combined(
        part.distance_at(jnp.maximum(-bound, 0))
        for (part, _), bound in zip(space.parts, bounds, strict=True)
    )
    # Bounds the relative error of distances that are computed from separations.
    error = 2.0**-16 if distance.dtype == jnp.float32 else 2.0**-36
    padding = bounds[0] <= PADDING / 2  # Its distance may not be finite.
    return jnp.where(padding, PADDING, (sign * error - 1) * distance)


def largest_slack(queries: Factors, items: Factors) -> Float[Array, " n"]:
    """A bound on the slack of each query and any item, where one space ranks them."""
    (of_queries,), (of_items,) = queries.slack, items.slack
    largest = jnp.max(of_items, axis=0)
    return of_queries[:, 0] * largest[1] + of_queries[:, 1] * largest[0]


def widened(threshold: Float[Array, "..."], sign: int) -> Float[Array, "..."]:
    """A threshold moved up (1) or down (−1) by more than its own rounding errors."""
    moved = threshold + sign * 64 * jnp.finfo(threshold.dtype).eps * jnp.abs(threshold)
    return jnp.where(jnp.isinf(threshold), threshold, moved)


@functools.partial(jax.jit, static_argnames=("precision", "roundoffs"))
def _factors_of(
    space: Space,
    x: Float[ArrayLike, "n d"],
    valid: Bool[ArrayLike, " n"] | None,
    centre: Float[ArrayLike, " d"],
    precision: Precision,
    roundoffs: tuple[float, float],
) -> Factors:
    def score(inputs: tuple[Array, Array]) -> Factors:
        x, valid = inputs
        x = x.astype(jnp.float64)
        parts = [(space, x, centre)]
        if isinstance(space, Composite):
            spaces = [part for part, _ in space.parts]
            parts = list(zip(spaces, space.split(x), space.split(centre), strict=True))
        factors = Factors(*zip(*(_factors(*part, valid, roundoffs) for part in parts), strict=True))
        return jax.tree.map(lambda x: x.astype(precision.value), factors)

    valid = jnp.ones(len(x), bool) if valid is None else valid
    # In blocks of a power of two, or the terms in float64 would take much memory.
    rows = math.gcd(len(x), 1 << max(_TERM_ELEMENTS // x.shape[1], 1).bit_length())
    blocks = (array.reshape(-1, rows, *array.shape[1:]) for array in (x, valid))
    factors = lax.map(score, tuple(blocks))
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[2]), factors)


def _factors(
    space: InnerProductSpace,
    x: Float[Array, "n d"],
    centre: Float[Array, " d"],
    valid: Bool[Array, " n"],
    roundoffs: tuple[float, float],
) -> tuple[Float[Array, "n v"], Float[Array, "n v"], Float[Array, "n 2"]]:
    """The fields of `Factors` in one space."""
    terms = space.search_terms(x, centre)
    a, b = _slack(terms, x.shape[1], roundoffs)
    # One product gives ⟨query_i, gallery_j⟩ − offset_i − offset_j + slack: the score itself, which
    # is by the slack above −separation, so that rounding errors of at most the slack keep it above.
    offset, one = terms.offset[:, None], jnp.ones_like(a)
    factors = (
        jnp.concatenate([terms.query, -offset, one, a, b], axis=1),
        jnp.concatenate([terms.gallery, one, -offset, b, a], axis=1),
        jnp.concatenate([a, b], axis=1),
    )
    # Padding is `PADDING` times the 1 of the other factor.
    query, gallery = np.zeros((2, factors[0].shape[1]))
    query[-4] = gallery[-3] = PADDING
    padding = query, gallery, np.zeros(2)
    return jax.tree.map(lambda x, row: jnp.where(valid[:, None], x, row), factors, padding)


def _slack(
    terms: SearchTerms, dim: int, roundoffs: tuple[float, float]
) -> tuple[Float[Array, "n 1"], Float[Array, "n 1"]]:
    """The a and b of the bound.

    Relative to the sum of its absolute products, a score errs by at most ε + ρ_i + ρ_j: ε for the
    product, ρ for the terms and the separations in float64. This is at most e_i·e_j with
    e = √ε·(1 + ρ/ε).
    """
    product, double = roundoffs
    epsilon = product * (terms.query.shape[1] + 4 + _OTHER_ROUNDINGS)
    rho = 2 * double * (dim + _OTHER_ROUNDINGS) * terms.condition
    offset = jnp.maximum(terms.offset, _SMALLEST_OFFSET)
    square = jnp.sum(terms.query * terms.query, axis=1)
    f = jnp.sqrt(jnp.maximum(1, square / (2 * offset)))
    b = (2 * epsilon) ** 0.5 * (1 + rho / epsilon) * f
    return (b * offset)[:, None], b[:, None]


def certify(
    what: str,
    queries: Points,
    score: Score,
    by_products: Callable[[Rows, Score], Rows],
    by_subtraction: Callable[[Rows], None],
) -> None:
    """Answers all queries exactly, and logs how many each arithmetic answered.

    Products in float32 answer most queries. Where points crowd, their differences drown in the
    roundings of their lengths: those queries are asked again with products in float64, in which
    points are taken relative to the centre of their crowd. Queries with duplicates or near-ties
    beyond the candidates remain, and are answered by subtraction. `by_products` answers the queries
    in some rows, and returns the rows of those whose answer is not certain.
    """
    rows = by_products(np.arange(len(queries)), score)
    repeated = len(rows)
    if not _are_few(queries, rows):
        left = []
        for crowd in _crowds(queries, rows):
            sample = inputs.host_rows(queries, crowd[:: -(-len(crowd) // _CENTRED)])
            left.append(by_products(crowd, Score.around(score.space, sample, Precision.DOUBLE)))
        rows = np.sort(np.concatenate(left))
    if len(rows):
        by_subtraction(rows)
    _LOG.info(
        "%s of %d queries, all exact: certified=%d by products in float32, "
        "%d by products in float64, %d by subtraction",
        *(what, len(queries), len(queries) - repeated, repeated - len(rows), len(rows)),
    )


def _are_few(queries: Points, rows: Rows) -> bool:
    """Whether few of the queries differ, so that subtraction costs less than another search."""
    found: set[bytes] = set()
    for part in inputs.split(rows, _CROWD):
        found.update(row.tobytes() for row in unique_rows(inputs.host_rows(queries, part))[0])
        if len(found) > _FEW:
            return False
    return True


def _crowds(queries: Points, rows: Rows) -> list[Rows]:
    """Splits rows into groups, so that crowds far from each other are in different ones."""
    # Points are cut where their projections on a line are farthest apart.
    line = np.random.default_rng(0).normal(size=queries.shape[1])
    parts = inputs.split(rows, _CROWD)
    places = np.concatenate([inputs.host_rows(queries, part) @ line for part in parts])
    order = np.argsort(places)
    cuts = int(np.clip(len(rows) // _CROWD, 1, _MAX_CROWDS)) - 1
    widest = np.argsort(np.diff(places[order]))[len(rows) - 1 - cuts :]
    return np.split(rows[order], np.sort(widest) + 1)


def unique_rows(x: np.ndarray) -> tuple[Float[np.ndarray, "u d"], Int[np.ndarray, " n"]]:
    """The different rows, and which of them each row is."""
    rows = np.ascontiguousarray(x).view(np.dtype((np.void, x.shape[1] * x.itemsize))).ravel()
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    return x[first], inverse


def separations(
    space: Space, queries: Float[np.ndarray, "n d"], gallery: Points
) -> Iterator[Float[np.ndarray, " m"]]:
    """Yields each query's separations from all items, by subtraction in float64.

    Points are float32 numbers, taken as exact. Items at equal separations tie, and ties are in the
    order of the gallery.
    """
    size, dim = len(gallery), queries.shape[1]
    block = int(np.clip(_SEPARATION_BYTES // (8 * size), 1, len(queries)))
    rows = inputs.round_up(min(max(FETCH_BYTES // (4 * dim), 1), size), inputs.LANES)
    for part in inputs.split(queries, block):
        padded = inputs.pad_rows(part, block)
        found = np.empty((block, size))
        for first in range(0, size, rows):
            items = inputs.host_rows(gallery, np.s_[first : first + rows])
            with jax.enable_x64(True):
                matrix = separation_matrix(space, padded, inputs.pad_rows(items, rows))
            found[:, first : first + rows] = np.asarray(matrix)[:, : len(items)]
        yield from found[: len(part)]


@jax.jit
def separation_matrix(
    space: Space, queries: Float[Array, "b d"], items: Float[Array, "r d"]
) -> Float[Array, "b r"]:
    """Separations by subtraction; needs float64 to be enabled."""
    items = items.astype(jnp.float64)
    return lax.map(lambda query: space.separation(query, items), queries.astype(jnp.float64))
