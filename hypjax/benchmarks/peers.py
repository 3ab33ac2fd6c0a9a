"""Other libraries to compare with, if installed."""

import functools
import importlib
import sys
import types


@functools.cache
def installed(*names: str) -> bool:
    """Whether all of these modules can be imported."""
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError:
        return False
    return True


@functools.cache
def torchvision() -> types.ModuleType | None:
    """Returns torchvision, or only its Python part if its operators do not fit torch, or None."""
    for _ in range(2):
        try:
            import torchvision
            from torchvision import transforms  # noqa: F401

            return torchvision
        except ImportError:
            return None
        except RuntimeError:  # Its compiled operators belong to another build of torch.
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            registrations = "torchvision._meta_registrations"
            sys.modules[registrations] = types.ModuleType(registrations)
    return None


def timm() -> types.ModuleType | None:
    """Returns timm, or None if it or torchvision is missing."""
    if torchvision() is None or not installed("timm"):
        return None
    return importlib.import_module("timm")
