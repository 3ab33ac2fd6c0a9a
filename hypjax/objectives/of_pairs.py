"""Objectives whose loss compares the images of a batch with each other."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxtyping import Array, Float, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.fields import ABOVE_0, TRUE_OR_FALSE, Field, at_least, one_of, within
from hypjax.geometry import Space
from hypjax.objectives.base import Metrics, Spec
from hypjax.objectives.metrics import batch_metrics
from hypjax.objectives.pair_losses import contrastive, multi_similarity, scalable_nca, supcon
from hypjax.objectives.triplets import MININGS, triplet
from hypjax.types import Batch, Outputs


class PairLoss(NamedTuple):
    """A loss of pairs as configurations know it.

    Attributes:
        function: The loss of embeddings and labels.
        fields: Its settings, by the names of its arguments.
        by_class: Whether it needs several images of each class in a batch.
    """

    function: Callable[..., Array]
    fields: Mapping[str, Field]
    by_class: bool = True


# Defaults are those of the papers, see the functions, with these exceptions. The triplets' margin
# is that of Schroff et al. The margin of the contrastive loss is not in IRT's paper but in
# unofficial code. Those of multi-similarity are HIER's and pytorch-metric-learning's; the paper has
# base 1.
PAIR_LOSSES = {
    # IRT trains it on batches of any classes, too.
    "contrastive": PairLoss(contrastive, {"margin": Field(0.5, at_least(-1))}, by_class=False),
    "multi_similarity": PairLoss(
        multi_similarity,
        {
            "alpha": Field(2.0, ABOVE_0),  # Scale of positives.
            "beta": Field(50.0, ABOVE_0),  # Scale of negatives.
            "base": Field(0.5, within(-1, 1)),  # Similarity that separates them.
            "mining": Field(True, TRUE_OR_FALSE),  # Whether easy pairs are left out.
            "epsilon": Field(0.1, at_least(0)),  # By how much pairs may be easy.
        },
    ),
    "scalable_nca": PairLoss(scalable_nca, {"temperature": Field(0.05, ABOVE_0)}),
    "supcon": PairLoss(supcon, {"temperature": Field(0.1, ABOVE_0)}),
    "triplet": PairLoss(
        triplet, {"margin": Field(0.2, at_least(0)), "mining": Field("hard", one_of(*MININGS))}
    ),
}


def create(name: str, config: ConfigDict, space: Space) -> "PairObjective":
    """Builds the objective that a run's configuration describes.

    Args:
        name: Name of the loss, a key of `PAIR_LOSSES`.
        config: The run's whole configuration.
        space: Space of the embeddings.
    """
    function, fields, _ = PAIR_LOSSES[name]
    settings = {field: config.objective[field] for field in fields}
    adjacent = config.train.sampling != "shuffled"
    return PairObjective(
        space=space,
        function=functools.partial(function, **settings),
        samples_per_class=config.train.samples_per_class if adjacent else None,
    )


@dataclasses.dataclass(frozen=True)
class PairObjective:
    """A loss of the embeddings and labels of a batch, without parameters and state.

    Attributes:
        space: Space in which the head's output is embedded, trained and scored.
        function: The loss, with its settings, see `hypjax.objectives.pair_losses`.
        samples_per_class: Images of each class in a batch; None if batches hold any classes.
    """

    space: Space
    function: Callable[..., Array]
    samples_per_class: int | None

    groups = ()
    teacher_decay = None

    @property
    def score_space(self) -> Space:
        """The training space: the head is scored where it is trained."""
        return self.space

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[dict, dict]:
        """Returns two empty trees."""
        del key, spec
        return {}, {}

    def loss(
        self,
        params: dict,
        state: dict,
        outputs: Outputs,
        teacher: None,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], tuple[dict, Metrics]]:
        """Loss of a batch, see `Objective.loss`."""
        del params, teacher, key
        points = self.space.embed(outputs.projected)
        compared = {"space": self.space, "samples_per_class": self.samples_per_class}
        loss = self.function(points, batch.labels, **compared)
        metrics = batch_metrics(outputs.projected, points, batch.labels, **compared)
        return loss, (state, metrics)
