"""Encoders, losses and spaces that a user passes from Python: their fields, names and hashes."""

import dataclasses
import functools
import hashlib
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from hypjax.config.choices import CUSTOM
from hypjax.config.defaults import choose_objective
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.registry import simple_spaces, space_name
from hypjax.models.custom import SIZES, known_fields, register_encoder
from hypjax.models.encoder import Encoder
from hypjax.models.vit import VisionTransformer
from hypjax.objectives.base import Objective
from hypjax.objectives.create import register_objective
from hypjax.system import console
from hypjax.system.cloud import is_url

_SIMPLE = (bool, int, float, str, type(None))
_FLAX = ("parent", "name")  # Fields of every Flax module.


def custom_name(piece: Any) -> str:
    """Name of a user-defined loss or encoder: its code's, and the fields that are not defaults."""
    return CUSTOM + (piece if isinstance(piece, str) else _title(piece))


def _title(piece: Any) -> str:
    if isinstance(piece, functools.partial):  # Fields of the configuration hold its settings.
        return _title(piece.func)
    name = getattr(piece, "__name__", None) or type(piece).__name__
    if not dataclasses.is_dataclass(piece) or isinstance(piece, type):
        return name
    changed = []
    for field in dataclasses.fields(piece):
        text = _text(getattr(piece, field.name, None))
        if field.name not in _FLAX and text != _text(field.default):
            changed.append(f"{field.name}={text}")
    return f"{name}({', '.join(changed)})" if changed else name


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value) if isinstance(value, _SIMPLE) else _title(value)


def choose_encoder(config: ConfigDict, encoder: nn.Module) -> None:
    """Makes a module the configuration's encoder, and registers it unless it is hypjax's."""
    name, known = custom_name(encoder), known_fields(encoder)
    if isinstance(encoder, Encoder):
        side = config.data.image_size
        if encoder.image_size != side:
            raise UserError(f"data.image_size is {side}; the encoder needs {encoder.image_size}")
        config.model.pooling = config.model.eval_pooling = encoder.pooling
    if known is None:
        register_encoder(name, encoder)
        known = {"architecture": name, **dict.fromkeys(SIZES, 0)}
        weights = config.model.weights
        if weights and not (is_url(weights) or pathlib.Path(weights).expanduser().exists()):
            console.say(f"the weights {weights} do not fit {name}, so it starts at random")
            known["weights"] = None
    config.model.update(known)
    if not isinstance(encoder, VisionTransformer):
        frozen = config.optim.frozen
        config.optim.frozen = tuple(name for name in frozen if name != "patch_projection")


def choose_custom_objective(config: ConfigDict, objective: Objective | Callable[..., Any]) -> None:
    """Registers the user's loss as the configuration's objective; an `Objective` sets the space."""
    name = custom_name(objective)
    register_objective(name, objective)
    choose_objective(config, name)
    if isinstance(objective, Objective):
        choose_space(config, objective.score_space)


def choose_space(config: ConfigDict, space: Space) -> None:
    """Makes a space the configuration's, if fields can describe it."""
    name = space_name(space)
    if name in simple_spaces():
        values = {field.name: getattr(space, field.name) for field in dataclasses.fields(space)}
        with config.ignore_type():
            config.objective.update({k: v for k, v in values.items() if k in config.objective})
            config.objective.space = name


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
        names = {field.name for field in fields} - {*_FLAX}
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
