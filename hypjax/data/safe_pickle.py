"""Reads the pickles of official datasets without running code that they may hold."""

import io
import pickle
from typing import Any

import numpy as np
from jaxtyping import Int

from hypjax.errors import UserError

# Functions and classes that pickled NumPy arrays call, in all versions of Python and NumPy.
_ALLOWED = {
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "_codecs": {"encode"},
    **dict.fromkeys(("__builtin__", "builtins"), {"bytes"}),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")
        if name not in _ALLOWED.get(module, ()):
            raise UserError(f"it refers to {module}.{name}, and loading it could run code")
        return super().find_class(module, name)


def loads(data: bytes, place: str) -> Any:
    """Reads a pickle of dicts, lists, tuples, numbers, strings, None and NumPy arrays.

    Raises a UserError, which names the `place`, for other pickles. A malicious pickle cannot run
    code, but can exhaust the memory.
    """
    try:
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except UserError as error:
        raise UserError(f"{place} is refused: {error}; get the original file") from None
    except Exception as error:  # Damaged pickles raise almost anything.
        raise UserError(f"{place} is damaged: it cannot be read as a pickle") from error


def as_indices(value: Any) -> Int[np.ndarray, " items"]:
    """Converts whole numbers of any type to int64; raises a ValueError for other values."""
    numbers = np.array(value, np.float64).reshape(-1)
    if np.any(numbers != np.rint(numbers)):
        raise ValueError("not whole numbers")
    return numbers.astype(np.int64)
