"""Loads configuration files, and sets fields of them from the command line."""

import ast
import importlib.util
import pathlib
import traceback
import types
from collections.abc import Collection, Sequence
from typing import Any

from ml_collections import ConfigDict

from hypjax.config.identity import flatten
from hypjax.config.rules import field_type, refuse, validate
from hypjax.errors import UserError, nearest


def load_config(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Loads a configuration, sets fields of it and validates the result.

    Args:
        spec: 'configs/glyphs.py', or 'configs/glyphs.py:sph' for the variant that the file's
            `get_config` takes as argument.
        overrides: Such as 'train.total_steps=100'; a list is written '1,10' or '(1, 10)'.

    Raises:
        UserError: The file or the variant does not exist, or a field is unknown or impossible.
    """
    config = read_config(spec)
    for override in overrides:
        _set(config, override)
    validate(config)
    return config


def read_config(spec: str) -> ConfigDict:
    """Loads a configuration as its file has it, which may leave fields to the command line.

    Raises:
        UserError: The file or the variant does not exist.
    """
    path, _, variant = spec.partition(":")
    config = _call(_module(pathlib.Path(path)), path, variant)
    config.name = pathlib.Path(path).stem
    return config


def _module(path: pathlib.Path) -> types.ModuleType:
    if not path.is_file():
        beside = {str(p) for p in path.parent.glob("*.py")}
        raise UserError(
            f"no configuration file {path}" + (nearest(str(path), beside) if beside else "")
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise UserError(f"{path} is no Python file; try --config=configs/glyphs.py")
    module = importlib.util.module_from_spec(spec)
    _attempt(spec.loader.exec_module, path, module)
    return module


def _call(module: types.ModuleType, path: str, variant: str) -> ConfigDict:
    if not hasattr(module, "get_config"):
        raise UserError(f"{path} defines no get_config()")
    return _attempt(module.get_config, path, *([variant] if variant else []))


def _attempt(function: Any, path: str | pathlib.Path, *args: Any) -> Any:
    """Calls into the user's file; what goes wrong there is told with the line."""
    try:
        return function(*args)
    except UserError:
        raise
    except Exception as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)
        ]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        what = str(error).replace("\n", " ")
        raise UserError(f"{where}: {type(error).__name__}: {what}") from error


def _set(config: ConfigDict, override: str) -> None:
    field, equals, text = override.partition("=")
    known = flatten(config)
    inside = [name for name in known if name.startswith(field + ".")]
    if inside:
        raise UserError(f"config.{field} is a group of fields, such as config.{inside[0]}")
    if field not in known:
        raise UserError(f"unknown field config.{field}{nearest(field, known)}")
    if not equals:
        raise UserError(f"config.{field} needs a value: --config.{field}=VALUE")
    value = _parse(text, known[field])
    rule = field_type(field)
    if not rule.holds(value):
        refuse(field, text, rule.words)
    if isinstance(known[field], float) and value is not None:
        value = float(value)
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})


def _parse(text: str, present: Any) -> Any:
    """Reads a literal, or leaves the text as it is; whole floats serve as integers."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = tuple(text.split(",")) if isinstance(present, tuple) else text
    if isinstance(present, tuple) and not isinstance(value, tuple):
        value = tuple(value) if isinstance(value, list) else (value,)
    if isinstance(present, str) and value is not None:
        value = text
    if isinstance(present, int) and isinstance(value, float) and value.is_integer():
        value = int(value)
    return value


def variant_error(variant: str, valid: Collection[str]) -> UserError:
    """What a configuration file raises for a variant it does not have."""
    return UserError(f"unknown variant {variant!r}{nearest(variant, valid)}")
