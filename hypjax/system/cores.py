"""Number of processor cores that this process may use."""

import os


def usable_cores() -> int:
    """Returns the number of cores, within the limits of a scheduler where they can be read."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
