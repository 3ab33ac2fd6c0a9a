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
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hypjax
from hypjax.errors import UserError, is_out_of_memory, redacted

if TYPE_CHECKING:  # Commands that need no JAX start in less than half a second without it.
    from jax.sharding import Mesh

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # Parameters of glibc's mallopt.
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu")  # JAX's modules for accelerators.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/accel0", "/dev/vfio/0")  # Of GPUs and TPUs.


def has_accelerator() -> bool:
    """Whether JAX will compute on a GPU or a TPU; does not initialise JAX."""
    platforms = (os.environ.get(name, "") for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"))
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or any(names.startswith("cpu") for names in platforms):
        return False
    plugins = map(importlib.util.find_spec, _PLUGINS)
    return any(plugins) and any(map(os.path.exists, _DEVICE_FILES))


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for later arrays on CPUs; call this before threads start.

    Otherwise each train step on a CPU requests all pages again, which takes 15% of its time. On
    hosts of accelerators, decoding threads need separate heaps.
    """
    mallopt = os.name != "nt" and getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not any(map(os.path.exists, _DEVICE_FILES)):
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def memory_explained(remedy: str) -> Iterator[None]:
    """Turns an out-of-memory error into a `UserError`; `remedy` names what to lower."""
    import jax

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        on_host = isinstance(error, MemoryError)
        place = "this machine" if on_host else jax.local_devices()[0].device_kind
        raise UserError(f"out of memory on {place}; lower {remedy}") from error


def free_memory(mesh: "Mesh") -> int | None:
    """Returns the free bytes of the fullest local device; CPU devices share the host's memory."""
    device_stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if all("bytes_limit" in stats for stats in device_stats):
        return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in device_stats)
    free = free_host_memory()
    return None if free is None else free // len(device_stats)


def free_host_memory() -> int | None:
    """Returns the free memory of this machine in bytes; None if unknown."""
    path = pathlib.Path("/proc/meminfo")
    if not path.exists():
        return None
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)  # Returns freed memory to the system.
    available = re.search(r"MemAvailable: *(\d+) kB", path.read_text())
    return 1024 * int(available[1]) if available else None


def memory_peaks() -> dict[str, int]:
    """Returns the peak memory of this process and its first device in bytes, where known."""
    import jax

    peaks = {}
    with contextlib.suppress(ImportError):  # Windows.
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # Of ru_maxrss, in bytes.
        peaks["host_memory_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    device_stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device_stats:
        peaks["device_memory_peak"] = device_stats["peak_bytes_in_use"]
    return peaks


def describe(seed: int) -> dict[str, Any]:
    """Describes the provenance of results: command, seed, packages, commit and devices."""
    import jax

    versions = {"python": platform.python_version(), "hypjax": hypjax.__version__}
    for name in _PACKAGES:
        # A package may be installed under another name, such as pillow-simd.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(redacted, sys.orig_argv)),
        "seed": seed,
        "versions": versions,
        "commit": _commit(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "platform": platform.platform(),
        "host": platform.node(),
    }


def _commit() -> str | None:
    """Returns the commit of hypjax's clone, with '-dirty' after changes; None if installed."""
    root = pathlib.Path(hypjax.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # Without this check, git would find a repository around the installation.
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    return None
