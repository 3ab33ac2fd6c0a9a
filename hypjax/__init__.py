"""Image retrieval with hyperbolic embeddings, in JAX and Flax."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypjax.inference.model import Model, load
    from hypjax.inference.push import push

__version__ = "0.1.0"
__all__ = ["Model", "load", "push"]

_MODULES = {"Model": "model", "load": "model", "push": "push"}


def __dir__() -> list[str]:
    """Lists `load` and `push`, too, which are not imported yet."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


def __getattr__(name: str) -> Any:
    """Imports what `hypjax.load` and `hypjax.push` need, JAX among it, when they are first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"hypjax.inference.{_MODULES[name]}"), name)
