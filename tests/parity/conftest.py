"""Comparisons with other libraries, which are optional: tests without theirs are skipped."""

import sys
import types


def pytest_configure(config):
    """Lets a CPU build of torch import timm.

    timm imports torchvision, whose compiled operators do not load with such a build. Without the
    module that registers these operators, the pure-Python part of torchvision can be imported.
    """
    del config
    sys.modules.setdefault(
        "torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations")
    )
