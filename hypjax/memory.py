"""Memory: how much was used at most, and a sentence where a device's did not suffice."""

import contextlib
import resource
import sys
from collections.abc import Iterator

import jax

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


def peaks() -> dict[str, int]:
    """Bytes that this process and its first device have used at most, where that is known."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host_memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    device = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device:
        peak["device_memory_peak"] = device["peak_bytes_in_use"]
    return peak
