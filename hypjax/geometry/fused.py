"""Composite spaces: weighted sums of distances, and products."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.geometry import arithmetic
from hypjax.geometry.arithmetic import AnyArray, Numbers, Points, Vectors
from hypjax.geometry.hyperbolic import CurvedSpace
from hypjax.geometry.learned import has_curvature
from hypjax.geometry.spaces import InnerProductSpace, Space, pytree, require_nonnegative
from hypjax.geometry.sphere import Sphere

_FEW = 4  # Parts that are compiled one by one, even if all are of one kind.


@dataclasses.dataclass(frozen=True)
class Composite(Space):
    """A space that combines the distances of several spaces, its parts.

    A point concatenates its coordinates in each part; all parts have equally many. Inner products
    do not rank such points, but the inner products of each part bound the combined distance, which
    `hypjax.retrieval.scores` uses to search.
    """

    # Pairs of a space and the weight of its distance, which is at least 0.
    parts: tuple[tuple[InnerProductSpace, arithmetic.Scalar], ...]

    def __post_init__(self) -> None:
        """Raises a `ValueError` for no parts, a composite part or a negative weight."""
        if not self.parts or any(isinstance(space, Composite) for space, _ in self.parts):
            raise ValueError("parts must name one space or more, none of which has parts itself")
        for _, weight in self.parts:
            require_nonnegative("a weight", weight)

    def __str__(self) -> str:
        pairs = ((w if isinstance(w, jax.Array) else round(w, 4), space) for space, w in self.parts)
        return " + ".join(f"{weight} × {space}" for weight, space in pairs)

    def features_by_part(self, features: Vectors) -> Sequence[Float[AnyArray, "*b k"]]:
        """The features that each part embeds: by default, an equal share of the coordinates."""
        return self.split(features)

    def combine(self, distances: Iterable[Numbers]) -> Numbers:
        """An increasing function of the distances in the parts: by default, their weighted sum."""
        pairs = zip(self.parts, distances, strict=True)
        return jnp.asarray(sum(weight * distance for (_, weight), distance in pairs))

    def split(self, x: Float[AnyArray, "*b md"]) -> list[Points]:
        """Splits points into equally many coordinates for each part, or raises a `UserError`."""
        count = len(self.parts)
        if jnp.shape(x)[-1] % count:
            raise UserError(f"{jnp.shape(x)[-1]} dimensions cannot be split among {count} parts")
        return jnp.split(jnp.asarray(x), count, axis=-1)

    def embed(self, features: Vectors) -> Float[Array, "*b mk"]:
        """Embeds each part's features."""
        by_part = self.features_by_part(features)
        return jnp.concatenate(self.in_parts(lambda space, v: space.embed(v), by_part), axis=-1)

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that any part shortens."""
        pairs = zip(self.parts, self.features_by_part(features), strict=True)
        return jnp.any(jnp.stack([space.clipped(v) for (space, _), v in pairs]), axis=0)

    def _by_part(self, *points: AnyArray) -> Iterable[tuple[Any, ...]]:
        """Yields (space, coordinates of the points x, coordinates of the points y, ...) by part."""
        return zip((space for space, _ in self.parts), *map(self.split, points), strict=True)

    def distance(self, x: Float[AnyArray, "*#b md"], y: Float[AnyArray, "*#b md"]) -> Numbers:
        """The combined distances of the parts."""
        return self.combine(space.distance(a, b) for space, a, b in self._by_part(x, y))

    def distance_matrix(
        self, x: Float[AnyArray, "n md"], y: Float[AnyArray, "k md"]
    ) -> Float[Array, "n k"]:
        """The combined distance matrices of the parts."""
        coordinates = self.split(x), self.split(y)
        matrices = self.in_parts(lambda space, *z: space.distance_matrix(*z), *coordinates)
        return self.combine(matrices)

    def in_parts(
        self, function: Callable[..., Array], *by_part: Sequence[AnyArray]
    ) -> Sequence[Array]:
        """Applies a function of a space and of arrays for each part to all parts.

        Many parts of one kind with learned curvatures, as in a train step, are compiled as one,
        since each takes seconds.
        """
        spaces = [space for space, _ in self.parts]
        is_learned = all(isinstance(getattr(x, "c", None), jax.core.Tracer) for x in spaces)
        kinds = {(type(space), jax.tree.structure(space)) for space in spaces}
        are_alike = len(kinds) == 1 and isinstance(spaces[0], CurvedSpace)
        if len(spaces) <= _FEW or not (is_learned and are_alike):
            return [function(*part) for part in zip(spaces, *by_part, strict=True)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *spaces)
        arrays = [jnp.stack(list(x)) for x in by_part]
        # For 64 parts of 768 points, the gradient would hold gigabytes.
        return list(lax.map(jax.checkpoint(lambda part: function(*part)), (stacked, *arrays)))

    def mean(self, x: arithmetic.PointSets, weights: arithmetic.Weights = None) -> Points:
        """The concatenated means of the parts."""
        return jnp.concatenate([space.mean(a, weights) for space, a in self._by_part(x)], axis=-1)

    def with_scalars(self, scalars: Mapping[str, Any]) -> "Composite":
        """Replaces fields of the parts; "curvatures" lists a c for each part that has one."""
        curvatures = iter(scalars.get("curvatures", ()))

        def replaced(space: InnerProductSpace) -> InnerProductSpace:
            if "curvatures" in scalars and has_curvature(type(space)):
                return space.with_scalars({**scalars, "c": next(curvatures)})
            return space.with_scalars(scalars)

        parts = tuple((replaced(space), weight) for space, weight in self.parts)
        return dataclasses.replace(self, parts=parts)

    def check(self, x: Float[AnyArray, "n md"], *, first: int = 0) -> None:
        """Raises a `UserError` unless the coordinates of all rows are points of their parts."""
        for space, coordinates in self._by_part(x):
            space.check(coordinates, first=first)


@pytree
@dataclasses.dataclass(frozen=True)
class Fused(Composite):
    """Adds the distances of several spaces, each of which embeds all features (HypMix, Eq. 10).

    The `parts` are m pairs of a space and the weight of its distance. d features become m·d
    coordinates. If `normalized`, features are first scaled to length 1, as in HypMix: the pairwise
    cross-entropy at temperature 1, with the parts (Sphere(), 1 / (2·τ_e)) and
    (PoincareBall(c, clip_radius), λ / τ_h).
    """

    normalized: bool = dataclasses.field(default=True, metadata={"static": True})

    def features_by_part(self, features: Vectors) -> Sequence[Vectors]:
        """All features, for each part."""
        return [Sphere().embed(features) if self.normalized else features] * len(self.parts)

    def features(self, x: Float[AnyArray, "*b md"]) -> Points:
        """Features from the points' coordinates in the first part."""
        return self.parts[0][0].features(self.split(x)[0])


@pytree
@dataclasses.dataclass(frozen=True)
class Product(Composite):
    """A product of spaces, which share the features equally (Gu et al., ICLR 2019, Section 3).

    The `parts` are pairs of a space and its weight w. With length l in each part, the distance is
    √Σ(w·l)², as in the product manifold. The length is the part's distance d; on the sphere, whose
    distance is a squared chord, it is the chord. If `summed`, the distance is Σ w·d instead.
    """

    summed: bool = dataclasses.field(default=False, metadata={"static": True})

    def __str__(self) -> str:
        return f"the product {super().__str__()}"

    def combine(self, distances: Iterable[Numbers]) -> Numbers:
        """√Σ(w·l)², with gradient 0 at 0; if `summed`, the weighted sum of distances."""
        if self.summed:
            return super().combine(distances)
        pairs = zip(self.parts, distances, strict=True)
        squares = sum((w * part.length(d)) ** 2 for (part, w), d in pairs)
        return arithmetic.sqrt(jnp.asarray(squares))

    def features(self, x: Float[AnyArray, "*b md"]) -> Float[Array, "*b md"]:
        """Concatenated features from the points' coordinates in each part."""
        return jnp.concatenate([space.features(a) for space, a in self._by_part(x)], axis=-1)
