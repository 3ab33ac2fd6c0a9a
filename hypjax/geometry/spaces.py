"""The interface of spaces, and functions that several spaces share."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.geometry import arithmetic, poincare
from hypjax.geometry.arithmetic import Cols, Matrix, Numbers, Operand, Points, Rows, Vectors

if TYPE_CHECKING:
    import hypjax.geometry.hyperbolic

Role = Literal["query", "gallery"]
SpaceT = TypeVar("SpaceT", bound="Space")  # Beartype rejects Self outside decorated classes.
ClassT = TypeVar("ClassT", bound=type)
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
    Only `check` tests if points are valid. Methods with a body are defaults for subclasses, which
    are frozen dataclasses.

    Attributes:
        squared: Whether distances are squares of Euclidean distances, as on the sphere.
        normalized: Whether `embed` discards the lengths of features.
        parts: Spaces that make up a composite space, with their weights.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    squared: bool = False
    normalized: bool = False
    parts: "Sequence[tuple[InnerProductSpace, arithmetic.Scalar]]" = ()

    def embed(self, features: Vectors) -> Points:
        """Maps features (the head's unbounded output) to points of the space."""

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that `embed` shortens before mapping them; by default none."""
        return jnp.zeros(jnp.shape(features)[:-1], bool)

    def distance(self, x: Operand, y: Operand) -> Numbers:
        """Distances, elementwise over the leading axes; accurate for close points."""

    def similarity(self, distance: Float[arithmetic.AnyArray, "*b"]) -> Numbers:
        """Similarities, which fall from 1 as distances grow; by default e^−distance (HIER)."""
        return jnp.exp(-arithmetic.inexact(distance)[0])

    def length(self, distance: Float[arithmetic.AnyArray, "*b"]) -> Numbers:
        """The distances; if they are `squared`, their roots, with gradient 0 at 0."""
        distance = jnp.asarray(distance)
        if not self.squared:
            return distance
        zero = distance <= 0  # NaN must remain.
        return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, distance)))

    def features(self, x: Vectors) -> Points:
        """Features that `embed` maps to these points: its inverse, up to clipping or lengths."""

    def split(self, x: Vectors) -> Sequence[Points]:
        """Splits points into their coordinates in each of the `parts`."""
        return []

    def mean(self, x: arithmetic.PointSets, weights: arithmetic.Weights = None) -> Points:
        """Weighted means of sets of points, [..., n, d].

        Weights, [..., n], are at least 0 and not all 0; None means equal weights.
        """

    def separation(self, x: Operand, y: Operand) -> Numbers:
        """An increasing function of the distance, computed by subtraction and cheap arithmetic.

        The separation of equal points is exactly 0. By default it is the distance itself.
        """
        return self.distance(x, y)

    def distance_at(self, separation: Float[arithmetic.AnyArray, "*b"]) -> Numbers:
        """The distances of points with these separations."""
        return jnp.asarray(separation)

    def distance_matrix(self, x: Rows, y: Cols) -> Matrix:
        """Distances of all pairs, in O(n·m) memory."""

    def ball(self) -> "hypjax.geometry.hyperbolic.PoincareBall | None":
        """The `PoincareBall` to which the space is isometric, or None."""
        return None

    def to_ball(self, x: Vectors) -> Points:
        """The isometry to the space's `ball`; the identity for a ball."""
        if self.ball() is not self:  # Other coordinates must not pass for the ball's.
            raise TypeError(f"{self} defines no isometry to a ball")
        return jnp.asarray(x)

    def from_ball(self, x: Vectors) -> Points:
        """The inverse of `to_ball`."""
        return Space.to_ball(self, x)  # The identity, or the same error.

    def from_tangent(self, v: Vectors) -> Points:
        """Points in the directions v, at distances 2‖v‖ from the origin but at most 12.2/√c."""
        if (ball := self.ball()) is None:
            raise TypeError(f"{self} defines no isometry to a ball")
        return self.from_ball(poincare.point_at(v, ball.c))

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

    def search_terms(self, x: Rows, centre: Float[arithmetic.AnyArray, " d"]) -> SearchTerms:
        """Terms whose inner products rank points like `separation`.

        An isometry first moves `centre`, a point in the convex hull of the space, to the origin:
        products of points close to the origin keep more digits.
        """


def pytree(space: ClassT) -> ClassT:
    """Registers a frozen dataclass as a pytree; fields with "static" metadata are its structure.

    JAX also builds trees of placeholders. No constructor is called for them, unlike by
    `jax.tree_util.register_dataclass`: its arguments must be what the fields' types say.
    """
    fields = dataclasses.fields(space)
    static = [field.name for field in fields if field.metadata.get("static")]
    leaves = [field.name for field in fields if field.name not in static]

    def flatten(value: object) -> tuple[list[tuple[GetAttrKey, Any]], tuple[Any, ...]]:
        children = [(GetAttrKey(name), getattr(value, name)) for name in leaves]
        return children, tuple(getattr(value, name) for name in static)

    def unflatten(structure: tuple[Any, ...], children: Iterable[Any]) -> Any:
        value: Any = object.__new__(space)
        vars(value).update(zip((*static, *leaves), (*structure, *children), strict=True))
        return value

    jax.tree_util.register_pytree_with_keys(space, flatten, unflatten)
    return space


# Methods of a space, each jitted as one program instead of one for each operation.
distance_matrix = jax.jit(lambda space, x, y: space.distance_matrix(x, y))
features = jax.jit(lambda space, x: space.features(x))


@jax.jit
def _flaws(space: Space, x: Rows) -> dict[str, Bool[Array, " n"]]:
    x = x.astype(jnp.float64)
    return {_INFINITE: ~jnp.isfinite(jnp.sum(x * x, axis=-1))} | space.flaws(x)


def require_nonnegative(name: str, value: arithmetic.Scalar) -> None:
    """Raises a `ValueError` for a string, and for a number that is negative or not finite."""
    is_number = isinstance(value, numbers.Real)  # Arrays are not checked: they may be traced.
    if isinstance(value, str) or (is_number and not 0 <= value < math.inf):
        raise ValueError(f"{name} is {value}; it must be a finite number of at least 0")
