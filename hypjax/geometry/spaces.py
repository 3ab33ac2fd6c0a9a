"""The interface of spaces, and what several of them share."""

import contextlib
import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.geometry import arithmetic
from hypjax.geometry.arithmetic import Cols, Matrix, Numbers, Operand, Points, Rows, Vectors

Role = Literal["query", "gallery"]
# Above this ‖x‖², the search terms of a point would overflow in float32.
MAX_SQUARE_NORM = 1e37
_INFINITE = "is not finite"
_FEW = 2**12  # Rows, up to which their number is rounded up.


class SearchTerms(NamedTuple):
    """Terms by which an exact search ranks points.

    −separation(x_i, x_j) = ⟨query_i, gallery_j⟩ − offset_i − offset_j. The product is symmetric, so
    that one tile of products serves searches in both directions.

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

    Points are float32, or float64 where JAX has it enabled, and results have their dtype. Only
    `check` raises errors. Methods with a body are defaults for a space that inherits from this one
    and does not know better.

    Attributes:
        squared: Whether distances are squares of Euclidean ones, as on the sphere.
        normalized: Whether points forget the lengths of features.
        parts: Spaces of which it is composed, with their weights.
    """

    squared: ClassVar[bool] = False
    normalized: ClassVar[bool] = False
    parts: ClassVar[Sequence[tuple[Any, Any]]] = ()

    def embed(self, features: Vectors) -> Points:
        """Maps features (the unbounded output of a head) to points of the space."""

    def clipped(self, features: Vectors) -> Bool[Array, "*b"]:
        """Marks features that `embed` shortens before it maps them; by default none."""
        return jnp.zeros(jnp.shape(features)[:-1], bool)

    def distance(self, x: Operand, y: Operand) -> Numbers:
        """Distances, elementwise over the leading axes; accurate for close points."""

    def similarity(self, distance: Float[ArrayLike, "*b"]) -> Numbers:
        """Decreases with the distance from 1 for equal points; e^−distance (HIER) by default."""
        return jnp.exp(-arithmetic.inexact(distance)[0])

    def length(self, distance: Float[ArrayLike, "*b"]) -> Numbers:
        """The length behind a distance: if that is its square, the root, with gradient 0 at 0."""
        if not self.squared:
            return distance
        zero = distance <= 0  # NaN must remain.
        return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, distance)))

    def features(self, x: Vectors) -> Points:
        """Features that `embed` maps to these points; the inverse, up to clipping or lengths."""

    def radii(self, norms: Any, xp: ModuleType) -> tuple[Any, list[Any]] | None:
        """Norms of `features(embed(v))`, and of `embed(v)` in each part, from norms of features v.

        Exports write spaces that keep directions by these, with the functions of an array library
        such as NumPy or PyTorch. By default None: the space does not keep directions.
        """
        return None

    def geometries(self, x: Points) -> Iterable[tuple["Space", Points]]:
        """Spaces that embed all features, with coordinates of points: by default this one."""
        return [(self, x)]

    def mean(
        self, x: Float[ArrayLike, "*b n d"], weights: Float[ArrayLike, "*b n"] | None = None
    ) -> Points:
        """Mean of n points by weights of at least 0, not all 0; None stands for equal ones."""

    def separation(self, x: Operand, y: Operand) -> Numbers:
        """An increasing function of the distance that costs only arithmetic, by subtraction.

        It is exactly 0 for equal points. By default it is the distance itself.
        """
        return self.distance(x, y)

    def distance_at(self, separation: Float[ArrayLike, "*b"]) -> Numbers:
        """The distance of points with this separation."""
        return jnp.asarray(separation)

    def distance_matrix(self, x: Rows, y: Cols) -> Matrix:
        """Distances of all pairs, from one matrix product."""

    def ball(self) -> "Space | None":
        """The `PoincareBall` to which the space is isometric, or None."""
        return None

    def to_ball(self, x: Vectors) -> Vectors:
        """The isometry to the space's `ball`; the identity for a ball."""
        return self._in_own_ball(x)

    def from_ball(self, x: Vectors) -> Vectors:
        """The inverse of `to_ball`."""
        return self._in_own_ball(x)

    def _in_own_ball(self, x: Vectors) -> Vectors:
        if self.ball() is not self:  # Or coordinates of another space would pass for the ball's.
            raise TypeError(f"{self} defines no isometry to a ball")
        return x

    def flaws(self, x: Rows) -> dict[str, Bool[Array, " n"]]:
        """Marks finite rows that are not points of the space: {message: rows}."""
        return {}

    def with_scalars(self, scalars: Mapping[str, Any]) -> Self:
        """The space with new values of the fields that `scalars` names; ignores other names."""
        new = {field.name for field in dataclasses.fields(self)} & scalars.keys()
        return dataclasses.replace(self, **{name: scalars[name] for name in new}) if new else self

    def check(self, x: Rows, *, first: int = 0) -> None:
        """Checks that all rows are points of the space.

        By default those are the finite rows without `flaws`. The device that holds the rows
        searches for others.

        Raises:
            UserError: A row is not; the message names it, and counts from `first`.
        """
        if not len(x):
            return
        checked = x
        if isinstance(x, np.ndarray) and len(x) < _FEW:  # Or each number of queries were compiled.
            checked = np.resize(x, (2 ** (len(x) - 1).bit_length(), x.shape[1]))
        with jax.enable_x64(True):
            flawed = jax.device_get(_flaws(self, checked))
        # A row that is not finite may have other flaws, too.
        for why in sorted(flawed, key=lambda why: why != _INFINITE):
            rows = np.flatnonzero(flawed[why][: len(x)])
            if len(rows):
                raise UserError(
                    f"embedding {first + rows[0]} {why} ({len(rows)} of {len(x)} rows)"
                    + ("; points are what space.embed(features) returns" * (why != _INFINITE))
                )


@runtime_checkable
class InnerProductSpace(Space, Protocol):
    """A space whose points are ranked by inner products of vectors."""

    def search_vectors(self, x: Rows, role: Role) -> Float[Array, "n k"]:
        """Vectors for an inner-product index: nearer points have larger products.

        They are to be multiplied with vectors of the other role.
        """

    def search_terms(self, x: Rows, centre: Float[ArrayLike, " d"]) -> SearchTerms:
        """Terms whose products rank points like `separation`.

        They are computed after an isometry that takes `centre`, a point in the convex
        hull of the space, to the origin. Products of points close to the centre keep more digits.
        """


def as_tree(space: type) -> type:
    """Registers a frozen dataclass as a pytree, with fields marked as static in its structure.

    Unlike with `jax.tree_util.register_dataclass`, trees are built without the constructor, which
    may refuse values: trees of this structure also hold gradients, labels and placeholders. A class
    that is registered already stays as it is.
    """
    fields = dataclasses.fields(space)
    leaves = [field.name for field in fields if not field.metadata.get("static")]
    static = [field.name for field in fields if field.metadata.get("static")]

    def flatten(tree: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(getattr(tree, name) for name in names) for names in (leaves, static))

    def unflatten(constants: tuple[Any, ...], children: Iterable[Any]) -> Any:
        tree = object.__new__(space)
        vars(tree).update(zip((*leaves, *static), (*children, *constants), strict=True))
        return tree

    with contextlib.suppress(ValueError):  # It is registered already.
        jax.tree_util.register_pytree_node(space, flatten, unflatten)
    return space


# Methods of a space as one program: outside a program, each operation would be one.
distance_matrix = jax.jit(lambda space, x, y: space.distance_matrix(x, y))
features = jax.jit(lambda space, x: space.features(x))


@jax.jit
def _flaws(space: Space, x: Rows) -> dict[str, Bool[Array, " n"]]:
    x = x.astype(jnp.float64)
    return {_INFINITE: ~jnp.isfinite(jnp.sum(x * x, axis=-1))} | space.flaws(x)


def require_positive(name: str, value: Any) -> None:
    """Raises a `ValueError` for what is known not to be a finite number of at least 0.

    Arrays of JAX are not looked at: they may be traced, or still being computed.
    """
    if isinstance(value, jax.Array):
        return
    known = isinstance(value, numbers.Real | np.ndarray) and np.asarray(value).dtype.kind in "iuf"
    if not known or not np.all((0 <= np.asarray(value)) & (np.asarray(value) < np.inf)):
        raise ValueError(f"{name} is {value}; it must be a finite number of at least 0")
