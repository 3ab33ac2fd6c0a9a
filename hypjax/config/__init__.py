"""Configurations: fields, defaults, validation, files, and the identity of a run."""

from hypjax.config.defaults import Config as Config
from hypjax.config.defaults import choose_objective as choose_objective
from hypjax.config.defaults import default_config as default_config
from hypjax.config.identity import default_workdir as default_workdir
from hypjax.config.identity import differences as differences
from hypjax.config.identity import flatten as flatten
from hypjax.config.identity import for_files as for_files
from hypjax.config.identity import identity as identity
from hypjax.config.reading import config_of as config_of
from hypjax.config.reading import load_config as load_config
from hypjax.config.reading import override as override
from hypjax.config.reading import own_copy as own_copy
from hypjax.config.reading import read_config as read_config
from hypjax.config.reading import set_fields as set_fields
from hypjax.config.reading import show_origins as show_origins
from hypjax.config.reading import with_smaller_batches as with_smaller_batches
from hypjax.config.rules import FITTED as FITTED
from hypjax.config.rules import validate as validate
from hypjax.config.variants import variant_error as variant_error
