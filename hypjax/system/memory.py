"""Memory: how much is free, how much was used, and an error message when it runs out."""

import contextlib
import pathlib
import re
import resource
import sys
from collections.abc import Iterator

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from hypjax.errors import UserError

# What XLA says; the second, its library on CPUs.
_FULL = ("RESOURCE_EXHAUSTED", "YNNPACK operation failed")


@contextlib.contextmanager
def explained(remedy: str) -> Iterator[None]:
    """Turns an out-of-memory error of a device into a `UserError`.

    Args:
        remedy: The fields to lower, for the message.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in _FULL):
            raise
        device = jax.local_devices()[0].device_kind
        raise UserError(f"out of memory on {device}; lower {remedy}") from error


def require(program: Compiled, mesh: Mesh, remedy: str) -> None:
    """Checks that a program fits into the free memory of the devices, where it is known.

    Args:
        program: The compiled program.
        mesh: Its devices.
        remedy: The fields to lower, for the message.

    Raises:
        UserError: It does not fit.
    """
    needed, available = program.memory_analysis(), free(mesh)
    if None not in (needed, available) and needed.temp_size_in_bytes > available:
        raise UserError(
            f"the model needs {needed.temp_size_in_bytes / 2**30:,.0f} GiB on each device, and "
            f"{available / 2**30:,.1f} are free; lower {remedy}"
        )


def free(mesh: Mesh) -> int | None:
    """Returns the free bytes of each of this process's devices, or None if unknown.

    CPU devices share the memory of the machine equally.
    """
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    found = [device.memory_stats() or {} for device in local]
    if all("bytes_limit" in stats for stats in found):
        return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in found)
    available = _free_host_memory()
    return None if available is None else available // len(local)


def _free_host_memory() -> int | None:
    with contextlib.suppress(OSError):
        match = re.search(r"MemAvailable: *(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
        return None if match is None else 1024 * int(match[1])
    return None


def peaks() -> dict[str, int]:
    """Returns the peak memory of this process and its first device, in bytes, where known."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host_memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    device = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device:
        peak["device_memory_peak"] = device["peak_bytes_in_use"]
    return peak
