"""Objectives whose loss compares the images of a batch with each other."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, TRUE_OR_FALSE, Field, Rule, at_least, one_of, within
from hypjax.geometry import Space
from hypjax.objectives.base import GROUPED, Metrics, Spec
from hypjax.objectives.comparisons import References
from hypjax.objectives.koleo import koleo
from hypjax.objectives.memory import empty_memory, number_of_rows
from hypjax.objectives.metrics import batch_metrics
from hypjax.objectives.pair_losses import contrastive, multi_similarity, scalable_nca, supcon
from hypjax.objectives.triplets import MININGS, triplet
from hypjax.objectives.tuples import tuple_contrastive
from hypjax.types import Batch, Outputs


class PairLoss(NamedTuple):
    """A loss of pairs as configurations know it.

    Attributes:
        function: The loss of embeddings and labels.
        settings: Its settings, by the names of its arguments.
        by_class: Whether it needs several images of each class in a batch.
        by_tuple: Whether it needs batches of tuples; it then has no use for a memory.
    """

    function: Callable[..., Array]
    settings: Mapping[str, Field]
    by_class: bool = True
    by_tuple: bool = False

    @property
    def fields(self) -> dict[str, Field]:
        """Its fields of `config.objective`."""
        return {**self.settings, **({} if self.by_tuple else _MEMORY), **_KOLEO}


# Of every loss of pairs.
_KOLEO = {"koleo_weight": Field(0.0, at_least(0))}  # λ: weight of the differential entropy.
_MEMORY = {
    # Images of earlier batches to compare with: their number, or, up to 1, their share of the
    # training images. 0 for none.
    "memory": Field(
        0.0,
        Rule(
            lambda value: 0 <= value <= 1 or value == int(value) <= 10**9 and value > 0,
            "a number of images, or a share of the training images up to 1",
        ),
    ),
    # Decay of the teacher that embeds the images of the memory; 0: the model that is trained.
    "memory_decay": Field(0.0, Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")),
}
# Defaults are those of the papers, see the functions, with these exceptions. The triplets' margin
# is that of Schroff et al. The margin of the contrastive loss is not in IRT's paper but in
# unofficial code. Those of multi-similarity are HIER's and pytorch-metric-learning's; the paper has
# base 1.
PAIR_LOSSES = {
    "tuple_contrastive": PairLoss(
        tuple_contrastive, {"margin": Field(0.85, ABOVE_0)}, by_class=False, by_tuple=True
    ),
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

    Raises:
        UserError: The loss cannot use a memory, or only a memory could use a field.
    """
    loss, fields = PAIR_LOSSES[name], config.objective
    settings = {own: fields[own] for own in loss.settings}
    if loss.by_tuple:
        size = 2 + config.train.tuples.negatives
        function = functools.partial(loss.function, size=size, **settings)
        function = functools.partial(_of_tuples, function)
        return PairObjective(space, function, None, koleo_weight=fields.koleo_weight)
    if fields.memory and fields.get("mining") == "semihard":
        raise UserError("config.objective.memory must be 0 for semi-hard triplets")
    if fields.memory_decay and not fields.memory:
        raise UserError("config.objective.memory_decay must be 0 unless objective.memory is set")
    adjacent = config.train.sampling in GROUPED
    return PairObjective(
        space=space,
        function=functools.partial(loss.function, **settings),
        samples_per_class=config.train.samples_per_class if adjacent else None,
        **{own: fields[own] for own in (*_MEMORY, *_KOLEO)},
    )


def _of_tuples(
    function: Callable[..., Array],
    points: Float[Array, "n dim"],
    labels: Int[Array, " n"],
    *,
    samples_per_class: None,
    **settings: Any,
) -> Float[Array, ""]:
    """Calls a loss of tuples, which the order of a batch tells apart, with a batch's labels."""
    del labels, samples_per_class
    return function(points, **settings)


@dataclasses.dataclass(frozen=True)
class PairObjective:
    """A loss of the images of a batch among each other, and perhaps with a memory of earlier ones.

    The loss of the batch among itself, the same loss of the batch with the memory, and λ · KoLeo of
    the batch are added, as in IRT (El-Nouby et al., 2021). The batch enters the memory first.

    In the memory, an image is not compared with itself, unless a teacher has embedded it.

    Attributes:
        space: Space in which the head's output is embedded, trained and scored.
        function: The loss, with its settings, see `hypjax.objectives.pair_losses`.
        samples_per_class: Images of each class in a batch; None if batches hold any classes.
        memory: Number of images in the memory, or, up to 1, their share of the training images.
        memory_decay: Decay of the teacher that embeds these, or 0 for the trained model.
        koleo_weight: λ.
    """

    space: Space
    function: Callable[..., Array]
    samples_per_class: int | None
    memory: float = 0.0
    memory_decay: float = 0.0
    koleo_weight: float = 0.0

    groups = ()

    @property
    def score_space(self) -> Space:
        """The training space: the head is scored where it is trained."""
        return self.space

    @property
    def teacher_decay(self) -> float | None:
        """That of the memory."""
        return self.memory_decay or None

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[dict, dict]:
        """Returns no parameters, and the empty memory if there is one.

        Raises:
            UserError: The memory is smaller than a batch, or larger than the training set.
        """
        del key
        if not self.memory:
            return {}, {}
        rows = number_of_rows(self.memory, spec.training_images)
        if not spec.batch_size <= rows <= spec.training_images:
            raise UserError(
                f"config.objective.memory is {self.memory:g}, which holds {rows} images; it must "
                f"hold a batch of {spec.batch_size}, and at most all {spec.training_images} "
                "training images"
            )
        one = jax.ShapeDtypeStruct((1, spec.head_dim), jnp.float32)
        dim = jax.eval_shape(self.space.embed, one).shape[-1]
        return {}, {"memory": empty_memory(rows, dim)}

    def loss(
        self,
        params: dict,
        state: dict,
        outputs: Outputs,
        teacher: Outputs | None,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], tuple[dict, Metrics]]:
        """Loss of a batch, see `Objective.loss`."""
        del params, key
        points, labels = self.space.embed(outputs.projected), batch.labels
        compared = {"space": self.space, "samples_per_class": self.samples_per_class}
        loss = self.function(points, labels, **compared)
        metrics = batch_metrics(outputs.projected, points, labels, **compared)
        if self.memory:
            memory = state["memory"].written(self._remembered(points, teacher), labels)
            own = None if self.memory_decay else state["memory"].rows(len(labels))
            others = References(memory.points, memory.labels, own)
            of_memory = self.function(points, labels, space=self.space, references=others)
            loss, state = loss + of_memory, {"memory": memory}
            metrics |= {"memory_loss": of_memory, "memory_filled": jnp.mean(memory.labels >= 0)}
        if self.koleo_weight:
            metrics["koleo"] = koleo(points, space=self.space, ids=batch.ids)
            loss += self.koleo_weight * metrics["koleo"]
        return loss, (state, metrics)

    def _remembered(
        self, points: Float[Array, "n dim"], teacher: Outputs | None
    ) -> Float[Array, "n dim"]:
        """The points of the batch for the memory."""
        if self.memory_decay:
            return self.space.embed(teacher.projected)
        return lax.stop_gradient(points)
