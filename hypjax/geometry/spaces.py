"""Spaces: small objects that answer "how far", with one face for losses, search and plots."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import poincare, products

# Nearer to the boundary, float32 may round 1 − c‖x‖² to 0.
_FLOAT32_MARGIN = 1e-6
# Farther out, what points are compared by would overflow.
_FLOAT32_FAR = 1e37
# By which unit vectors in bfloat16 may miss the length 1.
_LENGTH_MARGIN = 2**-7

Role = Literal["query", "gallery"]


class SearchTerms(NamedTuple):
    """What exact search compares points by.

    The nearer point j is to point i, the larger is ⟨query_i, gallery_j⟩ − offset_j. The product is
    symmetric, to the last bit, so that one tile of products serves searches in both directions.

    Attributes:
        query: Vectors of the points that search.
        gallery: Vectors of the points to be found.
        offset: Of the points to be found.
    """

    query: Float[Array, "n k"]
    gallery: Float[Array, "n k"]
    offset: Float[Array, " n"]


@runtime_checkable
class Space(Protocol):
    """What a loss, an evaluation or a search asks of a space."""

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Maps features (a head's output, unbounded) to points of the space."""

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """Which features `embed` shortens first."""

    def distance(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """Distances of points, pairwise along the leading axes, by subtraction."""

    def distance_matrix(
        self, x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """Distances of all pairs of points, by one matrix product."""

    def search_vectors(self, x: Float[ArrayLike, "n d"], role: Role) -> Float[Array, "n k"]:
        """Vectors whose inner product, query with gallery, is the larger the closer the points."""

    def search_terms(self, x: Float[ArrayLike, "n d"]) -> SearchTerms:
        """The same ranking as `search_vectors`, by a product that both roles share."""

    def flaws(self, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
        """Which rows are no points of the space, by a name for the reason."""

    def check(self, x: Float[ArrayLike, "n d"], *, first: int = 0) -> None:
        """Raises a `UserError` that names the first row that is no point of the space.

        Args:
            x: Rows of coordinates.
            first: Number by which messages call the first row.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sphere:
    """The unit sphere with the squared chord 2 − 2cos as distance (Hyp-ViT, Eq. 4)."""

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """L2-normalises; a zero vector stays zero."""
        features = jnp.asarray(features, jnp.result_type(jnp.float32, features))
        square = jnp.sum(features * features, axis=-1, keepdims=True)
        positive = square > 0
        return jnp.where(positive, features / jnp.sqrt(jnp.where(positive, square, 1)), 0)

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """None: lengths do not count."""
        return jnp.zeros(jnp.shape(features)[:-1], bool)

    def distance(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """‖x − y‖², which is 2 − 2cos on the sphere."""
        return jnp.sum((x - y) ** 2, axis=-1)

    def distance_matrix(
        self, x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """2 − 2⟨x, y⟩ of all pairs."""
        return 2 - 2 * products.inner_products(x, y)

    def search_vectors(self, x: Float[ArrayLike, "n d"], role: Role) -> Float[Array, "n d"]:
        """The points themselves, in either role: the inner product is the cosine."""
        return x

    def search_terms(self, x: Float[ArrayLike, "n d"]) -> SearchTerms:
        """The points themselves, and what rounding has left them longer than 1.

        So they are ranked by ‖x − y‖², as `distance` measures.
        """
        return SearchTerms(x, x, (jnp.sum(x * x, axis=-1) - 1) / 2)

    def flaws(self, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
        """Rows that are not finite or not of length 1."""
        norm = jnp.linalg.norm(x, axis=-1)
        return {"infinite": _not_finite(x), "length": ~(jnp.abs(norm - 1) <= _LENGTH_MARGIN)}

    def check(self, x: Float[ArrayLike, "n d"], *, first: int = 0) -> None:
        """Raises a `UserError` unless every row is finite and of length 1."""
        _refuse(self, x, first, {"infinite": "is not finite", "length": "is not of length 1"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PoincareBall:
    """The Poincaré ball of radius 1/√c with the geodesic distance (Hyp-ViT, Eq. 2).

    Attributes:
        c: Negative curvature, at least 0 (0: flat space with the distance 2‖x − y‖).
        clip_radius: Largest norm of features before the exponential map; None: not clipped.
        riemannian: Whether gradients that flow back through `embed` to the features are scaled by
            the inverse of the metric at the point, (1 − c‖x‖²)²/4 (HIER, CVPR 2023).
    """

    c: float | Float[Array, ""] = 0.1
    clip_radius: float | None = dataclasses.field(default=2.3, metadata={"static": True})
    riemannian: bool = dataclasses.field(default=False, metadata={"static": True})

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Clips, maps from the tangent space at the origin, and keeps off the boundary."""
        if self.riemannian:
            scale = poincare.lambda_x(self._point(features), self.c) ** -2
            constant = lax.stop_gradient(features)
            features = constant + lax.stop_gradient(scale) * (features - constant)
        return self._point(features)

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """Those longer than the clip radius."""
        radius = jnp.inf if self.clip_radius is None else self.clip_radius
        return jnp.linalg.norm(jnp.asarray(features), axis=-1) > radius

    def _point(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        v = poincare.clip_features(features, self.clip_radius)
        return poincare.project(poincare.expmap0(v, self.c), self.c)

    def distance(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """Geodesic distances, by subtraction."""
        return poincare.dist(x, y, self.c)

    def distance_matrix(
        self, x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """Geodesic distances of all pairs."""
        return poincare.dist_matrix(x, y, self.c)

    def search_vectors(self, x: Float[ArrayLike, "n d"], role: Role) -> Float[Array, "n d+1"]:
        """One coordinate more than the points, valid for every c >= 0.

        The query (2x, −(1 + c‖x‖²)) and the gallery (y, ‖y‖²)/(1 − c‖y‖²) have the product
        ‖x‖² − (1 − c‖x‖²)·s/P, which falls as the distance from a given query grows.
        """
        xx = jnp.sum(x * x, axis=-1, keepdims=True)
        if role == "query":
            return jnp.concatenate([2 * x, -(1 + self.c * xx)], axis=-1)
        return jnp.concatenate([x, xx], axis=-1) / (1 - self.c * xx)

    def search_terms(self, x: Float[ArrayLike, "n d"]) -> SearchTerms:
        """One coordinate more than the points, valid for every c >= 0.

        With a = 2x/(1 − c‖x‖²) and p = 2‖x‖²/(1 − c‖x‖²), the query (a, −√c·p), the gallery
        (a, √c·p) and the offset p give −2s/P, up to a constant of the query.
        """
        xx = jnp.sum(x * x, axis=-1, keepdims=True)
        gap = 1 - self.c * xx
        a, p = 2 * x / gap, 2 * xx / gap
        last = jnp.sqrt(self.c) * p
        query = jnp.concatenate([a, -last], axis=-1)
        return SearchTerms(query, jnp.concatenate([a, last], axis=-1), p[:, 0])

    def flaws(self, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
        """Rows that are not finite, or not inside the ball to float32."""
        xx = jnp.sum(x * x, axis=-1)
        inside = self.c * xx <= 1 - _FLOAT32_MARGIN
        return {"infinite": _not_finite(x), "outside": ~inside, "far": ~(xx < _FLOAT32_FAR)}

    def check(self, x: Float[ArrayLike, "n d"], *, first: int = 0) -> None:
        """Raises a `UserError` unless every row is finite and, to float32, inside the ball."""
        outside = f"lies outside the ball of radius 1/√{float(self.c):g}, or all but on it"
        words = {"infinite": "is not finite", "outside": outside, "far": "is too far out"}
        _refuse(self, x, first, words)


def _not_finite(x: Float[ArrayLike, "n d"]) -> Bool[Array, " n"]:
    return ~jnp.all(jnp.isfinite(x), axis=-1)


def _refuse(space: Space, x: Float[ArrayLike, "n d"], first: int, words: Mapping[str, str]) -> None:
    """Looks for flaws where the points are, so that only counts come back from a device."""
    with jax.enable_x64(True):
        found = jax.device_get(_count_flaws(space, x))
    for flaw, why in words.items():
        row, count = found[flaw]
        if count:
            raise UserError(f"embedding {first + row} {why} ({count} of {len(x)} rows)")


@jax.jit
def _count_flaws(
    space: Space, x: Float[ArrayLike, "n d"]
) -> dict[str, tuple[Int[Array, ""], Int[Array, ""]]]:
    """The first row with each flaw, and how many have it."""
    flaws = space.flaws(x.astype(jnp.float64))
    return {name: (jnp.argmax(rows), jnp.sum(rows)) for name, rows in flaws.items()}
