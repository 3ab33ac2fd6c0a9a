"""Reads pickles of plain data, and refuses those that could run code or exhaust the memory.

An allow-list for `pickle.Unpickler.find_class` keeps out code, but not small pickles that take the
whole memory, by an index of 400 million, by a string that is copied again and again, or that crash
the interpreter, by a key of a million nested tuples.
"""

import pickletools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from hypjax.errors import UserError

_TYPES = re.compile(r"[<>=|]?([biufSU]\d*|O8?)")  # Of NumPy: numbers, strings and lists.
_EXPANSION = 64  # Largest total size of what a pickle builds, relative to its own.


def loads(data: bytes, place: str) -> Any:
    """Reads a pickle of dicts, lists, tuples, numbers, strings, None and NumPy arrays.

    Nothing that a pickle names is imported or called. Arrays are built from their bytes by code of
    this module, in whichever version of Python and NumPy they were written, and returned as
    `Array`. Raises UserError, which names the place, if it holds anything else or is damaged.
    """
    try:
        return _Machine(_EXPANSION * len(data)).run(data)
    except _RefusedError as error:
        raise UserError(
            f"{place} is refused: it refers to {error}, and loading it could run code; get the "
            "original file"
        ) from None
    except Exception as error:  # Damaged pickles raise almost anything.
        raise UserError(f"{place} is damaged: it cannot be read as a pickle") from error


class _RefusedError(Exception):
    """A pickle refers to what plain data does not need."""


class _Machine:
    """The stack machine of pickles, with those instructions that plain data needs.

    Data may be referred to several times. Its size counts every time, as if it were copied, so that
    no small pickle can describe large data. Nesting is bounded, too, since each level counts all
    that it holds.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget  # Largest total size of all data that is built.
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}  # Of containers, by id.
        self._containers: list[Any] = []  # All of them, so that ids stay unique.
        self._shared: set[int] = set()  # Ids of what was referred to, which must not grow any more.

    def run(self, data: bytes) -> Any:
        for instruction, argument, _ in pickletools.genops(data):
            name, stack = instruction.name, self._stack
            taken = self._take(instruction.stack_before)
            if name == "STOP":
                return taken[0]
            if name == "MARK":
                self._marks.append(len(stack))
            elif name == "MEMOIZE" or "PUT" in name:
                stack += taken
                self._memo[len(self._memo) if argument is None else argument] = stack[-1]
            elif instruction.stack_after:
                stack.append(self._result(instruction, argument, taken))
        raise ValueError("no end")

    def _take(self, before: Sequence[Any]) -> list[Any]:
        """Takes from the stack what an instruction needs, perhaps all after the last mark."""
        start = len(self._stack) - len(before)
        if pickletools.markobject in before:
            start = self._marks.pop() - before.index(pickletools.markobject)
        if start < (self._marks[-1] if self._marks else 0):
            raise ValueError("too little on the stack")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _result(self, instruction: pickletools.OpcodeInfo, argument: Any, taken: list[Any]) -> Any:
        match instruction.name:
            case "GET" | "BINGET" | "LONG_BINGET":
                self._shared.add(id(self._memo[argument]))
                return self._memo[argument]
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                return {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[instruction.name]
            case "EMPTY_LIST" | "LIST":
                return self._filled([], taken)
            case "EMPTY_DICT" | "DICT":
                return self._filled({}, taken)
            case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS" | "BUILD":
                return self._filled(taken[0], taken[1:])
            case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                return self._counted(tuple(taken), taken)
            case "GLOBAL" | "STACK_GLOBAL":
                known = tuple(taken or argument.split(" "))
                if known not in _KNOWN:
                    raise _RefusedError(".".join(known))
                return _KNOWN[known]
            case "REDUCE":
                return self._counted(taken[0](*taken[1]), taken)
            case _ if argument is not None and pickletools.anyobject not in instruction.stack_after:
                return argument  # A number or a string.
        raise ValueError(instruction.name)

    def _filled(self, container: Any, items: list[Any]) -> Any:
        """Adds items to a list or a dict, or the state to an array or its type."""
        if id(container) in self._shared:
            raise ValueError("it grows after it was referred to")
        if isinstance(container, list):
            container.extend(items)
        elif isinstance(container, dict):
            if not all(isinstance(key, str) for key in items[::2]):
                raise TypeError("a key is no string")
            container.update(zip(items[::2], items[1::2], strict=True))
        else:
            container.__setstate__(*items)
        return self._counted(container, items)

    def _counted(self, made: Any, parts: Sequence[Any]) -> Any:
        """Counts the size of the parts, of which something is made or grows."""
        added = 1 + sum(
            self._sizes.get(id(part), len(part) if isinstance(part, str | bytes) else 1)
            for part in parts
        )
        self._budget -= added
        if self._budget < 0:
            raise ValueError("it describes far more data than it holds")
        if isinstance(made, list | dict | tuple | Array | _Type):
            self._sizes[id(made)] = self._sizes.get(id(made), 0) + added
            self._containers.append(made)
        return made


class Array:
    """A NumPy array as it lies in a pickle; `value` is the array."""

    value: Shaped[np.ndarray, "..."]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Fills the array from what `numpy.ndarray.__reduce__` wrote."""
        _, shape, dtype, fortran, data = state
        if "O" in dtype.name:
            flat = _objects(data)
        else:
            flat = np.frombuffer(_bytes(data), dtype.numpy)
        self.value = flat.reshape(shape, order="F" if fortran else "C")


class _Type:
    """A NumPy type as it lies in a pickle."""

    def __init__(self, name: str, *_: Any) -> None:
        if not _TYPES.fullmatch(name):
            raise ValueError(f"type {name}")
        self.name, self.order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(self.name).newbyteorder(self.order)


def _from_buffer(data: Any, dtype: _Type, shape: tuple[int, ...], order: str) -> Array:
    array = Array()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _bytes(data: bytes | bytearray | str) -> bytes:
    """The bytes of an array; those of Python 2 are read as a string."""
    if isinstance(data, str):
        return data.encode("latin1")
    return bytes(memoryview(data))  # Of a number, `bytes` would make as many zeros.


def _objects(items: Sequence[Any]) -> Shaped[np.ndarray, " items"]:
    """An array of objects. Assigned together, lists among them would become further axes."""
    found = np.empty(len(items), object)
    for i, item in enumerate(items):
        found[i] = item
    return found


# What pickles of arrays refer to.
_KNOWN = {
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    ("__builtin__", "bytes"): lambda: b"",
    ("builtins", "bytes"): lambda: b"",
}
for _package in ("numpy.core", "numpy._core"):
    _KNOWN |= {
        (f"{_package}.multiarray", "_reconstruct"): lambda *_: Array(),
        (f"{_package}.multiarray", "scalar"): lambda dtype, data: np.frombuffer(
            _bytes(data), dtype.numpy
        )[0].item(),
        (f"{_package}.numeric", "_frombuffer"): _from_buffer,
    }


# What reading a pickle of another structure than expected may raise.
UNEXPECTED = (AttributeError, TypeError, KeyError, ValueError, OverflowError)


def as_array(value: Any) -> Shaped[np.ndarray, "..."]:
    """A list, a tuple or an array of a pickle as an array, whose elements may be dicts.

    Raises TypeError for anything else.
    """
    if isinstance(value, Array):
        return value.value
    if not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__}")
    return _objects([x.value if isinstance(x, Array) else x for x in value])


def as_indices(value: Any) -> Int[np.ndarray, " items"]:
    """A list of whole numbers of a pickle, in whatever type they are written.

    Raises TypeError if it is no list, and ValueError if it holds anything else.
    """
    given = as_array(value).astype(np.float64).reshape(-1)
    found = given.astype(np.int64)
    if np.any(found != given):
        raise ValueError("not whole numbers")
    return found
