"""The spaces that configurations and files name."""

import dataclasses

from hypjax.errors import UserError, require_free
from hypjax.geometry.ball import PoincareBall
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
