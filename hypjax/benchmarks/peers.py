"""Other libraries to compare with, if installed."""

import functools
import importlib
import sys
import types

import jax
import numpy as np

from hypjax.geometry import InnerProductSpace


@functools.cache
def installed(*names: str) -> bool:
    """Whether all of these modules can be imported."""
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError:
        return False
    return True


@functools.cache
def torchvision() -> types.ModuleType | None:
    """Returns torchvision, or only its Python part if its operators do not fit torch, or None."""
    for _ in range(2):
        try:
            import torchvision
            from torchvision import transforms  # noqa: F401

            return torchvision
        except ImportError:
            return None
        except RuntimeError:  # Its compiled operators belong to another build of torch.
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            registrations = "torchvision._meta_registrations"
            sys.modules[registrations] = types.ModuleType(registrations)
    return None


def missing_torch(install: str, *others: str) -> str | None:
    """What tasks lack to be compared with PyTorch, or None.

    Args:
        install: What to install if a module is missing.
        others: Modules that are needed besides torch.
    """
    # Without torchvision, or where it does not fit torch, timm cannot be imported.
    if not installed("torch") or "timm" in others and not torchvision() or not installed(*others):
        return install
    import torch

    gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    return None if gpu or jax.default_backend() == "cpu" else "torch for this device"


def search_vectors(space: InnerProductSpace, x: np.ndarray) -> list[np.ndarray]:
    """Vectors of points as gallery items and as queries of an inner-product index."""
    return [
        np.ascontiguousarray(space.search_vectors(x, role), np.float32)
        for role in ("gallery", "query")
    ]
