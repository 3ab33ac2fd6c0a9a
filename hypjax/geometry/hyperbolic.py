"""The Poincaré ball and the hyperboloid as spaces."""

import dataclasses
import math
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.geometry import arithmetic, lorentz, poincare
from hypjax.geometry.arithmetic import Cols, Matrix, Numbers, Operand, Points, Rows, Scalar, Vectors
from hypjax.geometry.spaces import InnerProductSpace, Role, SearchTerms, pytree, require_nonnegative

_MAX_SQUARE_NORM = 1e37  # Above this ‖x‖², the search terms of a point would overflow in float32.
_BOUNDARY_MARGIN = 1e-6  # Smallest 1 − c‖x‖² of a valid point: float32 may round others to 0.
_MAX_COSH = 1e6  # Largest √(1 + c‖x‖²) of a valid point: its image in the ball is valid, too.
_SMALLEST_CURVATURE = 1e-12  # Smallest c > 0 at which scores do not overflow.
_SQRT2 = 2**0.5


def static(default: Any) -> Any:
    """Declares a dataclass field that belongs to the structure of a space's pytree."""
    return dataclasses.field(default=default, metadata={"static": True})


class CurvedSpace(InnerProductSpace):
    """A model of hyperbolic space; a module has the functions for its distances and means."""

    functions: ClassVar[ModuleType]  # `hypjax.geometry.poincare` or `lorentz`.
    c: Scalar
    clip_radius: float | None
    riemannian: bool
    max_distance: float | None

    def __post_init__(self) -> None:
        """Raises a `ValueError` if a field is out of range or not a number."""
        require_nonnegative("c", self.c)
        if self.clip_radius is not None and not self.clip_radius > 0:
            raise ValueError(f"clip_radius is {self.clip_radius}; it must be above 0, or None")

    @property
    def max_feature_norm(self) -> float:
        """Largest norm of features after clipping or rescaling."""
        if self.max_distance is not None:
            return self.max_distance / 2
        return math.inf if self.clip_radius is None else self.clip_radius

    def embed(self, features: Vectors) -> Points:
        """Clips or rescales features to v; maps v to a point at distance 2‖v‖ from the origin."""
        if self.riemannian:
            inverse_metric = poincare.lambda_x(self.to_ball(self._embed(features)), self.c) ** -2
            # The values stay the same; their gradients are multiplied by the inverse metric.
            constant = lax.stop_gradient(features)
            features = constant + lax.stop_gradient(inverse_metric) * (features - constant)
        return self._embed(features)

    def _embed(self, features: Vectors) -> Points:
        return self.from_tangent(self._shortened(features))

    def _shortened(self, v: Vectors, max_norm: float = _MAX_SQUARE_NORM**0.5) -> Points:
        """Clips or rescales features; clips to at most `max_norm`, whose square is finite."""
        if self.max_distance is not None:
            return poincare.rescale_features(v, self.max_distance)
        return poincare.clip_features(v, min(self.max_feature_norm, max_norm))

    def _unshortened(self, v: Points) -> Points:
        """Inverts the rescaling of features, if any."""
        if self.max_distance is None:
            return v
        return poincare.unrescale_features(v, self.max_distance)

    def distance(self, x: Operand, y: Operand) -> Numbers:
        """Geodesic distances, see `poincare.dist` and `lorentz.dist`."""
        return self.functions.dist(x, y, self.c)

    def mean(self, x: arithmetic.PointSets, weights: arithmetic.Weights = None) -> Points:
        """The Fréchet mean, see `poincare.frechet_mean`."""
        return self.functions.frechet_mean(x, self.c, weights)

    def separation(self, x: Operand, y: Operand) -> Numbers:
        """sinh²(√c·d/2)/c for points at distance d."""
        return self.functions.separation(x, y, self.c)

    def distance_at(self, separation: Float[arithmetic.AnyArray, "*b"]) -> Numbers:
        """(2/√c)·asinh(√(c·separation))."""
        return poincare.dist_at(separation, self.c)

    def distance_matrix(self, x: Rows, y: Cols) -> Matrix:
        """Geodesic distances of all pairs, see `poincare.dist_matrix` and `lorentz.dist_matrix`.

        They come from a matrix product if √c times the largest distance of an embedded feature from
        the origin is at most 5, and otherwise from subtraction. If c is traced, the program decides
        each time that it runs; without `clip_radius` and `max_distance`, it always subtracts.
        """
        reach = 2 * self.max_feature_norm
        c = self.c if isinstance(self.c, jax.core.Tracer) else float(self.c)
        subtract = reach == math.inf or c * reach**2 > poincare.MAX_PRODUCT_RADIUS**2
        return self.functions.dist_matrix(x, y, self.c, subtract=subtract)

    def check(self, x: Rows, *, first: int = 0) -> None:
        """Raises a `UserError` unless all rows are points and c is 0 or at least 1e-12."""
        if not (self.c == 0 or self.c >= _SMALLEST_CURVATURE):
            raise UserError(f"c is {float(self.c):g}; a search needs 0, or at least 1e-12")
        super().check(x, first=first)


@pytree
@dataclasses.dataclass(frozen=True)
class PoincareBall(CurvedSpace):
    """The Poincaré ball of radius 1/√c with the geodesic distance (Hyp-ViT, Eq. 2).

    Attributes:
        c: The curvature is −c ≤ 0; at c = 0 the space is flat, with the distance 2‖x − y‖.
        clip_radius: Largest norm of features before the exponential map, or None for no clipping.
        riemannian: Whether `embed` scales the gradients of features by the inverse metric at the
            point, (1 − c‖x‖²)²/4 (HIER, CVPR 2023).
        max_distance: Bound of points' distances from the origin, to which features are rescaled
            instead of being clipped (`poincare.rescale_features`); None for no rescaling.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import PoincareBall
        >>> ball = PoincareBall(c=0.1, clip_radius=2.3)
        >>> x, y = ball.embed(np.array([[3.0, 4.0], [0.5, 0.0]]))
        >>> print(f"{ball.distance(x, y):.3f}")
        4.131
    """

    functions: ClassVar[ModuleType] = poincare
    c: Scalar = 0.1
    clip_radius: float | None = static(2.3)
    riemannian: bool = static(False)
    max_distance: float | None = static(None)

    def __str__(self) -> str:
        return f"the ball of c = {self.c}"

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features longer than the clip radius; none if features are rescaled."""
        radius = jnp.inf if self.max_distance is not None else self.max_feature_norm
        scaled, scale = arithmetic.scaled(jnp.asarray(features, jnp.result_type(float, features)))
        return jnp.linalg.norm(scaled, axis=-1) > radius / scale[..., 0]

    def features(self, x: Vectors) -> Points:
        """The clipped features: the logarithmic map at the origin, without the rescaling."""
        return self._unshortened(poincare.logmap0(x, self.c))

    def search_vectors(self, x: Rows, role: Role) -> Float[Array, "n d+1"]:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        The query (2x, −(1 + c‖x‖²)) and the gallery item (y, ‖y‖²)/(1 − c‖y‖²) have the product
        ‖x‖² − (1 − c‖x‖²)·s/P, with s = ‖x − y‖² and P = (1 − c‖x‖²)(1 − c‖y‖²). For each query,
        the product falls as the distance grows.
        """
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1, keepdims=True)
        if role == "query":
            return jnp.concatenate([2 * x, -(1 + self.c * xx)], axis=-1)
        return jnp.concatenate([x, xx], axis=-1) / (1 - self.c * xx)

    @arithmetic.broadcasting
    def search_terms(self, x: Rows, centre: Float[arithmetic.AnyArray, " d"]) -> SearchTerms:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        The separation of points x and y is s/P, with s = ‖x − y‖² and P = (1 − c‖x‖²)(1 − c‖y‖²).
        Let w = (−m) ⊕ x be the point after the Möbius translation that moves the centre m to the
        origin, g = 1 − c‖w‖², and σ = ‖w‖²/g its separation from the centre. Then the query
        √2·(w/g, −√c·σ), the gallery item √2·(w/g, √c·σ) and the offsets σ give −s/P. Without
        cancellation, σ = s/P and w/g = ((1 − c‖m‖²)(x − m) − c·s·m)/P, with y = m in s and P.
        """
        x, centre = arithmetic.inexact(x, centre)
        c = jnp.asarray(self.c, x.dtype)
        moved = x - centre
        s = jnp.sum(moved * moved, axis=-1, keepdims=True)
        inside = 1 - c * jnp.sum(centre * centre)
        gap = 1 - c * jnp.sum(x * x, axis=-1, keepdims=True)
        offset = s / (inside * gap)
        vectors = _SQRT2 * (inside * moved - c * s * centre) / (inside * gap)
        return _search_terms(vectors, offset, c, (1 / gap + 1 / inside)[:, 0])

    def ball(self) -> "PoincareBall":
        """The ball itself."""
        return self

    def flaws(self, x: Rows) -> dict[str, Bool[Array, " n"]]:
        """Marks rows outside the ball, or too far out for float32."""
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1)
        inside = self.c * xx <= 1 - _BOUNDARY_MARGIN
        return {
            "is outside the ball of radius 1/√c, or too close to its surface": ~inside,
            "is too far out": ~(xx < _MAX_SQUARE_NORM),
        }


@pytree
@dataclasses.dataclass(frozen=True)
class Lorentz(CurvedSpace):
    """The hyperboloid of curvature −c with the geodesic distance (MERU, ICML 2023).

    The space is isometric to `PoincareBall(c, clip_radius)`: embedded features have the same
    distances, 2‖v‖ from the origin. Points are the space components, [..., d], of
    `hypjax.geometry.lorentz`. MERU embeds features at distance α‖v‖ from the origin, where the
    learned α is twice the `feature_scale`, and does not clip them.

    Attributes:
        c: The curvature is −c ≤ 0; at c = 0 the space is flat, with the distance ‖x − y‖ of points,
            which is twice the distance of features.
        clip_radius: Largest norm of scaled features, as in `PoincareBall`.
        feature_scale: Factor of features, above 0.
        riemannian: Whether the ball's inverse metric scales gradients, as in `PoincareBall`.
        max_distance: Bound of points' distances from the origin, as in `PoincareBall`.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import Lorentz
        >>> space = Lorentz(c=0.1, clip_radius=2.3)  # The ball's distances, in other coordinates.
        >>> x, y = space.embed(np.array([[3.0, 4.0], [0.5, 0.0]]))
        >>> print(f"{space.distance(x, y):.3f}")
        4.131
    """

    functions: ClassVar[ModuleType] = lorentz
    c: Scalar = 0.1
    clip_radius: float | None = static(2.3)
    feature_scale: Scalar = dataclasses.field(default=1.0, metadata={"learnable": True})
    riemannian: bool = static(False)
    max_distance: float | None = static(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonnegative("feature_scale", self.feature_scale)

    def __str__(self) -> str:
        return f"the hyperboloid of c = {self.c}"

    def _embed(self, features: Vectors) -> Points:
        max_norm = _MAX_SQUARE_NORM**0.5 / 2  # `from_tangent` doubles the vectors.
        return self.from_tangent(self._shortened(self._scaled(features), max_norm))

    def from_tangent(self, v: Vectors) -> Points:  # noqa: D102
        return lorentz.expmap0(2 * v, self.c)

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that exceed the clip radius after scaling."""
        return self.ball().clipped(self._scaled(features))

    def _scaled(self, features: Vectors) -> Points:
        (features,) = arithmetic.inexact(features)
        return features * jnp.asarray(self.feature_scale, features.dtype)

    def features(self, x: Vectors) -> Points:
        """The clipped features: half the logarithmic map at the origin, not rescaled or scaled."""
        v = self._unshortened(lorentz.logmap0(x, self.c) / 2)
        return v / jnp.asarray(self.feature_scale, v.dtype)

    def search_vectors(self, x: Rows, role: Role) -> Float[Array, "n d+1"]:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        With T = √(1 + c‖x‖²), the query (x, −T_x) and the gallery item (y, ‖y‖²/(1 + T_y)) have
        the product ‖x‖²/(1 + T_x) − 2·separation.
        """
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1, keepdims=True)
        cosh = jnp.sqrt(1 + self.c * xx)
        return jnp.concatenate([x, -cosh if role == "query" else xx / (1 + cosh)], axis=-1)

    @arithmetic.broadcasting
    def search_terms(self, x: Rows, centre: Float[arithmetic.AnyArray, " d"]) -> SearchTerms:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        Let w be the point after the boost that moves the centre to the origin, and σ its separation
        from the centre. Then the query (w, −2√c·σ)/√2, the gallery item (w, 2√c·σ)/√2 and the
        offsets σ give −separation. `lorentz.moved_to_origin` computes w and σ without cancellation.
        """
        x, centre = arithmetic.inexact(x, centre)
        c = jnp.asarray(self.c, x.dtype)
        moved, offset = lorentz.moved_to_origin(x, centre, c)
        cosh, centre_cosh = (jnp.sqrt(1 + c * jnp.sum(z * z, axis=-1)) for z in (x, centre))
        return _search_terms(moved / _SQRT2, offset, c, 2 * (cosh + centre_cosh))

    def ball(self) -> PoincareBall:
        """The ball with the same c, which shortens features in the same way."""
        return PoincareBall(self.c, self.clip_radius, self.riemannian, self.max_distance)

    def to_ball(self, x: Vectors) -> Points:
        """The isometry to the ball, x / (1 + √(1 + c‖x‖²))."""
        return lorentz.to_poincare(x, self.c)

    def from_ball(self, x: Vectors) -> Points:
        """The isometry from the ball, 2x / (1 − c‖x‖²)."""
        return lorentz.from_poincare(x, self.c)

    def flaws(self, x: Rows) -> dict[str, Bool[Array, " n"]]:
        """Marks rows that are too far out for float32."""
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1)
        return {"is too far out": ~((xx < _MAX_SQUARE_NORM) & (1 + self.c * xx <= _MAX_COSH**2))}


def _search_terms(vectors: Array, offset: Array, c: Array, condition: Array) -> SearchTerms:
    """Appends the coordinate √(2c)·offset, whose sign differs between queries and gallery."""
    coordinate = jnp.sqrt(2 * c) * offset
    query = jnp.concatenate([vectors, -coordinate], axis=-1)
    gallery = jnp.concatenate([vectors, coordinate], axis=-1)
    return SearchTerms(query, gallery, offset[:, 0], condition)
