"""A trace of some steps, for TensorBoard's profiler or Perfetto."""

import pathlib
from typing import Any

import jax

from hypjax.errors import UserError
from hypjax.system import console


class Trace:
    """Writes what the device and the host do during some steps into a folder."""

    def __init__(self, folder: pathlib.Path, steps: tuple[int, int] | None, total: int) -> None:
        """Prepares a trace.

        Args:
            folder: Where to write it.
            steps: The first and the last step; None: no trace.
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
        """To be called before a step is dispatched."""
        if not self._running and self._first <= step <= self._last:
            self._folder.mkdir(parents=True, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Every call's time would make the host look slow.
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True

    def after(self, step: int, outputs: Any) -> None:
        """To be called with what a step returned."""
        if self._running and step == self._last:
            jax.block_until_ready(outputs)
            self.end()

    def end(self) -> None:
        """Ends the trace if it is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            console.say(f"trace written to {self._folder}; XProf and Perfetto show it")
