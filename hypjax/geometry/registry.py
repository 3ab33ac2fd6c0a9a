"""The spaces that configurations and files name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hypjax.errors import UserError, require_free
from hypjax.geometry.ball import PoincareBall
from hypjax.geometry.fused import Composite, Fused, Product
from hypjax.geometry.hyperboloid import Lorentz
from hypjax.geometry.learned import has_curvature
from hypjax.geometry.spaces import Space, as_tree
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
    """Makes a user's space a value of `objective.space`, in this process.

    `space` is a frozen dataclass with the methods of `Space` or `InnerProductSpace`. Its fields
    have defaults, or are set by fields of `config.objective` of the same name, such as `c`. A later
    registration replaces it. Raises a `UserError` for a name of hypjax's or a missing method.
    """
    require_free("a space", name, _BUILT_IN)
    if not (isinstance(space, type) and dataclasses.is_dataclass(space)):
        raise UserError(f"the space {name} is no dataclass; decorate it by @dataclass(frozen=True)")
    methods = [method for method in vars(Space) if not method.startswith("_")]
    missing = [method for method in methods if not hasattr(space, method)]
    if missing:
        raise UserError(f"the space {space.__name__} lacks {', '.join(missing)}")
    SPACES[name] = as_tree(space)


def space_name(space: Space) -> str | None:
    """The name under which the class of a space is registered; None if it is not."""
    return next((name for name, kind in SPACES.items() if type(space) is kind), None)


def describe_space(space: Space) -> dict[str, object]:
    """Describes a space in values that JSON can hold; `space_of` is the inverse."""
    if (name := space_name(space)) is None:
        raise UserError(f"{type(space).__name__} has no name; call hypjax.register_space first")
    fields = {field.name: getattr(space, field.name) for field in dataclasses.fields(space)}
    if "c" in fields:
        fields["c"] = float(fields["c"])
    if isinstance(space, Composite):
        fields["parts"] = [[describe_space(part), float(weight)] for part, weight in space.parts]
    return {"name": name, **fields}


def space_of(description: dict[str, object]) -> Space:
    """Builds a space from its description; Key-, Type- or ValueError if it is invalid."""
    fields = dict(description)
    if "parts" in fields:
        parts = ((space_of(part), float(weight)) for part, weight in fields["parts"])
        fields["parts"] = tuple(parts)
    return SPACES[fields.pop("name")](**fields)


def simple_spaces() -> list[str]:
    """Names of the spaces without parts, whose points are ranked by inner products."""
    return [name for name, space in SPACES.items() if hasattr(space, "search_terms")]


def has_parts(space: str) -> bool:
    """Whether `objective.parts` names the parts of a space, by its name."""
    return issubclass(SPACES[space], Composite)


def is_product(space: str) -> bool:
    """Whether a space, by its name, shares the features among its parts."""
    return issubclass(SPACES[space], Product)


def named_parts(fields: Mapping[str, Any]) -> Sequence[str]:
    """Names of a space's parts in `config.objective`, or of its only space."""
    return fields["parts"] if has_parts(fields["space"]) else [fields["space"]]


def create_space(fields: Mapping[str, Any]) -> Space:
    """Builds the space that `config.objective` describes.

    Several curvatures belong to the curved parts, in their order. Without parts, the space averages
    the distances of one space per curvature.
    """

    def create(space: str, **parts: Any) -> Space:
        names = [field.name for field in dataclasses.fields(SPACES[space])]
        return SPACES[space](**{name: fields[name] for name in names if name in fields} | parts)

    name, curvatures = fields["space"], fields["curvatures"]
    scalars = {"curvatures": curvatures} if curvatures else {}
    if has_parts(name):
        weights = fields["weights"] or [1.0] * len(fields["parts"])
        parts = tuple(zip(map(create, fields["parts"]), weights, strict=True))
        return create(name, parts=parts).with_scalars(scalars)
    if not scalars or not has_curvature(SPACES[name]):
        return create(name)
    parts = ((create(name), 1 / len(curvatures)),) * len(curvatures)
    return Fused(parts, normalized=False).with_scalars(scalars)


def unused_fields(fields: Mapping[str, Any]) -> set[str]:
    """Names of fields of `config.objective` that have no effect.

    These are the fields of other spaces, `c` if there are several curvatures, and the bounds and
    rate of a curvature that is not learned.
    """
    named = {n: {field.name for field in dataclasses.fields(s)} for n, s in SPACES.items()}
    unused = set().union(*named.values())
    unused -= named[fields["space"]].union(*(named[part] for part in named_parts(fields)))
    unused |= set() if has_parts(fields["space"]) else {"weights"}
    unused |= {"curvatures"} if "c" in unused else {"c"} if fields["curvatures"] else set()
    return unused if fields["learn_c"] else unused | {"c_bounds", "c_rate"}
