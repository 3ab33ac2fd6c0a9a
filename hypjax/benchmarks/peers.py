"""Other libraries to compare with, if installed."""

import functools
import importlib
import sys
import types
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float, Float32, Int

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


def torch_or_missing(install: str, *others: str) -> tuple[types.ModuleType | None, str]:
    """The module `torch_peers` and a name of PyTorch; or None, and what tasks lack to use it.

    `install` says what to install if torch or one of the other modules is missing.
    """
    # Without torchvision, or where it does not fit torch, timm cannot be imported.
    if not installed("torch") or "timm" in others and not torchvision() or not installed(*others):
        return None, install
    import torch

    gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    if not gpu and jax.default_backend() != "cpu":
        return None, "torch for this device"
    from hypjax.benchmarks import torch_peers

    return torch_peers, torch_peers.name()


def faiss_search(
    gallery: Float[np.ndarray, "m k"], queries: Float[np.ndarray, "n k"], k: int
) -> Callable[[], tuple[Float32[np.ndarray, "n k"], Int[np.ndarray, "n k"]]]:
    """Returns what builds an exact index and finds the k largest products of each query."""
    import faiss

    def run() -> tuple[np.ndarray, np.ndarray]:
        index = faiss.IndexFlatIP(gallery.shape[1])
        index.add(gallery)
        return index.search(queries, k)

    return run


def search_vectors(space: InnerProductSpace, x: np.ndarray) -> list[np.ndarray]:
    """Vectors of points as gallery items and as queries of an inner-product index."""
    return [
        np.ascontiguousarray(space.search_vectors(x, role), np.float32)
        for role in ("gallery", "query")
    ]
