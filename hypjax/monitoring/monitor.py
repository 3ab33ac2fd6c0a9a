"""Watches training: what it measures, how fast it is, whether it stays finite."""

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from hypjax.monitoring.finiteness import FiniteWatch
from hypjax.monitoring.meter import Meter
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import Telemetry, Values
from hypjax.monitoring.tracing import Trace
from hypjax.reports.tables import format_recalls
from hypjax.runs.shared_checkpoints import SharedCheckpoints
from hypjax.system import console
from hypjax.types import Recalls


class Monitor:
    """All that looks on while steps are done; a context manager that ends with training."""

    def __init__(
        self,
        config: ConfigDict,
        folder: pathlib.Path,
        first_step: int,
        checkpoints: SharedCheckpoints,
        name: Callable[[int], str],
        trace: Trace,
        stopwatch: Stopwatch,
    ) -> None:
        """Begins after a step.

        Args:
            config: The run's configuration.
            folder: The run's.
            first_step: Steps done before.
            checkpoints: The run's.
            name: What to call a training image in a message.
            trace: Of the steps to profile.
            stopwatch: Of the run.
        """
        self._first, self._total = first_step, config.train.total_steps
        self._reported = first_step
        self._telemetry = Telemetry(folder, first_step, config)
        self._progress = console.Progress(first_step, self._total, config.train.batch_size)
        self._meter = Meter(config.train.batch_size, stopwatch)
        self._watch = FiniteWatch(config, folder, checkpoints, name)
        self._trace, self._stopwatch = trace, stopwatch

    def __enter__(self) -> Self:
        """Closes all files on leaving the body, and ends a trace that is still running."""
        return self

    def __exit__(self, *args: object) -> None:
        """Closes all files."""
        self._trace.end()
        self._progress.close()
        self._telemetry.close()

    @contextlib.contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Times the body as waiting for a step's input."""
        with self.timing("input"):
            yield
        self._trace.before(step)

    def timing(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Times the body as a part of the run, see `stopwatch.PARTS`."""
        return self._stopwatch.part(part)

    def add(self, step: int, ids: Int[np.ndarray, " batch"], metrics: Mapping[str, Any]) -> None:
        """Takes what a step returned.

        Args:
            step: Steps done, this one included.
            ids: Its images.
            metrics: What it returned, still being computed.

        Raises:
            UserError: The step before was not finite.
        """
        self._trace.after(step, metrics)
        self._meter.add(metrics)
        self._watch.add(step, ids, metrics)
        if step == self._first + 1:
            self._meter.restart_clock()  # It compiles: its time tells nothing of the others'.
        self._progress.advance()

    def report(self, step: int) -> None:
        """Writes what the steps since the last report returned, unless that is done already.

        To be called before a state is saved, so that no step's values are lost with the process.

        Raises:
            UserError: This step was not finite.
        """
        self.settle()
        if step == self._reported:
            return
        self._reported = step
        values = self._meter.read()
        self._telemetry.write(step, values)
        self._progress.show(values.get("loss", math.nan))

    def settle(self) -> None:
        """Waits for the last step; to be called before its state is used.

        Raises:
            UserError: It was not finite.
        """
        self._watch.settle()

    def validated(self, step: int, recalls: Recalls) -> None:
        """Takes the recalls on the validation classes, whose computation is not counted."""
        self._telemetry.write(step, {"validation": recalls})
        console.say(f"step {step}: validation {format_recalls(recalls)}")
        self._meter.restart_clock()

    def write(self, step: int, values: Values) -> None:
        """Writes further values of a step."""
        self._telemetry.write(step, values)

    def summary(self) -> str:
        """One line about all steps."""
        return self._meter.summary()
