"""User-defined encoders, losses and spaces: their names, fields and hashes in a configuration."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from hypjax.config.choices import CUSTOM
from hypjax.config.defaults import choose_objective
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.registry import simple_spaces, space_name
from hypjax.models.custom import CUSTOM_ENCODERS, SIZES, known_fields, register_encoder
from hypjax.models.encoder import Encoder
from hypjax.models.vit import VisionTransformer
from hypjax.objectives.base import Objective
from hypjax.objectives.create import OBJECTIVES, register_objective
from hypjax.system import console
from hypjax.system.cloud import is_url

_SIMPLE = (bool, int, float, str, type(None))
_FLAX_FIELDS = ("parent", "name")  # Fields of every Flax module.


def custom_name(code: Any) -> str:
    """Names a user-defined loss or encoder with its changed fields: 'own:MyLoss(margin=0.2)'."""
    return CUSTOM + (code if isinstance(code, str) else _title(code))


def _title(code: Any) -> str:
    if isinstance(code, functools.partial):  # Its arguments are fields of the configuration.
        return _title(code.func)
    name = getattr(code, "__name__", None) or type(code).__name__
    if not dataclasses.is_dataclass(code) or isinstance(code, type):
        return name
    changed = []
    for field in dataclasses.fields(code):
        text = _text(getattr(code, field.name, None))
        if field.name not in _FLAX_FIELDS and text != _text(field.default):
            changed.append(f"{field.name}={text}")
    return f"{name}({', '.join(changed)})" if changed else name


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value) if isinstance(value, _SIMPLE) else _title(value)


@contextlib.contextmanager
def registered(
    registry: dict[str, Any], register: Callable[[str, Any], None], name: str, code: Any
) -> Iterator[None]:
    """A context in which a registry knows a user's code, and after which it is as before."""
    earlier = registry.get(name)
    register(name, code)
    try:
        yield
    finally:
        del registry[name]
        if earlier is not None:
            registry[name] = earlier


@contextlib.contextmanager
def choosing(
    config: ConfigDict,
    *,
    encoder: nn.Module | None = None,
    objective: Objective | Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Chooses a user's code in a configuration, which is valid in this context.

    An `Objective` also chooses its space.
    """
    with contextlib.ExitStack() as stack:
        if objective is not None:
            name = custom_name(objective)
            stack.enter_context(registered(OBJECTIVES, register_objective, name, objective))
            choose_objective(config, name)
            if isinstance(objective, Objective):
                write_space(config, objective.score_space)
        if encoder is not None:
            own_name = _choose_encoder(config, encoder)
            if own_name is not None:
                stack.enter_context(registered_encoder(own_name, encoder))
        yield


def registered_encoder(name: str, encoder: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which a user's encoder has a name in configurations."""
    return registered(CUSTOM_ENCODERS, register_encoder, name, encoder)


def _choose_encoder(config: ConfigDict, encoder: nn.Module) -> str | None:
    """Writes an encoder's fields to the configuration; names one that hypjax cannot build."""
    name = custom_name(encoder)
    model_fields = known_fields(encoder)
    if isinstance(encoder, Encoder):
        side = config.data.image_size
        if encoder.image_size != side:
            raise UserError(f"data.image_size is {side}; the encoder needs {encoder.image_size}")
        config.model.pooling = config.model.eval_pooling = encoder.pooling
    is_own = model_fields is None  # hypjax cannot build it by name.
    if is_own:
        model_fields = {"architecture": name, **dict.fromkeys(SIZES, 0)}
        weights = config.model.weights
        if weights and not (is_url(weights) or pathlib.Path(weights).expanduser().exists()):
            console.say(f"the weights {weights} do not fit {name}, so it starts at random")
            model_fields["weights"] = None
    config.model.update(model_fields)
    if not isinstance(encoder, VisionTransformer):
        frozen = config.optim.frozen
        config.optim.frozen = tuple(name for name in frozen if name != "patch_projection")
    return name if is_own else None


def write_space(config: ConfigDict, space: Space) -> None:
    """Writes a space and its numbers to `config.objective`; ignores products and fused spaces."""
    name = space_name(space)
    if name not in simple_spaces():
        return
    with config.ignore_type():
        config.objective.space = name
        for field in dataclasses.fields(space):
            if field.name in config.objective:
                config.objective[field.name] = getattr(space, field.name)


def code_hash(code: Any) -> str:
    """Hashes the source of a function, or the source of an object's class and the object's fields.

    The hash does not cover helpers, globals and closures that the source refers to.
    """
    if isinstance(code, functools.partial):
        facts: tuple[Any, ...] = code_hash(code.func), code.args, sorted(code.keywords.items())
    elif inspect.isroutine(inspect.unwrap(code)) or isinstance(code, type):
        facts = (_source(code),)
    else:
        if dataclasses.is_dataclass(code) and (fields := dataclasses.fields(code)):
            names = {field.name for field in fields} - {*_FLAX_FIELDS}
            settings = {name: getattr(code, name) for name in names}
        else:
            settings = vars(code)  # A subclass of `Objective` need not be a dataclass.
        facts = _source(type(code)), sorted(settings.items())
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(facts))  # Addresses of objects differ between runs.
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
