"""Watches training: measurements, speed, progress, and whether all is finite."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from hypjax.monitoring.finiteness import FiniteWatch
from hypjax.monitoring.health import HealthWatch
from hypjax.monitoring.meter import Meter
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import Telemetry, Values
from hypjax.monitoring.tracing import Trace
from hypjax.runs.tables import format_recalls
from hypjax.system import console
from hypjax.types import Recalls


class Monitor:
    """Everything that observes the steps; a context manager around the loop."""

    def __init__(
        self,
        steps: range,
        batch_size: int,
        telemetry: Telemetry,
        watch: FiniteWatch,
        health: HealthWatch,
        trace: Trace,
        stopwatch: Stopwatch,
    ) -> None:
        """Starts to watch.

        Args:
            steps: Steps to watch, counted from 0.
            batch_size: Images per step.
            telemetry: Takes what is measured.
            watch: Checks that each step is finite.
            health: Checks that the steps learn something.
            trace: Trace of the steps to profile.
            stopwatch: The run's stopwatch.
        """
        self._first = self._reported = steps.start
        self._telemetry, self._trace, self._stopwatch = telemetry, trace, stopwatch
        self._watch, self._health = watch, health
        self._progress = console.Progress(steps.start, steps.stop, batch_size)
        self._meter = Meter(batch_size, stopwatch)

    def __enter__(self) -> Self:
        """Returns the monitor."""
        return self

    def __exit__(self, *args: object) -> None:
        """Closes all files, and ends a trace that is still running."""
        self._trace.end()
        self._progress.close()
        self._telemetry.close()

    @contextlib.contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Counts the body as waiting for a step's input."""
        with self.timing("input"):
            yield
        self._trace.before(step)

    def timing(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Counts the body as a part of the run, see `stopwatch.PARTS`."""
        return self._stopwatch.part(part)

    def add(self, step: int, ids: Int[np.ndarray, " batch"], metrics: Mapping[str, Any]) -> None:
        """Records what a step returned.

        Args:
            step: Number of steps done, including this one.
            ids: Indices of its images.
            metrics: Its metrics, which may still be being computed.

        Raises:
            UserError: The step before was not finite.
        """
        self._trace.after(step, metrics)
        self._meter.add(metrics)
        self._watch.add(step, ids, metrics)
        if step == self._first + 1:
            self._meter.restart_clock()  # The first step includes compilation.
        self._progress.advance()

    def report(self, step: int, *, judging: bool = True) -> None:
        """Writes the metrics of the steps since the last report, at most once per step.

        Call it before a state is saved, so that no step's values are lost with the process.

        Args:
            step: Number of steps done.
            judging: Whether training that has failed may end the run.

        Raises:
            UserError: This step was not finite, or training has failed and may not go on.
        """
        self.settle()
        if step == self._reported:
            return
        self._reported = step
        values = self._meter.read()
        self._telemetry.write(step, values)
        self._progress.show(values)
        if judging:
            self._health.check(step, values)

    def settle(self) -> None:
        """Waits for the last step and checks it; call it before its state is used.

        Raises:
            UserError: It was not finite.
        """
        self._watch.settle()

    def validated(self, step: int, recalls: Recalls) -> None:
        """Records scores on the validation classes; computing them does not count as training."""
        self._telemetry.write(step, {"validation": recalls})
        console.say(f"step {step}: validation {format_recalls(recalls)}")
        self._meter.restart_clock()

    def mined(self, step: int, values: Values) -> None:
        """Records what was mined for a step and those after it, which does not count as training.

        Args:
            step: Number of steps done when the first of these is.
            values: Measurements.
        """
        self._telemetry.write(step, {"mining": values})
        self._meter.restart_clock()

    def write(self, step: int, values: Values) -> None:
        """Writes other values of a step."""
        self._telemetry.write(step, values)

    def summary(self) -> str:
        """Returns one line about all steps."""
        return self._meter.summary()
