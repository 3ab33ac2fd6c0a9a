"""Reads configurations from files and saved fields, and lists where values come from."""

import ast
import contextlib
import pathlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hypjax.config.defaults import choose_objective, default_config, fields_of
from hypjax.config.identity import flatten
from hypjax.config.rules import refuse, refuse_objective, validate
from hypjax.errors import UserError, nearest, similar
from hypjax.fields import Field
from hypjax.objectives import OBJECTIVES

_CONFIGS = pathlib.Path("configs")
PACKAGED = pathlib.Path(__file__).parents[1] / "configs"  # The same files, as installed.
# Last parts of names that other libraries give to a field.
_OTHER_NAMES = {
    "backbone": "model.architecture",
    "curvature": "objective.c",
    "dir": "run.data_dir",
    "embedding_dim": "model.head_dim",
    "epochs": "train.total_steps (steps, not epochs)",
    "img_size": "data.image_size",
    "lr": "optim.learning_rate",
    "num_workers": "run.workers",
    "pretrained": "model.weights",
    "root": "data.path",
    "tau": "objective.temperature",
    "wd": "optim.weight_decay",
}
_NO_KEY = re.compile(r"""["']Key ["'](\w+)["'] does not exist""")  # ml_collections' message.


def load_config(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Loads a configuration file, applies overrides and validates the result.

    `spec` is a path such as 'configs/glyphs.py' or a name such as 'glyphs'. After a colon, it may
    name a variant, the argument of `get_config`, as in 'glyphs:sph'. Overrides are strings such as
    'train.total_steps=100'; lists are written '1,10' or '(1, 10)'.
    """
    config = override(read_config(spec), overrides)
    validate(config)
    return config


def override(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Applies overrides as in `load_config`, without validation; returns the configuration."""
    # The objective comes first, because it decides which fields exist.
    for assignment in sorted(overrides, key=lambda text: not text.startswith("objective.name=")):
        _apply(config, assignment)
    return config


def read_config(spec: str) -> ConfigDict:
    """Loads a configuration file without validation: overrides may still add required fields."""
    location, _, variant = spec.partition(":")
    path = pathlib.Path(location)
    if not path.is_file() and path.parent in (pathlib.Path("."), _CONFIGS):
        name = path.name.removesuffix(".py") + ".py"
        path = next((f / name for f in (_CONFIGS, PACKAGED) if (f / name).is_file()), path)
    if not path.is_file():
        names = {file.stem for folder in (_CONFIGS, PACKAGED) for file in folder.glob("*.py")}
        raise UserError(f"no configuration file {path}; hypjax has {', '.join(sorted(names))}")
    module: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    with _errors_located(path):
        exec(compile(path.read_bytes(), path, "exec"), module)
        if "get_config" not in module:
            raise UserError(f"{path} defines no get_config()")
        config = module["get_config"](variant) if variant else module["get_config"]()
    if not isinstance(config, ConfigDict):
        raise UserError(f"get_config of {path} returned {config!r:.40}, not a ConfigDict")
    config.name = path.stem
    return config


def own_copy(config: ConfigDict | str) -> ConfigDict:
    """A configuration that its owner may change: a copy, or as `read_config` reads it."""
    read = read_config(config) if isinstance(config, str) else config
    return read.copy_and_resolve_references()


@contextlib.contextmanager
def _errors_located(path: pathlib.Path) -> Iterator[None]:
    """Turns any error in the user's file into a `UserError` with the file's line number."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {f.lineno}" for f in frames if f.filename == str(path)]
        where = f"{path}{''.join(lines[-1:])}"
        if isinstance(error, AttributeError) and (key := _NO_KEY.search(str(error))):
            names = {name.rpartition(".")[2] for name in flatten(default_config())}
            meant = _OTHER_NAMES.get(key[1])
            hint = f"; did you mean {meant}?" if meant else nearest(key[1], names)
            raise UserError(f"{where}: unknown field {key[1]}{hint}") from error
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error


def _apply(config: ConfigDict, assignment: str) -> None:
    """Sets a field as 'field=value' says; refuses an unknown field and an invalid value."""
    field, equals, text = assignment.partition("=")
    values = flatten(config)
    for member in values:
        if member.startswith(f"{field}."):
            raise UserError(f"config.{field} is a group of fields, such as config.{member}")
    if field not in values:
        raise UserError(f"unknown field config.{field}{_hint(field, values, config)}")
    if not equals:
        raise UserError(f"config.{field} needs a value: --config.{field}=VALUE")
    value = _parse(text, values[field])
    if field == "optim.groups" and value and not isinstance(value[0], tuple):
        value = (value,)  # One group, without the outer brackets.
    # A user-defined loss's fields are undeclared if this process lacks its code.
    declaration = fields_of(config.objective.name).get(field, Field(values[field]))
    if rule := declaration.requirement(value):
        refuse(field, text, rule)
    if field == "objective.name":
        if value not in OBJECTIVES:
            refuse_objective(value)
        choose_objective(config, value)
        return
    if isinstance(values[field], float) and value is not None:
        value = float(value)
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})


def _hint(field: str, values: Mapping[str, Any], config: ConfigDict) -> str:
    """Says which field may be meant by the name of an unknown one."""
    name = field.rpartition(".")[2]
    if _OTHER_NAMES.get(name, "").partition(" ")[0] in values:
        return f"; did you mean {_OTHER_NAMES[name]}?"
    if not field.startswith("objective."):
        elsewhere = [value for value in values if value.rpartition(".")[2] == name]
        return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(field, values)
    if hint := similar(name, config.objective):
        return hint
    losses = [loss for loss in OBJECTIVES if field in flatten(default_config(loss))]
    owners = f", a field of {', '.join(losses)}" if losses else ""
    return f"{owners}; the fields of {config.objective.name} are {', '.join(config.objective)}"


def _parse(text: str, current: Any) -> Any:
    """Parses a command-line value to the field's current type."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = tuple(text.split(",")) if isinstance(current, tuple) else text
    if isinstance(current, tuple) and not isinstance(value, tuple):
        value = tuple(value) if isinstance(value, list) else (value,)
    if isinstance(current, str) and value is not None:
        value = text
    if isinstance(current, int) and isinstance(value, float) and value.is_integer():
        value = int(value)
    return value


def show_origins(
    config: ConfigDict, source: str, source_config: ConfigDict, overrides: Sequence[str]
) -> str:
    """Lists all fields with their values and origins: the command line, the source, or a default.

    `source` is a configuration file with its variant, or a run's folder; `source_config` is the
    configuration that was read from the source.
    """
    overridden = {override.partition("=")[0] for override in overrides}
    defaults = flatten(default_config(config.objective.name))
    source_fields, fields = flatten(source_config), flatten(config)
    lines, width = [], len("config.") + max(map(len, fields))
    for field, value in fields.items():
        if field in overridden:
            origin = "command line"
        elif value == defaults.get(field):
            origin = ""
        else:
            origin = source if source_fields.get(field) == value else "follows another field"
        lines.append(f"{f'config.{field}':<{width}}  {value!r:<44}  {origin}".rstrip())
    return "\n".join(lines)


def config_of(fields: Mapping[str, Any]) -> ConfigDict:
    """Returns a configuration with saved fields, unvalidated; missing ones have their defaults."""
    config = default_config(fields["objective.name"])
    is_known = fields["objective.name"] in OBJECTIVES  # Custom losses have further fields.
    with contextlib.nullcontext() if is_known else config.unlocked():
        set_fields(config, fields)
    return config


def set_fields(config: ConfigDict, fields: Mapping[str, Any]) -> None:
    """Sets fields of a configuration to saved JSON values, by dotted name."""
    with config.ignore_type():
        config.update_from_flattened_dict({name: _with_tuples(fields[name]) for name in fields})


def _with_tuples(value: Any) -> Any:
    """Converts lists, which JSON has instead of tuples, to tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def with_smaller_batches(config: ConfigDict) -> ConfigDict:
    """Returns a configuration whose evaluation embeds fewer images at once if they are large."""
    default, fields = default_config(), config.copy_and_resolve_references()
    scale = min(1, default.data.image_size / fields.data.image_size)
    fields.run.eval_batch_size = max(1, int(default.run.eval_batch_size * scale**2))
    return fields
