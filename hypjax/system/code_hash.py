"""Hash of the source of the user's loss or encoder."""

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any


def code_hash(piece: Any) -> str:
    """Hash of the source of a function, or of an object's class, and of its settings.

    Helpers, globals and closures that the source refers to do not count.
    """
    if isinstance(piece, functools.partial):
        facts = code_hash(piece.func), piece.args, sorted(piece.keywords.items())
    elif inspect.isroutine(inspect.unwrap(piece)) or isinstance(piece, type):
        facts = (_source(piece),)
    else:
        fields = dataclasses.fields(piece) if dataclasses.is_dataclass(piece) else ()
        names = {field.name for field in fields} - {"parent", "name"}  # Flax's own.
        settings = {name: getattr(piece, name) for name in names} if fields else vars(piece)
        facts = _source(type(piece)), sorted(settings.items())
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(facts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _source(definition: Callable[..., Any] | type) -> str:
    definition = inspect.unwrap(definition)
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):
        if not isinstance(definition, type):
            return definition.__qualname__
    # In a notebook, Python finds the source of a class's methods, but not of the class.
    methods = [value for value in vars(definition).values() if inspect.isroutine(value)]
    return "".join([definition.__qualname__, *map(_source, methods)])
