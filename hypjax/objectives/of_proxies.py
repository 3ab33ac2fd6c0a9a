"""Objectives whose loss compares images with proxies, which are trained with the model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.fields import ABOVE_0, Field, at_least, within
from hypjax.geometry import Space
from hypjax.objectives.base import GROUPED, Group, Metrics, Spec
from hypjax.objectives.metrics import batch_metrics
from hypjax.objectives.proxy_losses import (
    normalized_softmax,
    proxy_anchor,
    proxy_nca,
    soft_triple,
)
from hypjax.types import Batch, Outputs


class ProxyLoss(NamedTuple):
    """A loss of proxies as configurations know it.

    Attributes:
        function: The loss of embeddings, labels and proxies.
        settings: Its settings, by the names of its arguments.
        centres: Number of proxies of a class; None for a loss that has one.
    """

    function: Callable[..., Array]
    settings: Mapping[str, Field]
    centres: Field | None = None

    @property
    def fields(self) -> dict[str, Field]:
        """Its fields of `config.objective`."""
        centres = {} if self.centres is None else {"centres": self.centres}
        # Factor of the proxies' learning rate. That of Proxy-Anchor and SoftTriple.
        return {**self.settings, **centres, "proxy_rate": Field(100.0, at_least(0))}


# Defaults are those of the papers, see the functions.
PROXY_LOSSES = {
    "proxy_anchor": ProxyLoss(
        proxy_anchor, {"margin": Field(0.1, at_least(0)), "alpha": Field(32.0, ABOVE_0)}
    ),
    "proxy_nca": ProxyLoss(proxy_nca, {"temperature": Field(1.0, ABOVE_0)}),
    "normalized_softmax": ProxyLoss(normalized_softmax, {"temperature": Field(0.05, ABOVE_0)}),
    "soft_triple": ProxyLoss(
        soft_triple,
        {
            "scale": Field(20.0, ABOVE_0),  # λ: multiplies the similarities of the classes.
            "gamma": Field(0.1, ABOVE_0),  # Temperature among the centres of a class.
            "margin": Field(0.01, at_least(0)),
            "regularization": Field(0.2, at_least(0)),  # Draws the centres of a class together.
        },
        centres=Field(10, within(1, 10**4)),
    ),
}


def create(name: str, config: ConfigDict, space: Space) -> "ProxyObjective":
    """Builds the objective that a run's configuration describes.

    Args:
        name: Name of the loss, a key of `PROXY_LOSSES`.
        config: The run's whole configuration.
        space: Space of the embeddings.
    """
    function, settings, centres = PROXY_LOSSES[name]
    fields, adjacent = config.objective, config.train.sampling in GROUPED
    return ProxyObjective(
        space=space,
        function=functools.partial(function, **{field: fields[field] for field in settings}),
        centres=None if centres is None else fields.centres,
        rate=fields.proxy_rate,
        samples_per_class=config.train.samples_per_class if adjacent else None,
    )


@dataclasses.dataclass(frozen=True)
class ProxyObjective:
    """A loss of the embeddings and labels of a batch, and of proxies for all classes.

    Proxies are parameters that the space embeds like the head's outputs. They are drawn as for
    Proxy-Anchor (Kim et al., CVPR 2020): normally distributed with the variance 2 / (number of
    proxies), which is Kaiming's with the fan-out of a classifier.

    Attributes:
        space: Space in which the head's output is embedded, trained and scored.
        function: The loss, with its settings, see `hypjax.objectives.proxy_losses`.
        centres: Number of proxies of each class; None for one, of a loss that takes one.
        rate: Factor of the proxies' learning rate.
        samples_per_class: Images of each class in a batch; None if batches hold any classes.
    """

    space: Space
    function: Callable[..., Array]
    centres: int | None
    rate: float
    samples_per_class: int | None

    teacher_decay = None

    @property
    def score_space(self) -> Space:
        """The training space: the head is scored where it is trained."""
        return self.space

    @property
    def groups(self) -> tuple[Group, ...]:
        """The proxies, with a learning rate of their own."""
        return (Group(("proxies",), rate=self.rate),)

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[dict, dict]:
        """Returns random proxies, and no state."""
        each = () if self.centres is None else (self.centres,)
        count = spec.classes * (self.centres or 1)
        proxies = jax.random.normal(key, (spec.classes, *each, spec.head_dim))
        return {"proxies": proxies * (2 / count) ** 0.5}, {}

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
        del teacher, key
        points = self.space.embed(outputs.projected)
        proxies = self.space.embed(params["proxies"])
        loss = self.function(points, batch.labels, proxies, space=self.space)
        metrics = batch_metrics(
            outputs.projected, points, batch.labels, self.space, self.samples_per_class
        )
        return loss, (state, metrics)
