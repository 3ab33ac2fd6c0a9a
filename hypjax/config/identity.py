"""The identity of a run: every field of its configuration except `config.run`."""

import hashlib
import json
from typing import Any

from ml_collections import ConfigDict


def identity(config: ConfigDict) -> dict[str, Any]:
    """Returns all fields by dotted name, except those of `config.run`."""
    fields = json.loads(json.dumps(flatten(config)))  # Tuples become lists, as in saved files.
    return {field: value for field, value in sorted(fields.items()) if not field.startswith("run.")}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lists the fields in which two identities differ, as 'field: old -> new'."""
    fields = sorted(old.keys() | new.keys())
    return [f"{f}: {old.get(f)} -> {new.get(f)}" for f in fields if old.get(f) != new.get(f)]


def default_workdir(config: ConfigDict, unchanged: ConfigDict) -> str:
    """Returns the folder of a run without --workdir: runs/<config>-<variant>, and maybe a hash.

    The hash stands for the fields that the command line changed. Fields of `config.run` do not
    count, nor do values that equal the file's.

    Args:
        config: The run's configuration.
        unchanged: The configuration before fields were set on the command line.
    """
    changes = differences(identity(unchanged), identity(config))
    workdir = f"runs/{unchanged.name}-{unchanged.variant}"
    if changes:
        workdir += "-" + hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
    return workdir


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Returns all fields of a configuration by dotted name."""
    fields = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            fields |= flatten(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields
