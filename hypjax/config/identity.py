"""The identity of a run: every field of its configuration except `config.run`."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from hypjax.errors import redacted

_MAX_LENGTH = 60  # Characters of the listed changes in a folder's name.
_PLAIN = re.compile(r"[\w.,-]+", re.ASCII)  # Values that a folder's name may hold.


def identity(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all fields of `flatten` except `config.run`, with values as in `for_files`."""
    values = for_files(fields)
    return {field: value for field, value in sorted(values.items()) if not field.startswith("run.")}


def for_files(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of `flatten` with secrets in URLs masked, and lists for tuples."""
    values = json.loads(json.dumps(dict(fields)))
    return {name: redacted(x) if isinstance(x, str) else x for name, x in values.items()}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lists the fields in which two identities differ, as 'field: old -> new'."""
    changed = [f for f in sorted(old.keys() | new.keys()) if old.get(f) != new.get(f)]
    return [f"{field}: {old.get(field)} -> {new.get(field)}" for field in changed]


def default_workdir(config: ConfigDict, unchanged: ConfigDict) -> str:
    """Returns a run's default folder: runs/<config>-<variant>, and the fields that changed.

    Changes are listed, as in 'runs/glyphs-hyp-c=0.3+seed=1', or hashed if the list is long or no
    valid name. Fields of `config.run` do not count.
    """
    old, new = identity(flatten(unchanged)), identity(flatten(config))
    workdir = f"runs/{unchanged.name}-{unchanged.variant}"
    changes = differences(old, new)
    if not changes:
        return workdir
    last_names = [field.rpartition(".")[2] for field in new]
    values = {}
    for (field, value), last_name in zip(new.items(), last_names, strict=True):
        if old.get(field) != value:
            name = last_name if last_names.count(last_name) == 1 else field
            values[name] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    suffix = "+".join(f"{name}={value}" for name, value in values.items())
    if len(suffix) > _MAX_LENGTH or not all(map(_PLAIN.fullmatch, values.values())):
        suffix = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
    return f"{workdir}-{suffix}"


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Returns all fields of a configuration by dotted name."""
    return flatten_dict(config.to_dict(), sep=".")
