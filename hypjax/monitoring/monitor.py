"""Watches training: what it measures, how fast it is, whether it stays finite."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from hypjax.monitoring.finiteness import FiniteWatch
from hypjax.monitoring.meter import Meter
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import Telemetry, Values
from hypjax.monitoring.tracing import Trace
from hypjax.reports.tables import format_recalls
from hypjax.system import console
from hypjax.types import Recalls


class Monitor:
    """All that looks on while steps are done; a context manager that ends with training."""

    def __init__(
        self,
        steps: range,
        batch_size: int,
        telemetry: Telemetry,
        watch: FiniteWatch,
        trace: Trace,
        stopwatch: Stopwatch,
    ) -> None:
        """Starts to watch.

        Args:
            steps: Steps to watch, counted from 0.
            batch_size: Images per step.
            telemetry: Takes what is measured.
            watch: Checks that each step is finite.
            trace: Trace of the steps to profile.
            stopwatch: The run's stopwatch.
        """
        self._first = self._reported = steps.start
        self._telemetry, self._watch, self._trace = telemetry, watch, trace
        self._stopwatch = stopwatch
        self._progress = console.Progress(steps.start, steps.stop, batch_size)
        self._meter = Meter(batch_size, stopwatch)

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
