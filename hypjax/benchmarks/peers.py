"""Packages to compare with, where they are installed."""

import functools
import importlib
import sys
import types


@functools.cache
def installed(*names: str) -> bool:
    """Whether all of these can be imported."""
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError:
        return False
    return True


@functools.cache
def torchvision() -> types.ModuleType | None:
    """torchvision, if it is installed; of a build without compiled operators, its Python part."""
    for _ in range(2):
        try:
            import torchvision
            from torchvision import transforms  # noqa: F401

            return torchvision
        except ImportError:
            return None
        except RuntimeError:  # Its operators are of another build than torch.
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            registrations = "torchvision._meta_registrations"
            sys.modules[registrations] = types.ModuleType(registrations)
    return None


def timm() -> types.ModuleType | None:
    """timm, if it and what it needs are installed."""
    if torchvision() is None or not installed("timm"):
        return None
    return importlib.import_module("timm")
