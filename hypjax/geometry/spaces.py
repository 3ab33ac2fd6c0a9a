"""Spaces: small objects that answer "how far", with one face for losses, search and plots."""

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hypjax.errors import UserError
from hypjax.geometry import poincare, products

Role = Literal["query", "gallery"]


class Space(Protocol):
    """What a loss, an evaluation or a search asks of a space."""

    def embed(self, features: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Maps features (a head's output, unbounded) to points of the space."""

    def distance(self, x: Float[Array, "*b d"], y: Float[Array, "*b d"]) -> Float[Array, "*b"]:
        """Distances of points, pairwise along the leading axes, by subtraction."""

    def distance_matrix(
        self, x: Float[Array, "n d"], y: Float[Array, "m d"]
    ) -> Float[Array, "n m"]:
        """Distances of all pairs of points, by one matrix product."""

    def search_vectors(self, x: Float[Array, "n d"], role: Role) -> Float[Array, "n k"]:
        """Vectors whose inner product, query with gallery, is the larger the closer the points."""

    def check(self, x: Float[Array, "n d"]) -> None:
        """Raises a `UserError` that names the first row that is no point of the space."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sphere:
    """The unit sphere with the squared chord 2 − 2cos as distance (Hyp-ViT, Eq. 4)."""

    def embed(self, features: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """L2-normalises; a zero vector stays zero."""
        features = jnp.asarray(features, jnp.result_type(jnp.float32, features))
        square = jnp.sum(features * features, axis=-1, keepdims=True)
        positive = square > 0
        return jnp.where(positive, features / jnp.sqrt(jnp.where(positive, square, 1)), 0)

    def distance(self, x: Float[Array, "*b d"], y: Float[Array, "*b d"]) -> Float[Array, "*b"]:
        """‖x − y‖², which is 2 − 2cos on the sphere."""
        return jnp.sum((x - y) ** 2, axis=-1)

    def distance_matrix(
        self, x: Float[Array, "n d"], y: Float[Array, "m d"]
    ) -> Float[Array, "n m"]:
        """2 − 2⟨x, y⟩ of all pairs."""
        return 2 - 2 * products.inner_products(x, y)

    def search_vectors(self, x: Float[Array, "n d"], role: Role) -> Float[Array, "n d"]:
        """The points themselves, in either role: the inner product is the cosine."""
        return x

    def check(self, x: Float[Array, "n d"]) -> None:
        """Raises a `UserError` unless every row is finite and of length 1."""
        x = np.asarray(x, np.float64)
        _refuse(~np.isfinite(x).all(axis=-1), "is not finite")
        _refuse(np.abs(np.linalg.norm(x, axis=-1) - 1) > 1e-3, "is not of length 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PoincareBall:
    """The Poincaré ball of radius 1/√c with the geodesic distance (Hyp-ViT, Eq. 2).

    Attributes:
        c: Negative curvature, at least 0 (0: flat space with the distance 2‖x − y‖).
        clip_radius: Largest norm of features before the exponential map; None: not clipped.
        riemannian: Whether gradients that flow back through `embed` are scaled by the inverse of
            the metric, (1 − c‖x‖²)²/4, which makes a gradient step on features a Riemannian one.
    """

    c: float | Float[Array, ""] = 0.1
    clip_radius: float | None = dataclasses.field(default=2.3, metadata={"static": True})
    riemannian: bool = dataclasses.field(default=False, metadata={"static": True})

    def embed(self, features: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Clips, maps from the tangent space at the origin, and keeps off the boundary."""
        v = poincare.clip_features(features, self.clip_radius)
        x = poincare.project(poincare.expmap0(v, self.c), self.c)
        return _riemannian_gradient(x, jnp.asarray(self.c, x.dtype)) if self.riemannian else x

    def distance(self, x: Float[Array, "*b d"], y: Float[Array, "*b d"]) -> Float[Array, "*b"]:
        """Geodesic distances, by subtraction."""
        return poincare.dist(x, y, self.c)

    def distance_matrix(
        self, x: Float[Array, "n d"], y: Float[Array, "m d"]
    ) -> Float[Array, "n m"]:
        """Geodesic distances of all pairs."""
        return poincare.dist_matrix(x, y, self.c)

    def search_vectors(self, x: Float[Array, "n d"], role: Role) -> Float[Array, "n d+1"]:
        """One coordinate more than the points, valid for every c >= 0.

        The query (2x, −(1 + c‖x‖²)) and the gallery (y, ‖y‖²)/(1 − c‖y‖²) have the product
        ‖x‖² − (1 − c‖x‖²)·s/P, which falls as the distance from a given query grows.
        """
        xx = jnp.sum(x * x, axis=-1, keepdims=True)
        if role == "query":
            return jnp.concatenate([2 * x, -(1 + self.c * xx)], axis=-1)
        return jnp.concatenate([x, xx], axis=-1) / (1 - self.c * xx)

    def check(self, x: Float[Array, "n d"]) -> None:
        """Raises a `UserError` unless every row is finite and inside the ball."""
        x = np.asarray(x, np.float64)
        _refuse(~np.isfinite(x).all(axis=-1), "is not finite")
        outside = float(self.c) * np.sum(x * x, axis=-1) >= 1
        _refuse(outside, f"lies outside the ball of radius 1/√{float(self.c):g}")


@jax.custom_vjp
def _riemannian_gradient(x: Float[Array, "*b d"], c: Array) -> Float[Array, "*b d"]:
    return x


def _riemannian_forward(x, c):
    return x, (x, c)


def _riemannian_backward(residuals, gradient):
    x, c = residuals
    return gradient * poincare.lambda_x(x, c) ** -2, jnp.zeros_like(c)


_riemannian_gradient.defvjp(_riemannian_forward, _riemannian_backward)


def _refuse(rows: np.ndarray, why: str) -> None:
    if rows.any():
        raise UserError(
            f"embedding {int(np.argmax(rows))} {why} ({int(rows.sum())} of {rows.size} rows)"
        )
