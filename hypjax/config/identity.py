"""What a run is: everything in its configuration but `config.run`."""

import hashlib
import json
from typing import Any

from ml_collections import ConfigDict


def identity(config: ConfigDict) -> dict[str, Any]:
    """What a run is: all fields, by dotted name, but those of `config.run`."""
    fields = json.loads(json.dumps(flatten(config)))  # Tuples become lists, as in saved files.
    return {field: value for field, value in sorted(fields.items()) if not field.startswith("run.")}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Fields in which two identities differ, as 'field: old -> new'."""
    fields = sorted(old.keys() | new.keys())
    return [f"{f}: {old.get(f)} -> {new.get(f)}" for f in fields if old.get(f) != new.get(f)]


def default_workdir(config: ConfigDict, unchanged: ConfigDict) -> str:
    """Where a run goes without --workdir: runs/<config>-<variant>, and a hash of what was changed.

    Args:
        config: The run's configuration.
        unchanged: The same before fields were set on the command line. Those of `config.run` make
            no difference, nor does a value that the file has already.
    """
    changes = differences(identity(unchanged), identity(config))
    workdir = f"runs/{unchanged.name}-{unchanged.variant}"
    if changes:
        workdir += "-" + hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
    return workdir


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """All fields of a configuration, by dotted name."""
    fields = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            fields |= flatten(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields
