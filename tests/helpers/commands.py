"""hypjax's commands, run in this process."""

import importlib
import pathlib
from types import ModuleType

from hypjax import command
from hypjax.cli import COMMANDS

REPOSITORY = pathlib.Path(__file__).parents[2]


def call(name: str, *arguments: object) -> None:
    """Runs a command in this process, or raises its `UserError`."""
    main = module(name).main
    bound = command.parse(main, [name, *map(str, arguments)])
    main(*bound.args, **bound.kwargs)


def names() -> list[str]:
    """Modules that run as python -m hypjax.NAME."""
    return sorted(module.removeprefix("hypjax.") for module in COMMANDS.values())


def module(name: str) -> ModuleType:
    """The module of a command, or of the benchmarks or papers, which lie beside the package."""
    is_beside = name in ("benchmarks", "papers")
    return importlib.import_module(f"{name}.__main__" if is_beside else f"hypjax.{name}")
