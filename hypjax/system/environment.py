"""Provenance of a result: versions, device, commit, command."""

import datetime
import importlib.metadata
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

import hypjax
from hypjax.errors import redacted

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")


def describe(seed: int) -> dict[str, Any]:
    """Describes this process, its machine and its packages, as JSON.

    Args:
        seed: Seed of the run, which is included.
    """
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(redacted, sys.orig_argv)),
        "seed": seed,
        "versions": {
            "hypjax": hypjax.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "commit": _commit(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": platform.platform(),
        "host": platform.node(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of this package's source, with '-dirty' if files were changed."""
    root = pathlib.Path(hypjax.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # Installed: a repository around it would belong to another project.
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
