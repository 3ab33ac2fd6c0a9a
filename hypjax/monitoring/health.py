"""Detects steps that are not finite, and training that fails to learn."""

import itertools
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError
from hypjax.monitoring.telemetry import Values
from hypjax.runs.checkpoints import Checkpoints
from hypjax.settings import Watch
from hypjax.system import console

_MAX_NAMED = 3  # Images that a message names.
_ADVICE = (
    "start from pretrained weights (model.weights), lower optim.learning_rate or "
    "objective.temperature, or lengthen optim.warmup_steps, in a new run"
)
_COLLAPSED_SPREAD = 1e-5  # Spread relative to the norm; float32 keeps two digits of differences.


class HealthWatch:
    """Warns once of each fault in two consecutive reports: a report may cover a single step."""

    def __init__(self, watch: Watch) -> None:
        self._first_step = max(watch.warmup_steps, watch.total_steps // 10) + 1
        self._stop_on_fault = watch.stops_on_collapse
        self._chance = (watch.samples_per_class - 1) / (watch.batch_size - 1)
        # Learning begins at 1.5 times chance, or a tenth of the way from chance to 1 if lower.
        self._min_recall = min(1.5 * self._chance, self._chance + 0.1 * (1 - self._chance))
        # With n classes in a batch, a positive has 2n − 2 negatives. Its probability is 1/2 if its
        # logit exceeds theirs by log(2n − 2).
        self._min_span = math.log(2 * watch.batch_size / watch.samples_per_class - 2)
        self._fault: str | None = None
        self._warned: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Warns, or stops training, if this report shows the same fault as the previous one."""
        if step < self._first_step:
            return
        previous_fault = self._fault
        self._fault, evidence = self._diagnose(values)
        if self._fault is None or self._fault != previous_fault:
            return
        message = f"{self._fault} by step {step}: {evidence}"
        if self._stop_on_fault:
            raise UserError(f"{message} (train.on_collapse=stop); {_ADVICE}")
        if self._fault not in self._warned:
            self._warned.add(self._fault)
            console.warn(f"{message}; {_ADVICE}")

    def _diagnose(self, values: Mapping[str, float]) -> tuple[str | None, str]:
        """Returns a fault that the values show, or None, and the evidence for it."""
        span = values.get("logit_max", math.inf) - values.get("logit_min", 0.0)
        if span < self._min_span:
            spans = f"the logits span {span:.2g}, but must span {self._min_span:.2g}"
            clipped = f"{values.get('clipped_share', 0.0):.0%} of the features are clipped"
            evidence = f"{spans} to tell the classes of a batch apart; {clipped}"
            return "the embeddings have collapsed, or the temperature is too high", evidence
        recall = values.get("batch_recall@1", math.inf)
        if recall < self._min_recall:
            evidence = f"recall@1 within a batch is {recall:.3f}, and {self._chance:.3f} by chance"
            return "nothing is being learned", evidence
        return None, ""


def warn_if_collapsed(points: Float[np.ndarray, "n d"], consequence: str) -> None:
    """Warns if embeddings are so close to each other that float32 distances keep few digits."""
    points = np.asarray(points, np.float64)
    spread = np.linalg.norm(points - points.mean(0), axis=-1).max()
    norm = np.linalg.norm(points, axis=-1).max()
    if len(points) > 1 and spread <= _COLLAPSED_SPREAD * norm:
        where = f"all lie within {spread:.1g} of one point of norm {norm:.1g}"
        console.warn(f"the embeddings have collapsed: {where}; {consequence}")


def check_finite(
    step: int, names: Iterator[str], metrics: Values, watch: Watch, checkpoints: Checkpoints
) -> None:
    """Warns of a step that is not finite, or raises an error if it may not be skipped."""
    if metrics["finite"]:
        return
    values = {name: float(metrics[name]) for name in ("loss", "gradient_norm", "update_norm")}
    quantity = next(name for name, value in values.items() if not math.isfinite(value))
    first_names = ", ".join(itertools.islice(names, _MAX_NAMED))
    images = f"images {first_names} and {watch.batch_size - _MAX_NAMED} others"
    fault = f"the {quantity.replace('_', ' ')} of step {step} is {values[quantity]} ({images})"
    skipped = int(jax.device_get(metrics["skipped"]))
    if skipped <= watch.max_skipped:
        console.warn(f"{fault}; its update is skipped, {skipped} of {watch.max_skipped} so far")
        return
    checkpoints.wait()
    steps = checkpoints.steps
    saved = f"the last checkpoint is of step {steps[-1]}" if steps else "no checkpoint is saved"
    if watch.max_skipped:
        fault += f", after {watch.max_skipped} skipped updates (train.max_nonfinite)"
    # Resuming would repeat the fault.
    advice = "lower optim.learning_rate, or set train.on_nonfinite=skip, in a new run"
    raise UserError(f"{fault}; {saved}; {advice}")
