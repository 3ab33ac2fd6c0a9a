"""The program `hypjax`: `hypjax train` runs hypjax.main, `hypjax embed` hypjax.embed, and so on.

It imports nothing heavy before a command's flags are parsed, so that --help answers at once.
"""

import importlib
import runpy
import sys

from hypjax import __version__
from hypjax.errors import UserError, nearest, reported

_NAMES = (
    *("embed", "search", "serve", "score", "compare", "tune", "plot", "report"),
    *("zero_shot", "captions", "walk"),
    *("hyperbolicity", "hierarchy", "spectrum", "negatives", "prepare", "export", "convert"),
)
# Modules by command, in the order of `hypjax --help`. A new command adds its name above.
COMMANDS = {"train": "hypjax.main", **{name: f"hypjax.{name}" for name in _NAMES}}


def main() -> None:
    """Runs the command that the first argument names, with the remaining arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
        return
    with reported():
        if name == "--version":
            print(f"hypjax {__version__}")
        elif name not in ("--help", "-h", "help"):
            raise UserError(f"hypjax has no command {name!r}{nearest(name, COMMANDS)}")
        else:
            print("Image retrieval with hyperbolic embeddings.\n")
            print("usage: hypjax COMMAND [--FLAG ...]\n")
            for command, module in COMMANDS.items():
                summary = str(importlib.import_module(module).__doc__).splitlines()[0]
                print(f"  {command:<14}{summary}")
            print("\nhypjax COMMAND --help lists the flags of a command.")
