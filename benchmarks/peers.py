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

# torchvision registers compiled operators, and fails where they belong to another build of torch.
# Without this module it does not, and nothing here needs them; timm imports torchvision, too.
_OPERATORS = "torchvision._meta_registrations"
sys.modules.setdefault(_OPERATORS, types.ModuleType(_OPERATORS))


@functools.cache
def installed(*names: str) -> bool:
    """Whether all of these modules can be imported."""
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError:
        return False
    return True


def torch_or_missing(install: str, *others: str) -> tuple[types.ModuleType | None, str]:
    """Returns the module `torch_peers` and the name of PyTorch, or None and what is missing.

    `install` says how to install torch and the other modules that a task needs.
    """
    if not installed("torch", *others):
        return None, install
    import torch

    gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    if not gpu and jax.default_backend() != "cpu":
        return None, "torch for this device"
    from benchmarks import torch_peers

    return torch_peers, torch_peers.name()


def faiss_search(
    space: InnerProductSpace, x: Float[np.ndarray, "n d"], k: int
) -> Callable[[], tuple[Float32[np.ndarray, "n k"], Int[np.ndarray, "n k"]]]:
    """Returns what builds an exact index of points and finds the k largest products of each."""
    import faiss

    gallery, queries = search_vectors(space, x)

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
