"""Configurations: fields, defaults, validation, files, and the identity of a run."""

from hypjax.config.defaults import choose_objective, default_config
from hypjax.config.identity import (
    default_workdir,
    differences,
    flatten,
    for_files,
    identity,
    upgraded,
    without_secrets,
)
from hypjax.config.reading import load_config, override, read_config, show_origins
from hypjax.config.recipes import variant_error
from hypjax.config.rules import FITTED, validate

__all__ = [
    "FITTED",
    "choose_objective",
    "default_config",
    "default_workdir",
    "differences",
    "flatten",
    "for_files",
    "identity",
    "load_config",
    "override",
    "read_config",
    "show_origins",
    "upgraded",
    "validate",
    "variant_error",
    "without_secrets",
]
