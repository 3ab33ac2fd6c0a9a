"""Cores, memory and devices of this machine, and the provenance of results."""

import contextlib
import ctypes
import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hypjax
from hypjax.errors import UserError, redacted

if TYPE_CHECKING:  # Commands that need no JAX start in less than half a second without it.
    from jax.sharding import Mesh

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")
# XLA's messages when memory is exhausted; the second is its CPU library's.
_FULL = ("RESOURCE_EXHAUSTED", "YNNPACK operation failed")
# glibc's parameters of mallopt: what to return, what to map, and the number of heaps.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu")  # By which JAX finds them:
_ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/accel0", "/dev/vfio/0")


def has_accelerator() -> bool:
    """Whether JAX will compute on a GPU or a TPU; a process may join others afterwards."""
    platforms = (os.environ.get(name, "") for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or any(names.startswith("cpu") for names in platforms):
        return False
    plugins = map(importlib.util.find_spec, _PLUGINS)
    return any(plugins) and any(map(os.path.exists, _ACCELERATORS))


def keep_freed_memory() -> None:
    """Keeps freed memory for later arrays, with glibc on CPUs; call it before threads start.

    Otherwise each train step on a CPU asks for all pages again, which takes 15% of its time.
    """
    # Beside accelerators, the host's threads decode in separate heaps.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(map(os.path.exists, _ACCELERATORS)):
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
            mallopt(parameter, value)


def usable_cores() -> int:
    """Returns the number of cores; on Linux only those in the process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def memory_explained(remedy: str) -> Iterator[None]:
    """Turns a device's out-of-memory error into a `UserError`; the remedy is what to lower."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(message in str(error) for message in _FULL):
            raise
        device = jax.local_devices()[0].device_kind
        raise UserError(f"out of memory on {device}; lower {remedy}") from error


def free_memory(mesh: "Mesh") -> int | None:
    """Free bytes of each of this process's devices, None if unknown; CPUs share the machine's."""
    of_devices = [device.memory_stats() or {} for device in mesh.local_devices]
    if all("bytes_limit" in stats for stats in of_devices):
        return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in of_devices)
    free = free_host_memory()
    return None if free is None else free // len(of_devices)


def free_host_memory() -> int | None:
    """Free bytes of this machine, None if unknown."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # Returns freed memory to the system.
    path = pathlib.Path("/proc/meminfo")
    available = path.exists() and re.search(r"MemAvailable: *(\d+) kB", path.read_text())
    return 1024 * int(available[1]) if available else None


def memory_peaks() -> dict[str, int]:
    """Returns the peak memory of this process and its first device, in bytes, where known."""
    import jax

    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host_memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    device = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device:
        peak["device_memory_peak"] = device["peak_bytes_in_use"]
    return peak


def describe(seed: int) -> dict[str, Any]:
    """Describes this process with its seed, its machine and its packages, as JSON."""
    import jax

    devices, versions = jax.devices(), {"hypjax": hypjax.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # As of pillow-simd.
            versions[name] = importlib.metadata.version(name)
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(redacted, sys.orig_argv)),
        "seed": seed,
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": platform.platform(),
        "host": platform.node(),
    }


def _commit() -> str | None:
    """Commit of this package's source, with '-dirty' if files were changed."""
    root = pathlib.Path(hypjax.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # Installed: a repository around it would belong to another project.
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    return None
