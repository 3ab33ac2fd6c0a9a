"""Image retrieval with hyperbolic embeddings, in JAX and Flax."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypjax.geometry import register_space as register_space
    from hypjax.inference.model import Model as Model
    from hypjax.inference.model import load as load
    from hypjax.inference.save import save as save
    from hypjax.integrations.hub import push as push
    from hypjax.models import register_encoder as register_encoder
    from hypjax.objectives import register_objective as register_objective
    from hypjax.train import train_and_evaluate as train_and_evaluate

    __version__: str

_MODULES = {
    "Model": "inference.model",
    "load": "inference.model",
    "push": "integrations.hub",
    "register_encoder": "models",
    "register_objective": "objectives",
    "register_space": "geometry",
    "save": "inference.save",
    "train_and_evaluate": "train",
}
__all__ = ["__version__", *_MODULES]


def __dir__() -> list[str]:
    """Lists the public names, including those that are not imported yet."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, since most of them need JAX."""
    import importlib

    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("hypjax")
        except metadata.PackageNotFoundError:  # A clone on the path that is not installed.
            return "0+unknown"
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hypjax.{_MODULES[name]}"), name)
