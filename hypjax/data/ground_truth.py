"""Reads ground truth of Revisited Oxford and Paris (Radenović et al., CVPR 2018) from pickles."""

import io
import itertools
import pathlib
import pickle
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hypjax.data.pixels import read_bytes
from hypjax.errors import UserError, explained
from hypjax.types import GroundTruth

# Functions and classes that pickled NumPy arrays call, in all versions of Python and NumPy.
_ALLOWED = {
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "_codecs": {"encode"},
    **dict.fromkeys(("__builtin__", "builtins"), {"bytes"}),
}


class Benchmark(NamedTuple):
    """Queries, the gallery that they search, and the ground truth."""

    queries: tuple[str, ...]  # Names of images without a suffix, as in `gallery`.
    gallery: tuple[str, ...]
    # Each query's box around its object: left, top, right and bottom, in pixels.
    boxes: Float[np.ndarray, "queries 4"]
    ground_truth: GroundTruth  # Indices into the gallery.


def read_ground_truth(path: str | pathlib.Path) -> Benchmark:
    """Reads a file such as `gnd_roxford5k.pkl`, without running code that it may hold.

    Raises UserError if the file cannot be read, could run code, is damaged or of another kind.
    """
    path = pathlib.Path(path).expanduser()
    with explained(f"cannot read {path}"):
        loaded = load_pickle(read_bytes(path), str(path))
    try:
        queries, gallery = (tuple(map(str, loaded[key])) for key in ("qimlist", "imlist"))
        rows = list(loaded["gnd"])
        boxes = np.array([row["bbx"] for row in rows], np.float64).reshape(len(queries), 4)
        levels = [[as_indices(row[level]) for row in rows] for level in GroundTruth._fields]
    except Exception as error:  # A pickle of another structure may raise almost anything.
        raise UserError(f"{path} is not a ground truth of qimlist, imlist and gnd") from error
    items = np.concatenate([[0], *itertools.chain.from_iterable(levels)])  # With 0, never empty.
    if not gallery or items.min() < 0 or items.max() >= len(gallery):
        raise UserError(f"{path} is damaged: it judges images outside of imlist; fetch it again")
    return Benchmark(queries, gallery, boxes, GroundTruth._make(levels))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")  # NumPy 2 renamed it.
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} in it could run code")
        return super().find_class(module, name)


def load_pickle(data: bytes, path: str) -> Any:
    """Reads plain values and arrays; a malicious pickle may exhaust memory, but run no code."""
    with explained(f"cannot read {path}", "; get the original file"):
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()


def as_indices(value: Any) -> Int[np.ndarray, " items"]:
    """Converts whole numbers of any type to int64; raises a ValueError for other values."""
    numbers = np.array(value, np.float64).reshape(-1)
    if np.any(numbers != np.rint(numbers)):
        raise ValueError("not whole numbers")
    return numbers.astype(np.int64)
