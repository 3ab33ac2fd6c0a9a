"""Configurations from the fields that a run saved."""

import contextlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hypjax.config.defaults import default_config
from hypjax.objectives import OBJECTIVES


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
