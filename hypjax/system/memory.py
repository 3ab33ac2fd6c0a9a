"""Memory: how much is free, how much was used, and a sentence where it did not suffice."""

import contextlib
import pathlib
import re
import resource
import sys
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from hypjax.errors import UserError


@contextlib.contextmanager
def explained(remedy: str) -> Iterator[None]:
    """Turns the failure to allocate an array into a `UserError`.

    Args:
        remedy: What to lower.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        device = jax.local_devices()[0].device_kind
        raise UserError(f"out of memory on {device}; lower {remedy}") from error


def free(mesh: Mesh) -> int | None:
    """Bytes that are free on each of this process's devices; None where nothing tells.

    CPU devices share what the machine has.
    """
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    found = [device.memory_stats() or {} for device in own]
    if all("bytes_limit" in stats for stats in found):
        return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in found)
    machine = _free_of_machine()
    return None if machine is None else machine // len(own)


def _free_of_machine() -> int | None:
    with contextlib.suppress(OSError):
        told = re.search(r"MemAvailable: *(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
        return None if told is None else 1024 * int(told[1])
    return None


def peaks() -> dict[str, int]:
    """Bytes that this process and its first device have used at most, where that is known."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host_memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    device = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device:
        peak["device_memory_peak"] = device["peak_bytes_in_use"]
    return peak
