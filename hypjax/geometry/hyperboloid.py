"""The hyperboloid as a space."""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.geometry import arithmetic, lorentz
from hypjax.geometry.arithmetic import Points, Rows, Vectors
from hypjax.geometry.ball import CurvedSpace, PoincareBall, static
from hypjax.geometry.spaces import MAX_SQUARE_NORM, Role, SearchTerms, require_nonnegative

_MAX_COSH = 1e6  # Largest √(1 + c‖x‖²) of a valid point: its image in the ball is valid, too.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lorentz(CurvedSpace):
    """The hyperboloid of curvature −c with the geodesic distance (MERU, ICML 2023).

    The space is isometric to `PoincareBall(c, clip_radius)`: embedded features have the same
    distances, 2‖v‖ from the origin. Points are the space components, [..., d], of
    `hypjax.geometry.lorentz`. MERU embeds features at distance α‖v‖ from the origin, where the
    learned α is twice the `feature_scale`, and does not clip them.

    Attributes:
        c: Negative curvature, at least 0; 0 is flat space with the distance ‖x − y‖ of points,
            which is twice the distance of features.
        clip_radius: Largest norm of scaled features before the exponential map, or None for no
            clipping.
        feature_scale: Factor of features, above 0.
        riemannian: Whether gradients of features are scaled by the ball's inverse metric, as in
            `PoincareBall`.
    """

    functions = lorentz
    c: float | Float[Array, ""] = 0.1
    clip_radius: float | None = static(2.3)
    feature_scale: float | Float[Array, ""] = dataclasses.field(
        default=1.0, metadata={"learnable": True}
    )
    riemannian: bool = static(False)

    def __post_init__(self) -> None:
        """Raises a `ValueError` if a field is out of range or no number."""
        super().__post_init__()
        require_nonnegative("feature_scale", self.feature_scale)

    def __str__(self) -> str:
        return f"the hyperboloid of c = {self.c}"

    def _embed(self, features: Vectors) -> Points:
        return self.from_tangent(self._clip(self._scaled(features), MAX_SQUARE_NORM**0.5 / 2))

    def from_tangent(self, v: Vectors) -> Points:
        """Points in the directions v, at distances 2‖v‖ from the origin but at most 12.2/√c."""
        return lorentz.expmap0(lorentz.shorten(2 * v, self.c), self.c)

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that exceed the clip radius after scaling."""
        return self.ball().clipped(self._scaled(features))

    def _scaled(self, features: Vectors) -> Vectors:
        (features,) = arithmetic.inexact(features)
        return features * jnp.asarray(self.feature_scale, features.dtype)

    def features(self, x: Vectors) -> Points:
        """The clipped features: half the logarithmic map at the origin, without the scale."""
        v = lorentz.logmap0(x, self.c) / 2
        return v / jnp.asarray(self.feature_scale, v.dtype)

    def _point_norms(self, norms: Any, xp: ModuleType) -> Any:
        """Norms of points from norms of clipped features, both times √c."""
        return xp.sinh(2 * norms)

    def search_vectors(self, x: Rows, role: Role) -> Float[Array, "n d+1"]:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        With T = √(1 + c‖x‖²), the query (x, −T_x) and the gallery item (y, ‖y‖²/(1 + T_y)) have
        the product ‖x‖²/(1 + T_x) − 2·separation.
        """
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1, keepdims=True)
        cosh = jnp.sqrt(1 + self.c * xx)
        return jnp.concatenate([x, -cosh if role == "query" else xx / (1 + cosh)], axis=-1)

    def search_terms(self, x: Rows, centre: Float[ArrayLike, " d"]) -> SearchTerms:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        Let w be the point after the boost that moves the centre to the origin, and σ its separation
        from the centre. Then the query (w, −2√c·σ)/√2, the gallery item (w, 2√c·σ)/√2 and the
        offsets σ give −separation. `lorentz.moved_to_origin` computes w and σ without cancellation.
        """
        x, centre = arithmetic.inexact(x, centre)
        c = jnp.asarray(self.c, x.dtype)
        moved, offset = lorentz.moved_to_origin(x, centre, c)
        vectors, last = moved / 2**0.5, jnp.sqrt(2 * c) * offset
        cosh, centre_cosh = (jnp.sqrt(1 + c * jnp.sum(z * z, axis=-1)) for z in (x, centre))
        return SearchTerms(
            jnp.concatenate([vectors, -last], axis=-1),
            jnp.concatenate([vectors, last], axis=-1),
            offset[:, 0],
            condition=2 * (cosh + centre_cosh),
        )

    def ball(self) -> PoincareBall:
        """The ball with the same c, which clips features in the same way."""
        return PoincareBall(self.c, self.clip_radius, self.riemannian)

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
        return {"is too far out": ~((xx < MAX_SQUARE_NORM) & (1 + self.c * xx <= _MAX_COSH**2))}
