"""Detects steps that are not finite, and training that learns nothing."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.runs.checkpoints import Checkpoints
from hypjax.system import console

_NAMED = 3  # Images that a message names.
_ADVICE = (
    "start from pretrained weights (model.weights), lower optim.learning_rate or "
    "objective.temperature, or lengthen optim.warmup_steps, in a new run"
)
_POINT = 1e-5  # Share of the norm. Of such small differences, float32 keeps two digits.

Metrics = Mapping[str, Any]


class HealthWatch:
    """Warns once of each fault that shows in two reports in a row: one may cover a single step.

    Checks begin after the warm-up and a tenth of the steps.
    """

    def __init__(self, config: ConfigDict) -> None:
        train = config.train
        self._settled = max(config.optim.warmup_steps, train.total_steps // 10)
        self._stop = train.on_collapse == "stop"
        self._chance = chance = (train.samples_per_class - 1) / (train.batch_size - 1)
        # Recall at chance is at most 1.5 times chance, and a tenth of the way from it to 1.
        self._least_recall = min(1.5 * chance, chance + 0.1 * (1 - chance))
        # With 2n − 2 negatives, a positive needs a logit this much above theirs for p = 1/2.
        self._range = math.log(2 * train.batch_size / train.samples_per_class - 2)
        self._last: str | None = None
        self._warned: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the means of the metrics, and the extremes of the logits, of the last steps."""
        if step <= self._settled:
            return
        last, (self._last, evidence) = self._last, self._fault(values)
        if self._last is None or self._last != last:
            return
        fault = f"{last} by step {step}: {evidence}"
        if self._stop:
            raise UserError(f"{fault} (train.on_collapse=stop); {_ADVICE}")
        if last not in self._warned:
            self._warned.add(last)
            console.warn(f"{fault}; {_ADVICE}")

    def _fault(self, values: Mapping[str, float]) -> tuple[str | None, str]:
        """Returns a fault, or None, and its evidence."""
        span = values.get("logit_max", math.inf) - values.get("logit_min", 0.0)
        if span < self._range:
            clipped = f"{values.get('clipped_share', 0.0):.0%} of the features are clipped"
            evidence = f"the logits span {span:.2g}, and to tell the classes of a batch apart they"
            evidence += f" must span {self._range:.2g}; {clipped}"
            return "the embeddings have collapsed, or the temperature is too high", evidence
        if (recall := values.get("batch_recall@1", math.inf)) < self._least_recall:
            evidence = f"recall@1 within a batch is {recall:.3f}, and {self._chance:.3f} by chance"
            return "nothing is being learned", evidence
        return None, ""


def warn_if_collapsed(points: Float[np.ndarray, "n d"], consequence: str) -> None:
    """Warns if embeddings are so close that float32 distances keep few digits."""
    points = np.asarray(points, np.float64)
    spread = np.linalg.norm(points - points.mean(0), axis=-1).max()
    norm = np.linalg.norm(points, axis=-1).max()
    if len(points) > 1 and spread <= _POINT * norm:
        where = f"all lie within {spread:.1g} of one point of norm {norm:.1g}"
        console.warn(f"the embeddings have collapsed: {where}; {consequence}")


def check_finite(
    step: int, images: Iterator[str], metrics: Metrics, train: ConfigDict, checkpoints: Checkpoints
) -> None:
    """Warns of a step that is not finite, or raises an error where it may not be skipped."""
    if metrics["finite"]:
        return
    values = {n: float(metrics[n]) for n in ("loss", "gradient_norm", "update_norm")}
    name = next(name for name, value in values.items() if not math.isfinite(value))
    shown = f"{', '.join(itertools.islice(images, _NAMED))} and {train.batch_size - _NAMED} others"
    fault = f"the {name.replace('_', ' ')} of step {step} is {values[name]} (images {shown})"
    most = train.max_nonfinite if train.on_nonfinite == "skip" else 0
    skipped = int(jax.device_get(metrics["skipped"]))
    if skipped <= most:
        console.warn(f"{fault}; its update is skipped, {skipped} of {most} so far")
        return
    checkpoints.wait()
    steps = checkpoints.steps
    good = f"the last good checkpoint is of step {steps[-1]}" if steps else "none is saved"
    if most:  # Resuming would repeat this.
        fault += f", after {most} skipped updates (train.max_nonfinite)"
    advice = "lower optim.learning_rate, or set train.on_nonfinite=skip, in a new run"
    raise UserError(f"{fault}; {good}; {advice}")
