"""Observes training: measurements, speed, progress, traces, and steps that are not finite."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from hypjax.errors import UserError
from hypjax.geometry.learned import Scalars, named_scalars, scalar_parameters
from hypjax.monitoring.health import HealthWatch, check_finite
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import Telemetry, Values
from hypjax.runs.checkpoints import Checkpoints
from hypjax.settings import Watch
from hypjax.system import console, machine, progress


def summarise(steps: Sequence[Mapping[str, Any]], latest: Collection[str]) -> dict[str, float]:
    """Averages metrics over finite steps; min of *_min, max of *_max, last of `latest`."""
    steps = jax.device_get(steps)
    summary: dict[str, float] = {"skipped": int(steps[-1]["skipped"])}
    finite_steps = [metrics for metrics in steps if metrics["finite"]]
    for name in set().union(*finite_steps) - {"finite", "skipped"}:
        values = [metrics[name] for metrics in finite_steps]
        reduce = {"_min": np.min, "_max": np.max}.get(name[-4:], np.mean)
        summary[name] = float(values[-1] if name in latest else reduce(values))
    return summary


class Trace(contextlib.ExitStack):
    """Profiler trace of the device and the host during a range of steps."""

    def __init__(self, folder: pathlib.Path, steps: tuple[int, int] | None, total: int) -> None:
        """Prepares a trace of the steps (first, last), of `total`; None for no trace."""
        if steps is not None and not 1 <= steps[0] <= steps[1] <= total:
            raise UserError(f"--profile must be two ascending steps from 1 to {total}")
        super().__init__()
        self._folder = folder
        self._first, self._last = steps or (0, -1)  # (0, −1): no step.

    def before(self, step: int) -> None:
        """Starts the trace at the first traced step; call it before dispatching each step."""
        if self._first <= step <= self._last:
            self._first = self._last + 1  # The trace starts only once.
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Tracing every call would slow the host down.
            message = f"trace written to {self._folder}; open it with XProf or Perfetto"
            self.callback(console.say, message)
            self.enter_context(jax.profiler.trace(self._folder, profiler_options=options))

    def after(self, step: int, outputs: Any) -> None:
        """Ends the trace after its last step; call it with each step's outputs."""
        if step == self._last:
            jax.block_until_ready(outputs)
            self.close()


class Monitor(contextlib.AbstractContextManager):
    """Observes the steps of training, as a context manager around the loop."""

    def __init__(
        self,
        watch: Watch,
        scalars: Scalars,
        steps: range,
        telemetry: Telemetry,
        checkpoints: Checkpoints,
        image_name: Callable[[int], str],
        trace: Trace,
        stopwatch: Stopwatch,
    ) -> None:
        """Starts to observe steps, counted from 0.

        `scalars` are the learned ones; `image_name` names an image by its index.
        """
        self._start = steps.start
        self._reported = steps.start
        self._watch, self._checkpoints, self._image_name = watch, checkpoints, image_name
        self._trace, self.stopwatch = trace, stopwatch
        self._unchecked: tuple[int, np.ndarray, Mapping[str, Any]] | None = None
        self._telemetry, self._health = telemetry, HealthWatch(watch)
        self._progress = progress.Progress(steps.start, steps.stop, watch.batch_size)
        names = named_scalars(scalar_parameters(scalars))
        self._latest = {"learning_rate", *names}  # Metrics that a report does not average.
        self._metrics: list[Mapping[str, Any]] = []  # One entry per step since the last report.
        self.restart_clock()

    def __exit__(self, *args: object) -> None:
        self._trace.close()
        self._progress.close()
        self._telemetry.close()

    @contextlib.contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Counts the time of the body as waiting for a step's input; then, a trace may start."""
        with self.stopwatch.part("input"):
            yield
        self._trace.before(step)

    def add(self, step: int, ids: Int[np.ndarray, " batch"], metrics: Mapping[str, Any]) -> None:
        """Records the metrics and images of a dispatched step; checks the previous step.

        At most two steps are in flight: while a step computes, the next step's input is fetched.
        """
        self._trace.after(step, metrics)
        self._metrics.append(metrics)
        self.settle()
        self._unchecked = step, ids, metrics
        if step == self._start + 1:
            self.restart_clock()  # The first step includes compilation.
        self._progress.advance()

    def report(self, step: int, *, judging: bool = True) -> None:
        """Writes the metrics of the steps since the last report, at most once per step.

        Call it before saving a state, so that no step's values are lost if the process dies. Raises
        an error if this step was not finite or, with `judging`, if training has failed.
        """
        self.settle()
        if step == self._reported:
            return
        self._reported = step
        values = summarise(self._metrics, self._latest)
        seconds = time.monotonic() - self._clock_start
        if timed_steps := len(self._metrics) - self._untimed_steps:
            values["images_per_second"] = timed_steps * self._watch.batch_size / seconds
            # An upper bound, since the device may compute during the wait.
            waited = self.stopwatch.seconds()["input"] - self._waited_before
            values["input_wait"] = waited / seconds
        values |= machine.memory_peaks()
        self._metrics = []
        self.restart_clock()
        self._telemetry.write(step, values)
        self._progress.show(values)
        if judging:
            self._health.check(step, values)

    def settle(self) -> None:
        """Waits for the last step and checks it; call it before using the step's state."""
        if self._unchecked:
            step, ids, metrics = self._unchecked
            self._unchecked = None
            names = (self._image_name(int(i)) for i in ids)
            check_finite(step, names, metrics, self._watch, self._checkpoints)

    def write(self, step: int, values: Values) -> None:
        """Writes scores at a step, and restarts the clock: computing them took time."""
        self._telemetry.write(step, values)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the steps and the time until now, such as a compilation, from the rates."""
        jax.block_until_ready(self._metrics[-1:])
        self._waited_before = self.stopwatch.seconds()["input"]
        self._untimed_steps, self._clock_start = len(self._metrics), time.monotonic()
