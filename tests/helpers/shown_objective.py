"""What docs/extending.md shows; its objective is installed as the page says."""

import sys
import types

import hypjax.objectives
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.base import Declaration
from tests.helpers import manual

NAME = "proxy_softmax"


def blocks(section="A loss"):
    """Returns the Python of a section of the page: of a loss, the objective, entry and test."""
    return manual.programs("extending.md", section)


def install(patch, section="A loss", name=NAME):
    """Adds the objective to the package by a pytest.MonkeyPatch, and returns its module."""
    objective, entry, *_ = blocks(section)
    module = types.ModuleType(path := f"hypjax.objectives.{name}")
    patch.setitem(sys.modules, path, module)
    patch.setattr(hypjax.objectives, name, module, raising=False)
    exec(compile(objective, f"docs/extending.md:{name}", "exec"), vars(module))
    shown = eval("{" + entry + "}", {"Declaration": Declaration, name: module})
    patch.setitem(OBJECTIVES, name, shown[name])
    return module
