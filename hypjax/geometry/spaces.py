"""The interface of spaces, and functions that several spaces share."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.geometry import arithmetic
from hypjax.geometry.arithmetic import Cols, Matrix, Numbers, Operand, Points, Rows, Vectors

Role = Literal["query", "gallery"]
SpaceT = TypeVar("SpaceT", bound="Space")  # Beartype rejects Self outside decorated classes.
_INFINITE = "is not finite"
_MAX_PADDED_ROWS = 2**12  # Up to this many, `check` pads rows to a power of two.


class SearchTerms(NamedTuple):
    """Terms by which an exact search ranks points.

    −separation(x_i, x_j) = ⟨query_i, gallery_j⟩ − offset_i − offset_j. Because ⟨query_i, gallery_j⟩
    equals ⟨query_j, gallery_i⟩, one tile of products serves searches in both directions.

    Attributes:
        query: Vectors of the points as queries, as long as those in `gallery`.
        gallery: Vectors of the points as gallery items.
        offset: Separations from the centre, at least 0.
        condition: Factors by which the terms may amplify rounding errors, at least 1.
    """

    query: Float[Array, "n k"]
    gallery: Float[Array, "n k"]
    offset: Float[Array, " n"]
    condition: Float[Array, " n"]


@runtime_checkable
class Space(Protocol):
    """Interface of a space, as losses, evaluation and search use it.

    Points are float32, or float64 where JAX has it enabled, and results have the points' dtype.
    Only `check` tests if points are valid. Methods with a body are defaults for subclasses.

    Attributes:
        squared: Whether distances are squares of Euclidean distances, as on the sphere.
        normalized: Whether `embed` discards the lengths of features.
        parts: Spaces that make up a composite space, with their weights.
    """

    squared: ClassVar[bool] = False
    normalized: ClassVar[bool] = False
    parts: ClassVar[Sequence[tuple[Any, Any]]] = ()

    def embed(self, features: Vectors) -> Points:
        """Maps features (the head's unbounded output) to points of the space."""

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that `embed` shortens before mapping them; by default none."""
        return jnp.zeros(jnp.shape(features)[:-1], bool)

    def distance(self, x: Operand, y: Operand) -> Numbers:
        """Distances, elementwise over the leading axes; accurate for close points."""

    def similarity(self, distance: Float[ArrayLike, "*b"]) -> Numbers:
        """Similarities, which fall from 1 as distances grow; by default e^−distance (HIER)."""
        return jnp.exp(-arithmetic.inexact(distance)[0])

    def length(self, distance: Float[ArrayLike, "*b"]) -> Numbers:
        """The distances; if they are `squared`, their roots, with gradient 0 at 0."""
        if not self.squared:
            return distance
        zero = distance <= 0  # NaN must remain.
        return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, distance)))

    def features(self, x: Vectors) -> Points:
        """Features that `embed` maps to these points: its inverse, up to clipping or lengths."""

    def radii(self, norms: Any, xp: ModuleType) -> tuple[Any, list[Any]] | None:
        """From norms of features v: norms of `features(embed(v))`, and of `embed(v)` by part.

        An export scales directions to these norms instead of calling the space. `xp` is an array
        library, such as NumPy or PyTorch. Returns None, the default, if `embed` changes directions.
        """
        return None

    def mean(self, x: arithmetic.PointSets, weights: arithmetic.Weights = None) -> Points:
        """Weighted means of sets of points, [..., n, d].

        Weights, [..., n], are at least 0 and not all 0; None means equal weights.
        """

    def separation(self, x: Operand, y: Operand) -> Numbers:
        """An increasing function of the distance, computed by subtraction and cheap arithmetic.

        The separation of equal points is exactly 0. By default it is the distance itself.
        """
        return self.distance(x, y)

    def distance_at(self, separation: Float[ArrayLike, "*b"]) -> Numbers:
        """The distances of points with these separations."""
        return jnp.asarray(separation)

    def distance_matrix(self, x: Rows, y: Cols) -> Matrix:
        """Distances of all pairs, in O(n·m) memory."""

    def ball(self) -> "Space | None":
        """The `PoincareBall` to which the space is isometric, or None."""
        return None

    def to_ball(self, x: Vectors) -> Vectors:
        """The isometry to the space's `ball`; the identity for a ball."""
        if self.ball() is not self:  # Other coordinates must not pass for the ball's.
            raise TypeError(f"{self} defines no isometry to a ball")
        return x

    def from_ball(self, x: Vectors) -> Vectors:
        """The inverse of `to_ball`."""
        return Space.to_ball(self, x)  # The identity, or the same error.

    def flaws(self, x: Rows) -> dict[str, Bool[Array, " n"]]:
        """Marks finite rows that are not points of the space, as {message: rows}."""
        return {}

    def with_scalars(self: SpaceT, scalars: Mapping[str, Any]) -> SpaceT:
        """Replaces the fields that `scalars` names; ignores other names."""
        fields = {field.name for field in dataclasses.fields(self)}
        values = {name: value for name, value in scalars.items() if name in fields}
        return dataclasses.replace(self, **values) if values else self

    def check(self, x: Rows, *, first: int = 0) -> None:
        """Raises a `UserError` unless all rows are points: by default, finite and without `flaws`.

        The message numbers rows from `first`. The check runs on the device that holds the rows.
        """
        if not len(x):
            return
        checked = x
        # Without padding, every number of queries would compile its own program.
        if isinstance(x, np.ndarray) and len(x) < _MAX_PADDED_ROWS:
            checked = np.resize(x, (2 ** (len(x) - 1).bit_length(), x.shape[1]))
        with jax.enable_x64(True):
            flawed = jax.device_get(_flaws(self, checked))
        # Rows that are not finite are reported first: they may have other flaws, too.
        for flaw in sorted(flawed, key=lambda flaw: flaw != _INFINITE):
            rows = np.flatnonzero(flawed[flaw][: len(x)])
            if len(rows):
                message = f"embedding {first + rows[0]} {flaw} ({len(rows)} of {len(x)} rows)"
                if flaw != _INFINITE:
                    message += "; points are what space.embed(features) returns"
                raise UserError(message)


@runtime_checkable
class InnerProductSpace(Space, Protocol):
    """A space whose points are ranked by inner products of vectors."""

    def search_vectors(self, x: Rows, role: Role) -> Float[Array, "n k"]:
        """Vectors for an inner-product index: nearer points have larger inner products.

        The vectors of queries are multiplied with the vectors of gallery items.
        """

    def search_terms(self, x: Rows, centre: Float[ArrayLike, " d"]) -> SearchTerms:
        """Terms whose inner products rank points like `separation`.

        An isometry first moves `centre`, a point in the convex hull of the space, to the origin:
        products of points close to the origin keep more digits.
        """


# Methods of a space, each jitted as one program instead of one for each operation.
distance_matrix = jax.jit(lambda space, x, y: space.distance_matrix(x, y))
features = jax.jit(lambda space, x: space.features(x))


@jax.jit
def _flaws(space: Space, x: Rows) -> dict[str, Bool[Array, " n"]]:
    x = x.astype(jnp.float64)
    return {_INFINITE: ~jnp.isfinite(jnp.sum(x * x, axis=-1))} | space.flaws(x)


def require_nonnegative(name: str, value: Any) -> None:
    """Raises a `ValueError` for a string, and for a number that is negative or not finite.

    Arrays and other objects pass: JAX also builds spaces of traced numbers and of placeholders.
    """
    is_number = isinstance(value, numbers.Real)
    if isinstance(value, str) or (is_number and not 0 <= value < math.inf):
        raise ValueError(f"{name} is {value}; it must be a finite number of at least 0")
