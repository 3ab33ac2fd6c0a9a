"""The processor cores that this process may use."""

import os


def usable_cores() -> int:
    """Their number, which containers and schedulers may have limited, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
