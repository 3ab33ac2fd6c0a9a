"""The identity of a run: every field of its configuration except `config.run`."""

import hashlib
import json
import re
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from hypjax.errors import redacted

_LONGEST = 60  # Characters of the changes in a folder's name.
_PLAIN = re.compile(r"[\w.,-]+", re.ASCII)  # Values that a folder's name may hold.


def identity(config: ConfigDict) -> dict[str, Any]:
    """Returns all fields but `config.run` by dotted name, as `for_files`."""
    fields = for_files(config)
    return {field: value for field, value in sorted(fields.items()) if not field.startswith("run.")}


def for_files(config: ConfigDict) -> dict[str, Any]:
    """Returns all fields by dotted name, without the secrets of URLs; tuples become lists."""
    fields = json.loads(json.dumps(flatten(config)))
    return {name: redacted(x) if isinstance(x, str) else x for name, x in fields.items()}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lists the fields in which two identities differ, as 'field: old -> new'."""
    fields = sorted(old.keys() | new.keys())
    return [f"{f}: {old.get(f)} -> {new.get(f)}" for f in fields if old.get(f) != new.get(f)]


def default_workdir(config: ConfigDict, unchanged: ConfigDict) -> str:
    """Returns the folder of a run without --workdir: runs/<config>-<variant>, and its changes.

    Changes are listed as in 'runs/glyphs-hyp-c=0.3+seed=1', or hashed if the list is long, or no
    file name. Fields of `config.run` do not count.
    """
    old, new = identity(unchanged), identity(config)
    workdir = f"runs/{unchanged.name}-{unchanged.variant}"
    changes = differences(old, new)
    if not changes:
        return workdir
    last_parts, values = [field.rpartition(".")[2] for field in new], {}
    for (field, value), last in zip(new.items(), last_parts, strict=True):
        if old.get(field) != value:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            values[last if last_parts.count(last) == 1 else field] = text
    listed = "+".join(f"{name}={value}" for name, value in values.items())
    if len(listed) > _LONGEST or not all(map(_PLAIN.fullmatch, values.values())):
        listed = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
    return f"{workdir}-{listed}"


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Returns all fields of a configuration by dotted name."""
    return flatten_dict(config.to_dict(), sep=".")
