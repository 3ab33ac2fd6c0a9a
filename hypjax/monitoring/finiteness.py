"""Checks that losses and gradients are finite, and names the images of a step that is not."""

import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from hypjax.errors import UserError
from hypjax.parallel import processes
from hypjax.runs.shared_checkpoints import SharedCheckpoints
from hypjax.system import console
from hypjax.system.files import write_json

_FILE = "nonfinite.json"
_NAMED = 3  # Images that a message names.


class FiniteWatch:
    """Checks each step while the next one is running, so that no step has to wait."""

    def __init__(
        self,
        folder: pathlib.Path,
        checkpoints: SharedCheckpoints,
        name: Callable[[int], str],
        most_skipped: int = 0,
    ) -> None:
        """Starts to watch.

        Args:
            folder: The run's folder, for a report of what was found.
            checkpoints: The run's checkpoints.
            name: From the index of a training image to its name in messages.
            most_skipped: Most updates to skip; 0 stops at the first that is not finite.
        """
        self._folder, self._most_skipped = folder, most_skipped
        self._checkpoints, self._name = checkpoints, name
        self._last: tuple[int, np.ndarray, Mapping[str, Any]] | None = None

    def add(self, step: int, ids: Int[np.ndarray, " batch"], metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a running step, and checks the step before it.

        Raises:
            UserError: The step before was not finite, and may not be skipped.
        """
        self.settle()
        self._last = step, ids, metrics

    def settle(self) -> None:
        """Checks the last step; call it before its state is saved.

        Raises:
            UserError: It was not finite, and may not be skipped.
        """
        if self._last is None:
            return
        (step, ids, metrics), self._last = self._last, None
        if metrics["finite"]:
            return
        values = {n: float(metrics[n]) for n in ("loss", "gradient_norm", "update_norm")}
        what = next(name for name, value in values.items() if not math.isfinite(value))
        found = f"the {what.replace('_', ' ')} of step {step} is {values[what]}"
        images = [{"id": int(i), "name": self._name(int(i))} for i in ids]
        texts = {n: str(v) for n, v in values.items()}  # JSON has neither nan nor inf.
        if processes.is_first():
            with console.tolerating(str(self._folder / _FILE)):
                write_json(self._folder / _FILE, {"step": step, **texts, "images": images})
        skipped = int(jax.device_get(metrics["skipped"]))
        if skipped <= self._most_skipped:
            console.warn(
                f"{found}; its update is skipped, {skipped} of {self._most_skipped} so far "
                f"(its images are listed in {_FILE})"
            )
            return
        named = ", ".join(f"{image['id']} ({image['name']})" for image in images[:_NAMED])
        found += f" (images {named} and {len(images) - _NAMED} others, listed in {_FILE})"
        self._stop(found)

    def _stop(self, found: str) -> None:
        self._checkpoints.wait()
        steps = self._checkpoints.steps
        good = f"the last good checkpoint is of step {steps[-1]}" if steps else "none is saved"
        if not self._most_skipped:
            raise UserError(
                f"{found}; {good}. Lower optim.learning_rate, or set train.on_nonfinite=skip, "
                f"in a new run"
            )
        raise UserError(
            f"{found}, after {self._most_skipped} skipped updates (train.max_nonfinite); "
            f"{good}. Lower optim.learning_rate in a new run: resuming would repeat this"
        )
