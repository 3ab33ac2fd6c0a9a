"""Recognises training that runs without errors and learns nothing."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError
from hypjax.system import console

_ADVICE = (
    "start from pretrained weights (model.weights), lower optim.learning_rate, or lengthen "
    "optim.warmup_steps, in a new run"
)
_POINT = 1e-3  # Points are one if they differ by less than this share of their norm.
_CHANCE = 1.5  # A recall below this multiple of chance is at chance.


class HealthWatch:
    """Checks the means of the steps between two reports, and warns once of each fault."""

    def __init__(
        self, settled: int, batch_size: int, samples_per_class: int, *, stop: bool
    ) -> None:
        """Starts to watch.

        Args:
            settled: Steps before which nothing can be said, such as those of the warm-up.
            batch_size: Images per step.
            samples_per_class: Images of each class in a batch.
            stop: Whether a fault ends the run.
        """
        self._settled, self._stop = settled, stop
        self._chance = (samples_per_class - 1) / (batch_size - 1)
        # With 2n − 2 negatives, a positive needs a logit this much above theirs for p = 1/2.
        self._range = math.log(2 * batch_size / samples_per_class - 2)
        self._warned: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Checks what the steps up to this one returned.

        Args:
            step: Number of steps done.
            values: Means of their metrics; logits by their extremes.

        Raises:
            UserError: Training has failed, and a fault ends the run.
        """
        if step <= self._settled:
            return
        if "logit_min" in values:
            span = values["logit_max"] - values["logit_min"]
            if span < self._range:
                clipped = f", {values['clipped_share']:.0%} of the features are clipped"
                self._report(
                    step,
                    "the embeddings have collapsed",
                    f"the logits of a batch span {span:.2g}, and the loss needs a span of "
                    f"{self._range:.2g}{clipped if values.get('clipped_share') else ''}",
                )
                return
        recall = values.get("batch_recall@1", math.inf)
        if recall < _CHANCE * self._chance:
            self._report(
                step,
                "nothing is being learned",
                f"recall@1 within a batch is {recall:.3f}, and {self._chance:.3f} by chance",
            )

    def _report(self, step: int, fault: str, evidence: str) -> None:
        found = f"{fault} by step {step}: {evidence}"
        if self._stop:
            raise UserError(f"{found} (train.on_collapse=stop); {_ADVICE}")
        if fault not in self._warned:
            self._warned.add(fault)
            console.warn(f"{found}; {_ADVICE}")


def warn_if_collapsed(points: Float[np.ndarray, "n d"], consequence: str) -> None:
    """Warns if all embeddings are nearly one point, so that distances are mostly rounding.

    Args:
        points: The embeddings.
        consequence: What that means for the result.
    """
    points = np.asarray(points, np.float64)
    spread = np.linalg.norm(points - points.mean(0), axis=-1).max()
    norm = np.linalg.norm(points, axis=-1).max()
    if len(points) > 1 and spread < _POINT * norm:
        console.warn(
            f"the embeddings have collapsed: all are within {spread / norm:.1g} of their norm of "
            f"one point, so {consequence}; train again with a lower optim.learning_rate"
        )
