"""Hashes of the user's code and its settings, equal in every process that has the same ones."""

import contextlib
import dataclasses
import dis
import functools
import hashlib
import pathlib
import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FLAX = ("parent", "name", "scope")  # Fields of every Flax module.
# Methods that dataclasses and Flax generate.
_GENERATED = frozenset(
    f"__{name}__"
    for name in ("init", "repr", "eq", "hash", "replace", "setattr", "delattr", "getattr")
)


def code_hash(piece: Any) -> str:
    """Hash of a function, an object or a module: its code, what that refers to, and its settings.

    The code is that of functions and classes which belong to no library: their bytecode, constants,
    defaults, closures, and the global values that they name. It begins with the version of Python,
    since another one compiles the same text otherwise.
    """
    return f"{sys.implementation.cache_tag}:{_Hash(code=True).of(piece)[:32]}"


def settings_hash(piece: Any) -> str:
    """Hash of the settings of an object or a module, in which functions and classes are names."""
    return _Hash(code=False).of(piece)[:32]


def same_code(one: str | None, other: str) -> bool:
    """Whether two values of `code_hash` are equal, or of different versions of Python."""
    tag = other.partition(":")[0]
    return one == other or (one is not None and one.partition(":")[0] != tag)


class _Hash:
    """One walk through an object and what it refers to."""

    def __init__(self, *, code: bool) -> None:
        self._code = code
        self._known: dict[int, tuple[str, Any]] = {}  # Objects stay alive, so that ids stay theirs.
        self._open: list[int] = []  # Those that contain the present one.

    def of(self, value: Any) -> str:
        """Digest of a value."""
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array(value)
        if isinstance(value, _SIMPLE):
            return _digest(type(value).__name__, repr(value))
        if id(value) in self._open:  # A cycle, such as that of a recursive function.
            return _digest("again", str(len(self._open) - self._open.index(id(value))))
        if id(value) not in self._known:
            self._open.append(id(value))
            digest = _digest(type(value).__name__, *self._parts(value))
            self._known[self._open.pop()] = digest, value
        return self._known[id(value)][0]

    def _array(self, value: Any) -> str:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        held = self.of(array.tolist()) if array.dtype.hasobject else array.tobytes()
        return _digest("array", str(array.dtype), str(array.shape), held)

    def _parts(self, value: Any) -> Iterable[str]:
        if isinstance(value, list | tuple):
            return map(self.of, value)
        if isinstance(value, set | frozenset):
            return sorted(map(self.of, value))
        if isinstance(value, Mapping):
            return sorted(self.of(key) + self.of(item) for key, item in value.items())
        if isinstance(value, functools.partial):
            return map(self.of, (value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return map(self.of, (value.__func__, value.__self__))
        if isinstance(value, types.ModuleType):
            return [value.__name__]
        plain = _plain(value)
        if isinstance(plain, types.FunctionType | type):
            return self._definition(plain)
        if name := getattr(plain, "__name__", None):  # A function that is not written in Python.
            return [name]
        return self._instance(value)

    def _definition(self, value: types.FunctionType | type) -> Iterable[str]:
        """Parts of a function or a class: of a library's, the name and what a function closes over.

        Without code, it is the name, too, and a library's changes with its version.
        """
        is_library = _is_of_library(value)
        if self._code and not is_library:
            return self._class(value) if isinstance(value, type) else self._function(value)
        cells = _cells(value) if self._code or not is_library else []
        return [value.__qualname__, *map(self.of, filter(_is_piece, cells))]

    def _function(self, function: types.FunctionType) -> list[str]:
        code, known = function.__code__, function.__globals__
        named = [name for name in _globals_of(code) if name in known]
        shared = {name: known[name] for name in named if _is_piece(known[name])}
        settings = (function.__defaults__, function.__kwdefaults__, _cells(function), shared)
        return [self._compiled(code), *map(self.of, settings)]

    def _compiled(self, code: types.CodeType) -> str:
        constants = (
            self._compiled(each) if isinstance(each, types.CodeType) else self.of(each)
            for each in code.co_consts
        )
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        table = getattr(code, "co_exceptiontable", b"")
        return _digest(code.co_code, table, str(code.co_flags), repr(names), *constants)

    def _class(self, kind: type) -> list[str]:
        generated = _GENERATED if dataclasses.is_dataclass(kind) else ()
        parts = [kind.__qualname__, *map(self.of, kind.__bases__)]
        for name, value in sorted(vars(kind).items()):
            for each in _functions(value):
                if name not in generated and not name.startswith("__annotate"):
                    parts += [name, self.of(each)]
            if not name.startswith("_") and name not in _FLAX and _is_piece(value):
                parts += [name, self.of(value)]
        return parts

    def _instance(self, value: Any) -> list[str]:
        kind = type(value)
        if dataclasses.is_dataclass(value):
            names = [each.name for each in dataclasses.fields(value) if each.name not in _FLAX]
            found = {name: getattr(value, name, None) for name in names}
        else:
            library = _is_of_library(kind)  # Its private attributes may hold anything.
            found = {
                name: each
                for name, each in getattr(value, "__dict__", {}).items()
                if not isinstance(getattr(kind, name, None), functools.cached_property)
                and (not library or (name[0] != "_" and _is_piece(each)))
            }
        text = "" if found else _ADDRESS.sub("", repr(value))
        return [self.of(kind), self.of(found), text]


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def _is_piece(value: Any) -> bool:
    """Whether a global value or one of a class is a setting or code, and not, say, a logger."""
    plain = (*_SIMPLE, list, tuple, dict, set, frozenset, np.ndarray, np.generic, jax.Array)
    code = (types.FunctionType, type, types.ModuleType, functools.partial)
    return (
        isinstance(value, (*plain, *code))
        or dataclasses.is_dataclass(value)
        or hasattr(value, "__wrapped__")
    )


def _functions(value: Any) -> list[types.FunctionType]:
    """The functions of an attribute of a class."""
    found = [getattr(value, name, None) for name in ("fget", "fset", "func", "__func__")]
    found = [each for each in (value, *found) if callable(each) and not isinstance(each, type)]
    return [each for each in map(_plain, found) if isinstance(each, types.FunctionType)]


def _plain(value: Any) -> Any:
    """A function without the decorators of libraries, such as `jax.jit` and those of Flax."""
    while callable(value) and hasattr(value, "__wrapped__"):
        if isinstance(value, types.FunctionType) and not _is_of_library(value):
            break  # A decorator of the user's, which refers to the function.
        value = value.__wrapped__
    return value


def _globals_of(code: types.CodeType) -> list[str]:
    """Names of the global values that a function or one inside it reads."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    own = (
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return sorted({*own, *(name for each in inner for name in _globals_of(each))})


def _cells(value: types.FunctionType | type) -> list[Any]:
    """What a function closes over; a variable that has no value yet is left out."""
    found = []
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _is_of_library(value: types.FunctionType | type) -> bool:
    shared = getattr(value, "__globals__", {})  # Decorators take the module of what they decorate.
    module = shared.get("__name__") or value.__module__ or ""
    top = module.partition(".")[0]
    if top in ("__main__", "hypjax") or top in sys.stdlib_module_names:
        return top != "__main__"  # Which is the user's, whatever runs it.
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(pathlib.Path(file).parts)
