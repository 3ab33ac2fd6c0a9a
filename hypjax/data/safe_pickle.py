"""Reads pickles of plain data, and refuses those that could run code."""

import functools
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from hypjax.errors import UserError

_KINDS = "biufSUO"  # Of NumPy's types: numbers, strings and lists.


def loads(data: bytes, place: str) -> Any:
    """Reads a pickle of dicts, lists, tuples, numbers, strings, None and NumPy arrays.

    Nothing that a pickle names is imported or called. Arrays are built from their bytes by code of
    this module, in whichever version of Python and NumPy they were written.

    Args:
        data: The pickle.
        place: Its file, for messages.

    Returns:
        The data, with arrays as `Array`.

    Raises:
        UserError: It holds anything else, or is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except _RefusedError as error:
        raise UserError(
            f"{place} is refused: it refers to {error}, and loading it could run code; get the "
            "original file"
        ) from None
    except Exception as error:  # Damaged pickles raise almost anything.
        raise UserError(f"{place} is damaged: it cannot be read as a pickle") from error


class Array:
    """A NumPy array as it lies in a pickle.

    Attributes:
        value: The array.
    """

    value: Shaped[np.ndarray, "..."]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Fills the array from what `numpy.ndarray.__reduce__` wrote."""
        _, shape, dtype, fortran, data = state
        if dtype.name.lstrip("<>=|")[:1] == "O":
            flat = np.empty(len(data), object)
            flat[:] = data
        else:
            flat = np.frombuffer(_bytes(data), dtype.numpy)
        self.value = flat.reshape(shape, order="F" if fortran else "C")


class _Type:
    """A NumPy type as it lies in a pickle."""

    def __init__(self, name: str, *_: Any) -> None:
        if name.lstrip("<>=|")[:1] not in _KINDS:
            raise ValueError(f"type {name}")
        self.name, self.order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(self.name).newbyteorder(self.order)


class _RefusedError(Exception):
    """A pickle refers to what plain data does not need."""


class _Unpickler(pickle.Unpickler):
    @functools.cached_property
    def _known(self) -> Mapping[tuple[str, str], Callable[..., Any]]:
        """What pickles of arrays refer to: functions of this pickle alone, which it may spoil."""
        known = {
            ("numpy", "ndarray"): lambda: None,
            ("numpy", "dtype"): lambda *given: _Type(*given),
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
            ("__builtin__", "bytes"): lambda: b"",
            ("builtins", "bytes"): lambda: b"",
        }
        for package in ("numpy.core", "numpy._core"):
            known |= {
                (f"{package}.multiarray", "_reconstruct"): lambda *_: Array(),
                (f"{package}.multiarray", "scalar"): lambda *given: _scalar(*given),
                (f"{package}.numeric", "_frombuffer"): lambda *given: _from_buffer(*given),
            }
        return known

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle refers to.

        Raises:
            _RefusedError: It is not needed for plain data.
        """
        if (module, name) not in self._known:
            raise _RefusedError(f"{module}.{name}")
        return self._known[module, name]


def _scalar(dtype: _Type, data: bytes | str) -> Any:
    return np.frombuffer(_bytes(data), dtype.numpy)[0].item()


def _from_buffer(data: Any, dtype: _Type, shape: tuple[int, ...], order: str) -> Array:
    array = Array()
    array.__setstate__((1, shape, dtype, order == "F", bytes(data)))
    return array


def _bytes(data: bytes | str) -> bytes:
    """The bytes of an array; those of Python 2 are read as a string."""
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


# What reading a pickle of another structure than expected may raise.
UNEXPECTED = (AttributeError, TypeError, KeyError, ValueError, OverflowError)


def as_array(value: Any) -> Shaped[np.ndarray, "..."]:
    """A list, a tuple or an array of a pickle as an array, whose elements may be dicts.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(value, Array):
        return value.value
    if not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__}")
    found = np.empty(len(value), object)
    found[:] = [x.value if isinstance(x, Array) else x for x in value]
    return found


def as_indices(value: Any) -> Int[np.ndarray, " items"]:
    """A list of whole numbers of a pickle, in whatever type they are written.

    Raises:
        TypeError: It is no list.
        ValueError: It holds anything else.
    """
    given = as_array(value).astype(np.float64).reshape(-1)
    found = given.astype(np.int64)
    if np.any(found != given):
        raise ValueError("not whole numbers")
    return found
