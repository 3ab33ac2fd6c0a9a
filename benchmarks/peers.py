"""Other libraries to compare with, where installed."""

import functools
import importlib
import sys
import types
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float, Float32, Int

from hypjax.geometry import InnerProductSpace

# torchvision registers compiled operators, and fails if they belong to another build of torch. An
# empty module in the place of this one prevents that; nothing here needs the operators. timm
# imports torchvision, too.
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
    """Returns the module `torch_peers` and PyTorch's name, or None and what to install.

    `install` says how to install torch and the modules `others`.
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
    """Returns a function that builds an exact index of points, and searches it for all of them."""
    import faiss

    gallery, queries = search_vectors(space, x)

    def run() -> tuple[np.ndarray, np.ndarray]:
        index = faiss.IndexFlatIP(gallery.shape[1])
        index.add(gallery)
        return index.search(queries, k)

    return run


def search_vectors(space: InnerProductSpace, x: np.ndarray) -> list[np.ndarray]:
    """Vectors for an inner-product index: of points as gallery items, and of points as queries."""
    return [
        np.ascontiguousarray(space.search_vectors(x, role), np.float32)
        for role in ("gallery", "query")
    ]
