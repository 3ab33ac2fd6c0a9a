"""hypjax's commands, run in this process."""

import importlib
import pathlib
from types import ModuleType

from hypjax import command
from hypjax.cli import COMMANDS

REPOSITORY = pathlib.Path(__file__).parents[2]


def call(name: str, *arguments: object) -> None:
    """Runs a command in this process, without absl around it, or raises its `UserError`."""
    main = module(name).main
    bound = command.parse(main, [name, *map(str, arguments)])
    main(*bound.args, **bound.kwargs)


def names() -> list[str]:
    """Modules that run as python -m hypjax.NAME."""
    return sorted(module.removeprefix("hypjax.") for module in COMMANDS.values())


def module(name: str) -> ModuleType:
    """The module of a command, or of the benchmarks, which a clone has beside the package."""
    is_suite = name == "benchmarks"
    return importlib.import_module("benchmarks.__main__" if is_suite else f"hypjax.{name}")
