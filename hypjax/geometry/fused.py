"""Weighted sums of the distances of several spaces."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.geometry.spaces import InnerProductSpace, Space, as_tree, require_positive
from hypjax.geometry.sphere import Sphere


@as_tree
@dataclasses.dataclass(frozen=True)
class Fused(Space):
    """Several geometries of one feature vector, whose distances are added (HypMix, Eq. 10).

    A point holds its coordinates in each space, one after the other: with m spaces, d features
    become m·d coordinates. Inner products do not rank such points, but the products of each space
    bound its distances, and so their sum; see `hypjax.retrieval.scores`.

    Attributes:
        parts: Pairs of a space and the weight of its distance, at least 0. For HypMix these are
            (Sphere(), 1 / (2·τ_e)) and (PoincareBall(c, clip_radius), λ / τ_h), for a temperature
            of 1.
        normalized: Whether features are scaled to length 1 before the spaces embed them, as in
            HypMix.
    """

    parts: tuple[tuple[InnerProductSpace, float | Float[Array, ""]], ...]
    normalized: bool = dataclasses.field(default=True, metadata={"static": True})

    def __post_init__(self) -> None:
        """Raises a `ValueError` if there is no space, or if a weight is out of range."""
        if not self.parts:
            raise ValueError("there must be at least one space")
        if not all(isinstance(part, tuple) and len(part) == 2 for part in self.parts):
            raise ValueError("each part must be a pair of a space and a weight")
        for space, weight in self.parts:
            if isinstance(space, Fused):
                raise ValueError("a part is fused itself; list its parts instead")
            require_positive("a weight", weight)

    def __str__(self) -> str:
        def short(weight: float | Float[Array, ""]) -> object:
            return round(weight, 4) if isinstance(weight, float) else weight

        return " + ".join(f"{short(weight)} × {space}" for space, weight in self.parts)

    def split(self, x: Float[ArrayLike, "*b m*d"]) -> list[Float[Array, "*b d"]]:
        """The coordinates of points in each space.

        Raises:
            UserError: Their number is not a multiple of the number of spaces.
        """
        if jnp.shape(x)[-1] % len(self.parts):
            raise UserError(
                f"points have {jnp.shape(x)[-1]} coordinates, which {len(self.parts)} fused spaces "
                "cannot share"
            )
        return jnp.split(jnp.asarray(x), len(self.parts), axis=-1)

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b m*d"]:
        """Embeds features in each space."""
        features = self._scaled(features)
        return jnp.concatenate([space.embed(features) for space, _ in self.parts], axis=-1)

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """Marks features that a space shortens."""
        features = self._scaled(features)
        return jnp.any(jnp.stack([space.clipped(features) for space, _ in self.parts]), axis=0)

    def _scaled(self, features: Float[ArrayLike, "*b d"]) -> Float[ArrayLike, "*b d"]:
        return Sphere().embed(features) if self.normalized else features

    def distance(
        self, x: Float[ArrayLike, "*#b m*d"], y: Float[ArrayLike, "*#b m*d"]
    ) -> Float[Array, "*b"]:
        """The weighted sum of the spaces' distances."""
        pairs = zip(self.parts, self.split(x), self.split(y), strict=True)
        return sum(weight * space.distance(a, b) for (space, weight), a, b in pairs)

    def features(self, x: Float[ArrayLike, "*b m*d"]) -> Float[Array, "*b d"]:
        """The features of the points in the first space."""
        return self.parts[0][0].features(self.split(x)[0])

    def mean(
        self, x: Float[ArrayLike, "*b n m*d"], weights: Float[ArrayLike, "*b n"] | None = None
    ) -> Float[Array, "*b m*d"]:
        """The means in each space."""
        pairs = zip(self.parts, self.split(x), strict=True)
        return jnp.concatenate([space.mean(a, weights) for (space, _), a in pairs], axis=-1)

    def distance_matrix(
        self, x: Float[ArrayLike, "n m*d"], y: Float[ArrayLike, "k m*d"]
    ) -> Float[Array, "n k"]:
        """The weighted sum of the spaces' distance matrices."""
        pairs = zip(self.parts, self.split(x), self.split(y), strict=True)
        return sum(weight * space.distance_matrix(a, b) for (space, weight), a, b in pairs)

    def with_scalars(self, scalars: Mapping[str, Any]) -> "Fused":
        """The sum with other values of its spaces' fields; "curvatures" holds a c for each."""
        each = [scalars] * len(self.parts)
        if "curvatures" in scalars:
            each = [{**scalars, "c": c} for c in scalars["curvatures"]]
        pairs = zip(self.parts, each, strict=True)
        parts = tuple((space.with_scalars(own), weight) for (space, weight), own in pairs)
        return dataclasses.replace(self, parts=parts)

    def check(self, x: Float[ArrayLike, "n m*d"], *, first: int = 0) -> None:
        """Raises a `UserError` unless all rows are points of each space."""
        for (space, _), coordinates in zip(self.parts, self.split(x), strict=True):
            space.check(coordinates, first=first)
