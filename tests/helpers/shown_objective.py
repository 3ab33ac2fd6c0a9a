"""What docs/extending.md shows; its objective is installed as the page says."""

import sys
import types

import hypjax.objectives
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.base import Declaration
from tests.helpers import manual

NAME = "proxy_softmax"
_MODULE = f"hypjax.objectives.{NAME}"


def blocks(section="A loss"):
    """Returns the Python of a section of the page: of a loss, the objective, entry and test."""
    return manual.programs("extending.md", section)


def install(patch):
    """Adds the objective to the package by a pytest.MonkeyPatch, and returns its module."""
    objective, entry, _ = blocks()
    module = types.ModuleType(_MODULE)
    patch.setitem(sys.modules, _MODULE, module)
    patch.setattr(hypjax.objectives, NAME, module, raising=False)
    exec(compile(objective, f"docs/extending.md:{NAME}", "exec"), vars(module))
    shown = eval("{" + entry + "}", {"Declaration": Declaration, NAME: module})
    patch.setitem(OBJECTIVES, NAME, shown[NAME])
    return module
