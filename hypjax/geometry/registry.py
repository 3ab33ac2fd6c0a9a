"""The spaces that configurations and files name."""

import dataclasses

from hypjax.errors import UserError, require_free
from hypjax.geometry.ball import PoincareBall
from hypjax.geometry.fused import Fused
from hypjax.geometry.hyperboloid import Lorentz
from hypjax.geometry.spaces import InnerProductSpace, Space, as_tree
from hypjax.geometry.sphere import Sphere

SPACES: dict[str, type[InnerProductSpace]] = {
    "poincare": PoincareBall,
    "lorentz": Lorentz,
    "sphere": Sphere,
}
_BUILT_IN = frozenset(SPACES)


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
    SPACES[name] = as_tree(space)


def describe_space(space: Space) -> dict[str, object]:
    """Describes a space in values that JSON can hold; `space_of` is the inverse."""
    if isinstance(space, Fused):
        parts = [[describe_space(part), float(weight)] for part, weight in space.parts]
        return {"name": "fused", "parts": parts, "normalized": space.normalized}
    for name, kind in SPACES.items():
        if type(space) is kind:
            fields = dataclasses.asdict(space)
            return (
                {"name": name} | ({"c": float(fields.pop("c"))} if "c" in fields else {}) | fields
            )
    raise UserError(
        f"{type(space).__name__} cannot be written to a file; name it by hypjax.register_space"
    )


def space_of(description: dict[str, object]) -> Space:
    """The space that `describe_space` described, or a Key-, Type- or ValueError if it is none."""
    fields = dict(description)
    if fields["name"] == "fused":
        parts = tuple((space_of(part), float(weight)) for part, weight in fields["parts"])
        return Fused(parts, normalized=bool(fields["normalized"]))
    return SPACES[fields.pop("name")](**fields)
