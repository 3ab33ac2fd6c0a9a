"""Number of processor cores that this process may use."""

import os


def usable_cores() -> int:
    """Returns the number of cores; on Linux only those in the process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
