"""Collects the metrics of the steps, and their speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.system import memory


class Meter:
    """Collects what steps return, and measures how long they wait for input.

    At most two steps are in flight: while one computes, the input of the next is fetched. Waiting
    counts even while the device computes, so the share of input is an upper bound.
    """

    def __init__(self, batch_size: int, stopwatch: Stopwatch) -> None:
        """Starts the clock.

        Args:
            batch_size: Images per step.
            stopwatch: The run's stopwatch, which measures the waiting for input.
        """
        self._batch_size, self._stopwatch = batch_size, stopwatch
        self._metrics: list[Mapping[str, Any]] = []
        self._all_steps, self._all_seconds, self._all_wait = 0, 0.0, 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the time since the last reading from the rates, for example a compilation."""
        jax.block_until_ready(self._metrics[-1:])
        self._steps, self._waited, self._started = 0, self._input(), time.monotonic()

    def _input(self) -> float:
        """Seconds that the steps so far waited for input."""
        return self._stopwatch.seconds()["input"]

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics, after the step before it has finished."""
        jax.block_until_ready(self._metrics[-1:])
        self._metrics.append(metrics)
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Summarises the steps since the last reading.

        Steps that were not finite are left out. `..._min` and `..._max` are extremes,
        `learning_rate` and `skipped` the latest values, all others means. Adds images per second,
        the share of time spent waiting for input, and the peak memory of the process and the
        device in bytes.
        """
        metrics = jax.device_get(self._metrics)
        seconds, wait = time.monotonic() - self._started, self._input() - self._waited
        finite = [m for m in metrics if m["finite"]]
        names = metrics[0].keys() - {"finite", "skipped"} if finite else ()
        values = {n: float(_summarise(n)([m[n] for m in finite])) for n in names}
        values["skipped"] = int(metrics[-1]["skipped"])
        if self._steps:
            values["images_per_second"] = self._steps * self._batch_size / seconds
            values["input_wait"] = wait / seconds
        values |= memory.peaks()
        self._all_steps += self._steps
        self._all_seconds += seconds
        self._all_wait += wait
        self._metrics = []
        self.restart_clock()
        return values

    def summary(self) -> str:
        """Returns one line about all readings."""
        seconds = max(self._all_seconds, 1e-9)
        rate = self._all_steps * self._batch_size / seconds
        return f"{rate:.0f} images/s, {self._all_wait / seconds:.1%} of the time waiting for input"


def _summarise(name: str) -> Callable[[Sequence[float]], float]:
    if name == "learning_rate":
        return lambda values: values[-1]
    ends = {"_min": np.min, "_max": np.max}
    return ends.get(name[-4:], np.mean)
