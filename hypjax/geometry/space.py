"""The interface of spaces, as losses, evaluation, search and plots use it."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError

Role = Literal["query", "gallery"]
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
    `check` raises errors.
    """

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Maps features (the unbounded output of a head) to points of the space.

        Args:
            features: Coordinates, [..., d].

        Returns:
            Points of the space, [..., d].
        """

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """Marks the features that `embed` shortens before it maps them.

        Args:
            features: Coordinates, [..., d].

        Returns:
            Booleans, [...].
        """

    def distance(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """Distances, elementwise over the leading axes; accurate for close points.

        Args:
            x: Points, [..., d].
            y: Points, [..., d]; the leading axes broadcast.

        Returns:
            Distances, [...].
        """

    def similarity(self, distance: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
        """A decreasing function of the distance, 1 for equal points.

        Args:
            distance: Distances, [...].

        Returns:
            Similarities, [...].
        """

    def features(self, x: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Features that `embed` maps to given points, as far as it can be inverted.

        Args:
            x: Points, [..., d].

        Returns:
            Coordinates, [..., d].
        """

    def mean(
        self, x: Float[ArrayLike, "*b n d"], weights: Float[ArrayLike, "*b n"] | None = None
    ) -> Float[Array, "*b d"]:
        """Weighted mean of n points.

        Args:
            x: Points, [..., n, d].
            weights: Non-negative weights, [..., n], not all 0; None stands for equal ones.

        Returns:
            Points, [..., d].
        """

    def separation(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """An increasing function of the distance that costs only arithmetic, by subtraction.

        Args:
            x: Points, [..., d].
            y: Points, [..., d]; the leading axes broadcast.

        Returns:
            Separations, [...]; exactly 0 for equal points.
        """

    def distance_at(self, separation: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
        """The distance of points with a given separation.

        Args:
            separation: Separations, [...].

        Returns:
            Distances, [...].
        """

    def distance_matrix(
        self, x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """Distances of all pairs, from one matrix product.

        Args:
            x: Points, [n, d].
            y: Points, [m, d].

        Returns:
            Distances, [n, m].
        """

    def flaws(self, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
        """Marks the rows that are not points of the space.

        Args:
            x: Coordinates, [n, d].

        Returns:
            {name of the flaw: rows that have it, [n]}.
        """

    def check(self, x: Float[ArrayLike, "n d"], *, first: int = 0) -> None:
        """Checks that all rows are points of the space.

        Args:
            x: Coordinates, [n, d].
            first: Number of the first row in messages.

        Raises:
            UserError: A row is not a point of the space; the message names the first such row.
        """


@runtime_checkable
class InnerProductSpace(Space, Protocol):
    """A space whose points are ranked by inner products of vectors."""

    def search_vectors(self, x: Float[ArrayLike, "n d"], role: Role) -> Float[Array, "n k"]:
        """Vectors for an inner-product index: nearer points have larger products.

        Args:
            x: Points, [n, d].
            role: Whether the points are queries or gallery items.

        Returns:
            Vectors, [n, k], to be multiplied with those of the other role.
        """

    def search_terms(
        self, x: Float[ArrayLike, "n d"], centre: Float[ArrayLike, " d"]
    ) -> SearchTerms:
        """Terms whose products rank points like `separation`.

        They are those of the points after an isometry that takes `centre` to the origin. Products
        of points close to the centre keep more digits.

        Args:
            x: Points, [n, d].
            centre: A point in the convex hull of the space, [d].

        Returns:
            Vectors [n, k] for both roles, offsets [n] and condition factors [n].
        """


def register_space(space: type) -> type:
    """Registers a frozen dataclass as a pytree, with fields marked as static in its structure.

    Unlike with `jax.tree_util.register_dataclass`, trees are built without the constructor, which
    may refuse values: trees of this structure also hold gradients, labels and placeholders.
    """
    fields = dataclasses.fields(space)
    leaves = [field.name for field in fields if not field.metadata.get("static")]
    static = [field.name for field in fields if field.metadata.get("static")]

    def flatten(tree: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in leaves]
        return children, tuple(getattr(tree, name) for name in static)

    def unflatten(constants: tuple[Any, ...], children: Iterable[Any]) -> Any:
        tree = object.__new__(space)
        for name, value in zip((*leaves, *static), (*children, *constants), strict=True):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(space, flatten, unflatten)
    return space


def raise_on_flaws(
    space: Space, x: Float[ArrayLike, "n d"], first: int, words: Mapping[str, str]
) -> None:
    """Raises an error for the first flaw; the search runs on the device that holds the points.

    Args:
        space: Space that marks the flaws.
        x: Coordinates, [n, d].
        first: Number of the first row in messages.
        words: {name of the flaw: words that follow the number of the row}.

    Raises:
        UserError: A row has a flaw.
    """
    if not len(x):
        return
    checked = x
    if isinstance(x, np.ndarray) and len(x) < _FEW:  # Or each number of queries were compiled.
        checked = np.resize(x, (2 ** (len(x) - 1).bit_length(), x.shape[1]))
    with jax.enable_x64(True):
        found = jax.device_get(_flaws(space, checked))
    for flaw, why in words.items():
        rows = np.flatnonzero(found[flaw][: len(x)])
        if len(rows):
            raise UserError(
                f"embedding {first + rows[0]} {why} ({len(rows)} of {len(x)} rows)"
                + ("" if flaw == "infinite" else "; points are what space.embed(features) returns")
            )


@jax.jit
def _flaws(space: Space, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
    return space.flaws(x.astype(jnp.float64))
