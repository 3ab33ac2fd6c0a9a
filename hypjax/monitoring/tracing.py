"""A profiler trace of some steps, for XProf, TensorBoard or Perfetto."""

import pathlib
from typing import Any

import jax

from hypjax.errors import UserError
from hypjax.system import console


class Trace:
    """Traces the device and the host during some steps."""

    def __init__(self, folder: pathlib.Path, steps: tuple[int, int] | None, total: int) -> None:
        """Prepares a trace.

        Args:
            folder: Where to write it.
            steps: First and last step, or None for no trace.
            total: Steps of the run.

        Raises:
            UserError: There are no such steps.
        """
        if steps is not None and not 1 <= steps[0] <= steps[1] <= total:
            raise UserError(
                f"--profile is {steps[0]}:{steps[1]}; "
                f"it must be two ascending steps from 1 to {total}"
            )
        self._folder = folder
        self._first, self._last = steps or (0, 0)
        self._running = False

    def before(self, step: int) -> None:
        """Call it before a step is dispatched."""
        if not self._running and self._first <= step <= self._last:
            self._folder.mkdir(parents=True, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Tracing every call would slow the host down.
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True

    def after(self, step: int, outputs: Any) -> None:
        """Call it with what a step returned."""
        if self._running and step == self._last:
            jax.block_until_ready(outputs)
            self.end()

    def end(self) -> None:
        """Ends the trace, if it is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            console.say(f"trace written to {self._folder}; open it with XProf or Perfetto")
