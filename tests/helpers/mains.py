"""Commands, in this process."""

import importlib

from hypjax.command import parse


def execute(name, *arguments):
    """Calls the main function of hypjax.NAME; flags that are not given have their defaults."""
    module = importlib.import_module(f"hypjax.{name}")
    for flag in module.FLAGS:
        module.FLAGS[flag].unparse()
    module.main(*parse([name, *arguments], module.FLAGS, getattr(module, "CHOICES", ())))
