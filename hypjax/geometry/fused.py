"""Spaces made of several: weighted sums of distances, and products."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.geometry import arithmetic
from hypjax.geometry.arithmetic import Numbers, Points, Vectors
from hypjax.geometry.learned import has_curvature
from hypjax.geometry.spaces import InnerProductSpace, Space, as_tree, require_positive
from hypjax.geometry.sphere import Sphere


@dataclasses.dataclass(frozen=True)
class Composite(Space):
    """Several spaces in one, which combines their distances.

    A point holds its coordinates in each part, one after the other, as many in each. Inner products
    do not rank such points, but the products of each part bound its distances, and so what is
    combined of them, see `hypjax.retrieval.scores`.
    """

    # Pairs of a space and the weight of its distance, at least 0.
    parts: tuple[tuple[InnerProductSpace, float | Float[Array, ""]], ...]

    def __post_init__(self) -> None:
        """Raises a `ValueError` if there is no space, or if a weight is out of range."""
        if not self.parts or any(isinstance(space, Composite) for space, _ in self.parts):
            raise ValueError("there must be at least one space, and none may have parts itself")
        for _, weight in self.parts:
            require_positive("a weight", weight)

    def __str__(self) -> str:
        pairs = ((w if isinstance(w, jax.Array) else round(w, 4), space) for space, w in self.parts)
        return " + ".join(f"{weight} × {space}" for weight, space in pairs)

    def shares(self, features: Vectors) -> list[Float[ArrayLike, "*b k"]]:
        """The features that each part embeds: by default an equal share, in the parts' order."""
        return self.split(features)

    def combined(self, distances: Iterable[Numbers]) -> Numbers:
        """The distance from those in each part, with which it increases: by default their sum."""
        pairs = zip(self.parts, distances, strict=True)
        return sum(weight * distance for (_, weight), distance in pairs)

    def split(self, x: Float[ArrayLike, "*b m*d"]) -> list[Points]:
        """The coordinates of points in each part.

        Raises:
            UserError: Their number is not a multiple of the number of parts.
        """
        if jnp.shape(x)[-1] % len(self.parts):
            count = len(self.parts)
            raise UserError(f"{jnp.shape(x)[-1]} dimensions cannot be shared by the {count} parts")
        return jnp.split(jnp.asarray(x), len(self.parts), axis=-1)

    def embed(self, features: Vectors) -> Float[Array, "*b m*k"]:
        """Embeds each part's share of features."""
        pairs = zip(self.parts, self.shares(features), strict=True)
        return jnp.concatenate([space.embed(share) for (space, _), share in pairs], axis=-1)

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that a part shortens."""
        pairs = zip(self.parts, self.shares(features), strict=True)
        return jnp.any(jnp.stack([space.clipped(share) for (space, _), share in pairs]), axis=0)

    def _in_parts(self, *points: ArrayLike) -> Iterable[tuple[Any, ...]]:
        """Each part, with its coordinates of points."""
        return zip((space for space, _ in self.parts), *map(self.split, points), strict=True)

    def distance(self, x: Float[ArrayLike, "*#b m*d"], y: Float[ArrayLike, "*#b m*d"]) -> Numbers:
        """The parts' distances, combined."""
        return self.combined(space.distance(a, b) for space, a, b in self._in_parts(x, y))

    def distance_matrix(
        self, x: Float[ArrayLike, "n m*d"], y: Float[ArrayLike, "k m*d"]
    ) -> Float[Array, "n k"]:
        """The parts' distance matrices, combined."""
        return self.combined(space.distance_matrix(a, b) for space, a, b in self._in_parts(x, y))

    def mean(
        self, x: Float[ArrayLike, "*b n m*d"], weights: Float[ArrayLike, "*b n"] | None = None
    ) -> Float[Array, "*b m*d"]:
        """The means in each part."""
        means = [space.mean(a, weights) for space, a in self._in_parts(x)]
        return jnp.concatenate(means, axis=-1)

    def with_scalars(self, scalars: Mapping[str, Any]) -> Self:
        """Replaces fields of its parts; "curvatures" holds a c for each part that has one."""
        curvatures = iter(scalars.get("curvatures", ()))

        def replaced(space: InnerProductSpace) -> InnerProductSpace:
            if "curvatures" in scalars and has_curvature(type(space)):
                return space.with_scalars({**scalars, "c": next(curvatures)})
            return space.with_scalars(scalars)

        parts = tuple((replaced(space), weight) for space, weight in self.parts)
        return dataclasses.replace(self, parts=parts)

    def check(self, x: Float[ArrayLike, "n m*d"], *, first: int = 0) -> None:
        """Raises a `UserError` unless all rows are points of each part."""
        for space, coordinates in self._in_parts(x):
            space.check(coordinates, first=first)


@as_tree
@dataclasses.dataclass(frozen=True)
class Fused(Composite):
    """Several geometries of one feature vector, whose distances are added (HypMix, Eq. 10).

    With m spaces, d features become m·d coordinates.

    Attributes:
        parts: Pairs of a space and the weight of its distance. For HypMix these are
            (Sphere(), 1 / (2·τ_e)) and (PoincareBall(c, clip_radius), λ / τ_h), for a temperature
            of 1.
        normalized: Whether features are scaled to length 1 before the spaces embed them, as in
            HypMix.
    """

    normalized: bool = dataclasses.field(default=True, metadata={"static": True})

    def shares(self, features: Vectors) -> list[Vectors]:
        """All features, for each part."""
        return [Sphere().embed(features) if self.normalized else features] * len(self.parts)

    def features(self, x: Float[ArrayLike, "*b m*d"]) -> Points:
        """The features of the points in the first space."""
        return self.parts[0][0].features(self.split(x)[0])

    def radii(self, norms: Any, xp: ModuleType) -> tuple[Any, list[Any]] | None:
        """The first part's norms of features, and all parts' norms of points."""
        norms = xp.ones_like(norms) if self.normalized else norms
        of_parts = [space.radii(norms, xp) for space, _ in self.parts]
        if any(radii is None for radii in of_parts):
            return None
        return of_parts[0][0], [radius for _, points in of_parts for radius in points]

    def geometries(self, x: Float[ArrayLike, "n m*d"]) -> Iterable[tuple[Space, Points]]:
        """The parts."""
        return self._in_parts(x)


@as_tree
@dataclasses.dataclass(frozen=True)
class Product(Composite):
    """A product of spaces, each with as many of the features (Gu et al., ICLR 2019, Section 3).

    With weights w and lengths l in each part, the distance is √Σ(w·l)², as in the product
    manifold. Lengths are distances, but chords on the sphere, whose distance is a square. Or it is
    Σ w·d of the distances d.

    Attributes:
        parts: Pairs of a space and its weight w.
        summed: Whether distances are added.
    """

    summed: bool = dataclasses.field(default=False, metadata={"static": True})

    def __str__(self) -> str:
        return f"the product {super().__str__()}"

    def combined(self, distances: Iterable[Numbers]) -> Numbers:
        """The root of the sum of squared lengths, or the sum; the root has gradient 0 at 0."""
        if self.summed:
            return super().combined(distances)
        pairs = zip(self.parts, distances, strict=True)
        return arithmetic.sqrt(sum((w * part.length(d)) ** 2 for (part, w), d in pairs))

    def features(self, x: Float[ArrayLike, "*b m*d"]) -> Float[Array, "*b m*d"]:
        """The features of the points in each part."""
        return jnp.concatenate([space.features(a) for space, a in self._in_parts(x)], axis=-1)
