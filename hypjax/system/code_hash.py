"""Hash of the source of what the user gave: a loss, or an encoder."""

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FLAX = ("parent", "name")  # Fields of every Flax module.


def code_hash(piece: Any) -> str:
    """Hash of the source of a function, or of an object's class, and of its settings.

    What the source refers to does not count: helpers, global values and closures.
    """
    if isinstance(piece, functools.partial):
        facts = code_hash(piece.func), piece.args, sorted(piece.keywords.items())
    elif inspect.isroutine(inspect.unwrap(piece)) or isinstance(piece, type):
        facts = (_source(piece),)
    elif dataclasses.is_dataclass(piece):
        fields = {field.name: getattr(piece, field.name) for field in dataclasses.fields(piece)}
        facts = _source(type(piece)), [x for x in fields.items() if x[0] not in _FLAX]
    else:
        facts = _source(type(piece)), sorted(getattr(piece, "__dict__", {}).items())
    return hashlib.sha256(_ADDRESS.sub("", repr(facts)).encode()).hexdigest()[:32]


def _source(definition: Callable[..., Any] | type) -> str:
    """The text of a function or a class, or else its name."""
    definition = inspect.unwrap(definition)
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):
        if not isinstance(definition, type):
            return definition.__qualname__
    # Python finds the methods of a notebook's class, but not the class.
    methods = [value for value in vars(definition).values() if inspect.isroutine(value)]
    return "".join([definition.__qualname__, *map(_source, methods)])
