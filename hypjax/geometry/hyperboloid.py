"""The hyperboloid as a space."""

import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.geometry import arithmetic, lorentz
from hypjax.geometry.arithmetic import Points, Rows, Vectors
from hypjax.geometry.ball import CurvedSpace, PoincareBall, static
from hypjax.geometry.spaces import MAX_SQUARE_NORM, Role, SearchTerms, as_tree, require_positive

_MAX_COSH = 1e6  # Largest √(1 + c‖x‖²) of a valid point: its image in the ball is valid, too.


@as_tree
@dataclasses.dataclass(frozen=True)
class Lorentz(CurvedSpace):
    """The hyperboloid of curvature −c with the geodesic distance (MERU, ICML 2023).

    It is isometric to `PoincareBall(c, clip_radius)`: features are embedded at the same distances
    from each other, 2‖v‖ from the origin. Points are space components, [..., d], see
    `hypjax.geometry.lorentz`. MERU embeds features at the distance α‖v‖ with a learned α, twice
    the `feature_scale`, and does not clip them.

    Attributes:
        c: Negative curvature, at least 0; 0 is flat space with the distance ‖x − y‖ of points,
            which is twice the distance of features.
        clip_radius: Largest norm of scaled features before the exponential map, or None for no
            clipping.
        feature_scale: Factor of features, above 0.
        riemannian: As of the ball, so that gradients are the ball's.
        max_distance: As of the ball, for scaled features.
    """

    functions = lorentz
    c: float | Float[Array, ""] = 0.1
    clip_radius: float | None = static(2.3)
    feature_scale: float | Float[Array, ""] = dataclasses.field(
        default=1.0, metadata={"learnable": True}
    )
    riemannian: bool = static(False)
    max_distance: float | None = static(None)

    def __post_init__(self) -> None:
        """Raises a `ValueError` if a number is out of range, or no number."""
        super().__post_init__()
        require_positive("feature_scale", self.feature_scale)

    def __str__(self) -> str:
        return f"the hyperboloid of c = {self.c}"

    def _embed(self, features: Vectors) -> Points:
        return self.from_tangent(self._shortened(self._scaled(features), MAX_SQUARE_NORM**0.5 / 2))

    def from_tangent(self, v: Vectors) -> Points:
        """The exponential map at the origin of 2v; as in the ball, to at most 12.2/√c."""
        return lorentz.expmap0(lorentz.shorten(2 * v, self.c), self.c)

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that are longer than the clip radius once they are scaled."""
        return self.ball().clipped(self._scaled(features))

    def _scaled(self, features: Vectors) -> Vectors:
        (features,) = arithmetic.inexact(features)
        return features * jnp.asarray(self.feature_scale, features.dtype)

    def features(self, x: Vectors) -> Points:
        """The clipped features, by half the logarithmic map at the origin."""
        v = self._unshortened(lorentz.logmap0(x, self.c) / 2)
        return v / jnp.asarray(self.feature_scale, v.dtype)

    def length_at(self, radius: Any, xp: ModuleType) -> Any:
        """See `PoincareBall.length_at`: sinh, of twice the radius."""
        return xp.sinh(2 * radius)

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

        Let w be the point moved by the boost that takes the centre to the origin, and σ its
        separation from the centre. Then the query (w, −2√c·σ)/√2, the gallery item (w, 2√c·σ)/√2
        and the offset σ give −separation. They are computed without cancellation, see
        `lorentz.moved_to_origin`.
        """
        x, centre = arithmetic.inexact(x, centre)
        c = jnp.asarray(self.c, x.dtype)
        moved, offset = lorentz.moved_to_origin(x, centre, c)
        vectors, last = moved / 2**0.5, jnp.sqrt(2 * c) * offset
        cosh, of_centre = (jnp.sqrt(1 + c * jnp.sum(z * z, axis=-1)) for z in (x, centre))
        return SearchTerms(
            jnp.concatenate([vectors, -last], axis=-1),
            jnp.concatenate([vectors, last], axis=-1),
            offset[:, 0],
            2 * (cosh + of_centre),
        )

    def ball(self) -> PoincareBall:
        """The ball of the same c, which shortens features likewise."""
        return PoincareBall(self.c, self.clip_radius, self.riemannian, self.max_distance)

    def to_ball(self, x: Vectors) -> Points:
        """See `lorentz.to_poincare`."""
        return lorentz.to_poincare(x, self.c)

    def from_ball(self, x: Vectors) -> Points:
        """See `lorentz.from_poincare`."""
        return lorentz.from_poincare(x, self.c)

    def flaws(self, x: Rows) -> dict[str, Bool[Array, " n"]]:
        """Marks rows that are too far out for float32."""
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1)
        return {"is too far out": ~((xx < MAX_SQUARE_NORM) & (1 + self.c * xx <= _MAX_COSH**2))}
