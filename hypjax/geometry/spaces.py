"""Spaces: their interface, the sphere, the Poincaré ball, and weighted sums of their distances."""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError, require_free
from hypjax.geometry import arithmetic, poincare

Role = Literal["query", "gallery"]
_FEW = 2**12  # Rows, up to which their number is rounded up.

# Smallest 1 − c‖x‖² of a valid point: float32 may round a smaller one to 0.
_BOUNDARY_MARGIN = 1e-6
# Above this ‖x‖², the search terms of a point would overflow in float32.
_MAX_SQUARE_NORM = 1e37
# Smallest c > 0 of a ball that is searched.
_SMALLEST_CURVATURE = 1e-12
# Tolerated error in the length of unit vectors, which admits those rounded to bfloat16.
_LENGTH_TOLERANCE = 2**-7
_SQRT2 = 2**0.5


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
    `check` raises errors. Methods with a body are those of a space that inherits from this one and
    does not know better.
    """

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Maps features (the unbounded output of a head) to points of the space."""

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """Marks the features that `embed` shortens before it maps them."""

    def distance(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """Distances, elementwise over the leading axes; accurate for close points."""

    def similarity(self, distance: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
        """Decreases with the distance from 1 for equal points; e^−distance (HIER) by default."""
        return jnp.exp(-arithmetic.inexact(distance)[0])

    def features(self, x: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Features that `embed` maps to given points, as far as it can be inverted."""

    def mean(
        self, x: Float[ArrayLike, "*b n d"], weights: Float[ArrayLike, "*b n"] | None = None
    ) -> Float[Array, "*b d"]:
        """Mean of n points by weights of at least 0, not all 0; None stands for equal ones."""

    def separation(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """An increasing function of the distance that costs only arithmetic, by subtraction.

        It is exactly 0 for equal points. By default it is the distance itself.
        """
        return self.distance(x, y)

    def distance_at(self, separation: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
        """The distance of points with a given separation."""
        return jnp.asarray(separation)

    def distance_matrix(
        self, x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """Distances of all pairs, from one matrix product."""

    def flaws(self, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
        """Marks the rows that are not points of the space, by the name of the flaw."""

    def check(self, x: Float[ArrayLike, "n d"], *, first: int = 0) -> None:
        """Checks that all rows are points of the space.

        Raises:
            UserError: A row is not; the message names it, and counts from `first`.
        """


@runtime_checkable
class InnerProductSpace(Space, Protocol):
    """A space whose points are ranked by inner products of vectors."""

    def search_vectors(self, x: Float[ArrayLike, "n d"], role: Role) -> Float[Array, "n k"]:
        """Vectors for an inner-product index: nearer points have larger products.

        They are to be multiplied with vectors of the other role.
        """

    def search_terms(
        self, x: Float[ArrayLike, "n d"], centre: Float[ArrayLike, " d"]
    ) -> SearchTerms:
        """Terms whose products rank points like `separation`.

        They are those of the points after an isometry that takes `centre`, a point in the convex
        hull of the space, to the origin. Products of points close to the centre keep more digits.
        """


def as_tree(space: type) -> type:
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
    """Raises a `UserError` for the first flaw; the device that holds the points searches for it.

    `first` is the number of the first row in messages, and `words` are, by the name of a flaw, what
    follows the number of the row.
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


def require_positive(name: str, value: Any) -> None:
    """Raises a `ValueError` for what is known not to be a finite number of at least 0.

    Arrays of JAX are not looked at: they may be traced, or still being computed.
    """
    if isinstance(value, jax.Array):
        return
    known = isinstance(value, numbers.Real | np.ndarray) and np.asarray(value).dtype.kind in "iuf"
    if not known or not np.all((0 <= np.asarray(value)) & (np.asarray(value) < np.inf)):
        raise ValueError(f"{name} is {value}; it must be a finite number of at least 0")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sphere(InnerProductSpace):
    """The unit sphere with the squared chord 2 − 2cos as distance (Hyp-ViT, Eq. 4)."""

    def __str__(self) -> str:
        return "the sphere"

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Scales features to length 1; a zero vector stays zero, and what is not finite is NaN."""
        (features,) = arithmetic.floating(features)
        features, _ = arithmetic.scaled(features)
        square = jnp.sum(features * features, axis=-1, keepdims=True)
        zero = square == 0
        return jnp.where(zero, 0, features / jnp.sqrt(jnp.where(zero, 1, square)))

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """Marks none, since lengths do not matter."""
        return jnp.zeros(jnp.shape(features)[:-1], bool)

    def distance(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """‖x − y‖², which equals 2 − 2cos on the sphere."""
        x, y = arithmetic.inexact(x, y)
        return jnp.sum((x - y) ** 2, axis=-1)

    def similarity(self, distance: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
        """The cosine."""
        return 1 - jnp.asarray(distance) / 2

    def features(self, x: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """The points themselves: `embed` forgets lengths."""
        return jnp.asarray(x)

    def mean(
        self, x: Float[ArrayLike, "*b n d"], weights: Float[ArrayLike, "*b n"] | None = None
    ) -> Float[Array, "*b d"]:
        """The weighted sum, scaled to length 1; it minimises the weighted sum of distances."""
        (x,) = arithmetic.inexact(x)
        weighted = x if weights is None else jnp.asarray(weights)[..., None] * x
        return self.embed(jnp.sum(weighted, axis=-2))

    def distance_matrix(
        self, x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """2 − 2⟨x, y⟩ for all pairs."""
        return 2 - 2 * arithmetic.inner_products(x, y)

    def search_vectors(self, x: Float[ArrayLike, "n d"], role: Role) -> Float[Array, "n d"]:
        """The points themselves in both roles: the inner product is the cosine."""
        return x

    def search_terms(
        self, x: Float[ArrayLike, "n d"], centre: Float[ArrayLike, " d"]
    ) -> SearchTerms:
        """√2·(x − centre) in both roles, and offsets ‖x − centre‖².

        With these, the ranking is that of ‖x − y‖², whatever the rounding errors of the lengths.
        """
        x, centre = arithmetic.inexact(x, centre)
        moved = x - centre
        offset = jnp.sum(moved * moved, axis=-1)
        vectors = _SQRT2 * moved
        return SearchTerms(vectors, vectors, offset, jnp.ones_like(offset))

    def flaws(self, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
        """Marks rows that are not finite or not of length 1."""
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1)
        wrong = ~(jnp.abs(jnp.sqrt(xx) - 1) <= _LENGTH_TOLERANCE)
        return {"infinite": ~jnp.isfinite(xx), "length": wrong}

    def check(self, x: Float[ArrayLike, "n d"], *, first: int = 0) -> None:
        """Raises a `UserError` unless all rows are finite and of length 1."""
        raise_on_flaws(
            self, x, first, {"infinite": "is not finite", "length": "is not of length 1"}
        )


@as_tree
@dataclasses.dataclass(frozen=True)
class PoincareBall(InnerProductSpace):
    """The Poincaré ball of radius 1/√c with the geodesic distance (Hyp-ViT, Eq. 2).

    Attributes:
        c: Negative curvature, at least 0; 0 is flat space with the distance 2‖x − y‖.
        clip_radius: Largest norm of features before the exponential map, or None for no clipping.
        riemannian: Whether `embed` scales the gradients of features by the inverse metric at the
            point, (1 − c‖x‖²)²/4 (HIER, CVPR 2023).
    """

    c: float | Float[Array, ""] = 0.1
    clip_radius: float | None = dataclasses.field(default=2.3, metadata={"static": True})
    riemannian: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        """Raises a `ValueError` if a number is out of range, or no number."""
        require_positive("c", self.c)
        radius = self.clip_radius
        if radius is not None and not (isinstance(radius, numbers.Real) and radius > 0):
            raise ValueError(f"clip_radius is {radius!r}; it must be a number above 0, or None")
        if self.riemannian not in (True, False):
            raise ValueError(f"riemannian is {self.riemannian!r}; it must be True or False")

    def __repr__(self) -> str:
        riemannian = ", riemannian=True" if self.riemannian else ""
        return f"PoincareBall(c={self.c}, clip_radius={self.clip_radius}{riemannian})"

    def __str__(self) -> str:
        return f"the ball of c = {self.c}"

    def embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """Clips features, applies the exponential map at the origin, and projects into the ball."""
        if self.riemannian:
            scale = poincare.lambda_x(self._embed(features), self.c) ** -2
            constant = lax.stop_gradient(features)
            features = constant + lax.stop_gradient(scale) * (features - constant)
        return self._embed(features)

    def clipped(self, features: Float[ArrayLike, "*b d"]) -> Bool[Array, "*b"]:
        """Marks features longer than the clip radius."""
        radius = jnp.inf if self.clip_radius is None else self.clip_radius
        scaled, scale = arithmetic.scaled(jnp.asarray(features, jnp.result_type(float, features)))
        return jnp.linalg.norm(scaled, axis=-1) > radius / scale[..., 0]

    def _embed(self, features: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        longest = _MAX_SQUARE_NORM**0.5 if self.clip_radius is None else self.clip_radius
        v = poincare.clip_features(features, longest)
        return poincare.project(poincare.expmap0(v, self.c), self.c)

    def distance(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """Geodesic distances, see `poincare.dist`."""
        return poincare.dist(x, y, self.c)

    def features(self, x: Float[ArrayLike, "*b d"]) -> Float[Array, "*b d"]:
        """The clipped features, by the logarithmic map at the origin."""
        return poincare.logmap0(x, self.c)

    def mean(
        self, x: Float[ArrayLike, "*b n d"], weights: Float[ArrayLike, "*b n"] | None = None
    ) -> Float[Array, "*b d"]:
        """The Fréchet mean, see `poincare.frechet_mean`."""
        return poincare.frechet_mean(x, self.c, weights)

    def separation(
        self, x: Float[ArrayLike, "*#b d"], y: Float[ArrayLike, "*#b d"]
    ) -> Float[Array, "*b"]:
        """sinh²(√c·d/2)/c, see `poincare.separation`."""
        return poincare.separation(x, y, self.c)

    def distance_at(self, separation: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
        """(2/√c)·asinh(√(c·separation))."""
        return poincare.dist_at(separation, self.c)

    def distance_matrix(
        self, x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]
    ) -> Float[Array, "n m"]:
        """Geodesic distances of all pairs, see `poincare.dist_matrix`."""
        return poincare.dist_matrix(x, y, self.c)

    def search_vectors(self, x: Float[ArrayLike, "n d"], role: Role) -> Float[Array, "n d+1"]:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        The query (2x, −(1 + c‖x‖²)) and the gallery item (y, ‖y‖²)/(1 − c‖y‖²) have the product
        ‖x‖² − (1 − c‖x‖²)·s/P. For a given query it decreases with the distance. See
        `hypjax.geometry.poincare` for s and P.
        """
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1, keepdims=True)
        if role == "query":
            return jnp.concatenate([2 * x, -(1 + self.c * xx)], axis=-1)
        return jnp.concatenate([x, xx], axis=-1) / (1 - self.c * xx)

    def search_terms(
        self, x: Float[ArrayLike, "n d"], centre: Float[ArrayLike, " d"]
    ) -> SearchTerms:
        """Vectors of d + 1 coordinates, valid for all c ≥ 0.

        Let w = (−m) ⊕ x be the point moved by the Möbius translation that takes the centre m to the
        origin, g = 1 − c‖w‖², and σ = ‖w‖²/g its separation from the centre. Then the query
        √2·(w/g, −√c·σ), the gallery item √2·(w/g, √c·σ) and the offset σ give −s/P. They are
        computed as σ = ‖x − m‖²/P and w/g = ((1 − c‖m‖²)(x − m) − c‖x − m‖²·m)/P, without
        cancellation.
        """
        x, centre = arithmetic.inexact(x, centre)
        c = jnp.asarray(self.c, x.dtype)
        moved = x - centre
        s = jnp.sum(moved * moved, axis=-1, keepdims=True)
        inside = 1 - c * jnp.sum(centre * centre)
        gap = 1 - c * jnp.sum(x * x, axis=-1, keepdims=True)
        offset = s / (inside * gap)
        vectors = _SQRT2 * (inside * moved - c * s * centre) / (inside * gap)
        last = jnp.sqrt(2 * c) * offset
        return SearchTerms(
            jnp.concatenate([vectors, -last], axis=-1),
            jnp.concatenate([vectors, last], axis=-1),
            offset[:, 0],
            (1 / gap + 1 / inside)[:, 0],
        )

    def flaws(self, x: Float[ArrayLike, "n d"]) -> dict[str, Bool[Array, " n"]]:
        """Marks rows that are not finite, not inside the ball in float32, or too far out."""
        (x,) = arithmetic.inexact(x)
        xx = jnp.sum(x * x, axis=-1)
        inside = self.c * xx <= 1 - _BOUNDARY_MARGIN
        return {"infinite": ~jnp.isfinite(xx), "outside": ~inside, "far": ~(xx < _MAX_SQUARE_NORM)}

    def check(self, x: Float[ArrayLike, "n d"], *, first: int = 0) -> None:
        """Raises a `UserError` unless all rows are finite and inside the ball in float32.

        Scores would overflow in the huge balls of a tiny c > 0; it is an error, too.
        """
        if not (self.c == 0 or self.c >= _SMALLEST_CURVATURE):
            raise UserError(f"c is {float(self.c):g}; to search, it must be 0 or at least 1e-12")
        outside = f"is outside the ball of radius 1/√{float(self.c):g}, or too close to its surface"
        words = {"infinite": "is not finite", "outside": outside, "far": "is too far out"}
        raise_on_flaws(self, x, first, words)


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
        return " + ".join(f"{weight} × {space}" for space, weight in self.parts)

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

    def flaws(self, x: Float[ArrayLike, "n m*d"]) -> dict[str, Bool[Array, " n"]]:
        """Marks rows whose coordinates in a space are not a point of it."""
        pairs = zip(self.parts, self.split(x), strict=True)
        found = [space.flaws(a) for (space, _), a in pairs]
        return {
            f"{name} {i}": rows for i, flaws in enumerate(found) for name, rows in flaws.items()
        }

    def check(self, x: Float[ArrayLike, "n m*d"], *, first: int = 0) -> None:
        """Raises a `UserError` unless all rows are points of each space."""
        for (space, _), coordinates in zip(self.parts, self.split(x), strict=True):
            space.check(coordinates, first=first)


# The spaces that configurations and gallery files name.
SPACES: dict[str, type[InnerProductSpace]] = {"poincare": PoincareBall, "sphere": Sphere}
_BUILT_IN = frozenset(SPACES)
_TREES = {*SPACES.values(), Fused}  # Those that `as_tree` has registered.


def register_space(name: str, space: type[Space]) -> None:
    """Makes a space of one's own a value of `objective.space`, in this process.

    Args:
        name: The name, which is not one of hypjax's own. A later registration replaces it.
        space: A frozen dataclass with the methods of `Space` or `InnerProductSpace`. Its fields
            have defaults, or the names of fields of `config.objective`, such as `c`, which set
            them.

    Raises:
        UserError: The name is taken, or something is missing.
    """
    require_free("a space", name, _BUILT_IN)
    if not (isinstance(space, type) and dataclasses.is_dataclass(space)):
        raise UserError(
            f"the space {name} is no dataclass; decorate it with @dataclass(frozen=True)"
        )
    methods = [method for method in vars(Space) if not method.startswith("_")]
    missing = [method for method in methods if not hasattr(space, method)]
    if missing:
        raise UserError(f"the space {space.__name__} lacks {', '.join(missing)}")
    if space not in _TREES:
        _TREES.add(as_tree(space))
    SPACES[name] = space
