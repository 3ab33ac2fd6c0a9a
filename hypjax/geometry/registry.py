"""Registry of spaces: their names in configurations and files."""

import contextlib
import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from hypjax.errors import UserError, require_free
from hypjax.fields import Values
from hypjax.geometry.fused import Composite, Fused, Product
from hypjax.geometry.hyperbolic import Lorentz, PoincareBall
from hypjax.geometry.learned import has_curvature
from hypjax.geometry.spaces import InnerProductSpace, Space
from hypjax.geometry.sphere import Sphere

SPACES: dict[str, type[Space]] = {
    "poincare": PoincareBall,
    "lorentz": Lorentz,
    "sphere": Sphere,
    "product": Product,
    "fused": Fused,
}
_BUILT_IN = frozenset(SPACES)


def register_space(name: str, space: type[Space]) -> None:
    """Registers a user-defined space as a value of `objective.space`, in this process.

    The space is a frozen dataclass with the methods of `Space` or `InnerProductSpace`. Its fields
    have defaults, or get the values of fields of `config.objective` with the same names, such as
    `c`. A later registration under the same name replaces this one. Raises a `UserError` if the
    name belongs to hypjax, or the space lacks a method.
    """
    require_free("a space", name, _BUILT_IN)
    if not (isinstance(space, type) and dataclasses.is_dataclass(space)):
        advice = "decorate its class with @dataclass(frozen=True)"
        raise UserError(f"the space {name} is not a dataclass; {advice}")
    methods = [method for method in vars(Space) if not method.startswith("_")]
    missing = [method for method in methods if not hasattr(space, method)]
    if missing:
        raise UserError(f"the space {space.__name__} lacks {', '.join(missing)}")
    fields = [field for field in dataclasses.fields(space) if field.init]
    static = [field.name for field in fields if field.metadata.get("static")]
    leaves = [field.name for field in fields if field.name not in static]
    with contextlib.suppress(ValueError):  # Raised if the class is already registered.
        jax.tree_util.register_dataclass(space, leaves, static)
    SPACES[name] = space


def space_name(space: Space) -> str | None:
    """The registered name of a space's class; None for an unregistered class."""
    return next((name for name, kind in SPACES.items() if type(space) is kind), None)


def describe_space(space: Space) -> dict[str, Any]:
    """Describes a space by JSON values; `space_of` is the inverse."""
    if (name := space_name(space)) is None:
        raise UserError(f"{type(space).__name__} has no name; call hypjax.register_space first")
    fields = {field.name: getattr(space, field.name) for field in dataclasses.fields(space)}
    if "c" in fields:
        fields["c"] = float(fields["c"])
    if isinstance(space, Composite):
        fields["parts"] = [[describe_space(part), float(weight)] for part, weight in space.parts]
    return {"name": name, **fields}


def space_of(description: Mapping[str, Any]) -> Space:
    """Inverts `describe_space`; an invalid description is a KeyError, TypeError or ValueError."""
    fields = dict(description)
    if "parts" in fields:
        parts = ((space_of(part), float(weight)) for part, weight in fields["parts"])
        fields["parts"] = tuple(parts)
    for name in {"c", "feature_scale"} & fields.keys():
        if not isinstance(fields[name], numbers.Real):
            raise TypeError(f"{name} is {fields[name]!r}, not a number")
    return SPACES[fields.pop("name")](**fields)


def simple_spaces() -> list[str]:
    """Names of the spaces without parts, whose points are ranked by inner products."""
    return [name for name, space in SPACES.items() if hasattr(space, "search_terms")]


def has_parts(name: str) -> bool:
    """Whether a registered space has parts, which `objective.parts` lists."""
    return issubclass(SPACES[name], Composite)


def is_product(name: str) -> bool:
    """Whether a registered space splits the features among its parts."""
    return issubclass(SPACES[name], Product)


def named_parts(fields: Values) -> Sequence[str]:
    """Names of the parts of the space in `config.objective`; without parts, the space's name."""
    return fields["parts"] if has_parts(fields["space"]) else [fields["space"]]


def create_space(fields: Values) -> Space:
    """Builds the space that `config.objective` describes.

    With several curvatures, each curved part gets one, in order. A curved space without parts is
    repeated, once for each curvature, and the distances are averaged.
    """

    def create(space: str, **parts: Any) -> Space:
        names = [field.name for field in dataclasses.fields(SPACES[space])]
        return SPACES[space](**{name: fields[name] for name in names if name in fields} | parts)

    def create_part(name: str) -> InnerProductSpace:
        space = create(name)
        if not isinstance(space, InnerProductSpace):
            raise UserError(f"{name} defines no inner products, so it cannot be a part of a space")
        return space

    name = fields["space"]
    curvatures = fields["curvatures"]
    scalars = {"curvatures": curvatures} if curvatures else {}
    if has_parts(name):
        weights = fields["weights"] or [1.0] * len(fields["parts"])
        parts = tuple(zip(map(create_part, fields["parts"]), weights, strict=True))
        return create(name, parts=parts).with_scalars(scalars)
    if not scalars or not has_curvature(SPACES[name]):
        return create(name)
    parts = ((create_part(name), 1 / len(curvatures)),) * len(curvatures)
    return Fused(parts, normalized=False).with_scalars(scalars)


def unused_fields(fields: Values) -> set[str]:
    """Names of fields of `config.objective` that have no effect.

    They are the fields of other spaces, `c` if there are several curvatures, and the bounds and
    rate of a curvature that is not learned.
    """

    def field_names(names: Iterable[str]) -> set[str]:
        return {field.name for name in names for field in dataclasses.fields(SPACES[name])}

    unused = field_names(SPACES) - field_names([fields["space"], *named_parts(fields)])
    if not has_parts(fields["space"]):
        unused.add("weights")
    if "c" in unused:
        unused.add("curvatures")
    elif fields["curvatures"]:
        unused.add("c")
    if not fields["learn_c"]:
        unused |= {"c_bounds", "c_rate"}
    return unused
