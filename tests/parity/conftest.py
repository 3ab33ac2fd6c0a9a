"""Peers are optional: a test whose peer is absent is skipped with the reason."""

import sys
import types


def pytest_configure(config):
    """Lets a CPU build of torch import timm.

    timm imports torchvision, whose compiled operators do not load against such a build; without
    this module, which registers them, its pure-Python part imports.
    """
    del config
    sys.modules.setdefault(
        "torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations")
    )
