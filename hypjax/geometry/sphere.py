"""The unit sphere as a space."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hypjax.geometry import arithmetic
from hypjax.geometry.arithmetic import Cols, Matrix, Numbers, Operand, Points, Rows, Vectors
from hypjax.geometry.spaces import InnerProductSpace, Role, SearchTerms, pytree

_LENGTH_TOLERANCE = 2**-7  # Error in the length of unit vectors: bfloat16's.
_SQRT2 = 2**0.5


@pytree
@dataclasses.dataclass(frozen=True)
class Sphere(InnerProductSpace):
    """The unit sphere with the squared chord 2 − 2cos as distance (Hyp-ViT, Eq. 4).

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Sphere
        >>> print(np.asarray(Sphere().embed(np.array([3.0, 4.0]))).round(3))
        [0.6 0.8]
        >>> print(Sphere().distance_matrix(np.eye(2), np.eye(2)))
        [[0. 2.]
         [2. 0.]]
    """

    squared = normalized = True

    def __str__(self) -> str:
        return "the sphere"

    def embed(self, features: Vectors) -> Points:
        """Scales features to length 1; zero vectors stay zero, infinite values become NaN."""
        (features,) = arithmetic.floating(features)
        features, _ = arithmetic.scaled(features)
        square = arithmetic.square_norm(features)
        zero = square == 0
        return jnp.where(zero, 0, features / jnp.sqrt(jnp.where(zero, 1, square)))

    @arithmetic.broadcasting
    def distance(self, x: Operand, y: Operand) -> Numbers:
        """‖x − y‖², which equals 2 − 2cos on the sphere."""
        x, y = arithmetic.inexact(x, y)
        return jnp.sum((x - y) ** 2, axis=-1)

    def similarity(self, distance: Float[arithmetic.AnyArray, "*b"]) -> Numbers:
        """The cosine."""
        return 1 - jnp.asarray(distance) / 2

    def features(self, x: Vectors) -> Points:
        """The points themselves: `embed` discards lengths."""
        return jnp.asarray(x)

    def mean(self, x: arithmetic.PointSets, weights: arithmetic.Weights = None) -> Points:
        """Σwx scaled to length 1: the point of least weighted sum of squared-chord distances."""
        (x,) = arithmetic.inexact(x)
        weighted = x if weights is None else jnp.asarray(weights)[..., None] * x
        return self.embed(jnp.sum(weighted, axis=-2))

    def distance_matrix(self, x: Rows, y: Cols) -> Matrix:
        """2 − 2⟨x, y⟩ for all pairs."""
        return 2 - 2 * arithmetic.inner_products(x, y)

    def search_vectors(self, x: Rows, role: Role) -> Float[Array, "n d"]:
        """The points themselves, in both roles: the inner product is the cosine."""
        return jnp.asarray(x)

    @arithmetic.broadcasting
    def search_terms(self, x: Rows, centre: Float[arithmetic.AnyArray, " d"]) -> SearchTerms:
        """Vectors √2·(x − centre), in both roles, and offsets ‖x − centre‖².

        They rank by ‖x − y‖², even if rounding has changed the lengths of points.
        """
        x, centre = arithmetic.inexact(x, centre)
        moved = x - centre
        offset = jnp.sum(moved * moved, axis=-1)
        vectors = _SQRT2 * moved
        return SearchTerms(vectors, vectors, offset, condition=jnp.ones_like(offset))

    def flaws(self, x: Rows) -> dict[str, Bool[Array, " n"]]:
        """Marks rows that are not of length 1."""
        (x,) = arithmetic.inexact(x)
        length = jnp.sqrt(jnp.sum(x * x, axis=-1))
        return {"is not of length 1": ~(jnp.abs(length - 1) <= _LENGTH_TOLERANCE)}
