"""Matryoshka: a loss of nested prefixes of the embedding (Kusupati et al., NeurIPS 2022)."""

import dataclasses
from typing import Any

from jaxtyping import PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import Rule, is_ascending
from hypjax.objectives.base import Extension, Loss, Metrics, ProblemSizes, setting
from hypjax.types import Outputs

PREFIX = "matryoshka+"  # Of the names of these objectives.


def trained_prefixes(config: ConfigDict) -> tuple[int, ...]:
    """Dimensions of the prefixes that a run's objective trains; none for other objectives."""
    named = config.objective.name.startswith(PREFIX)
    return tuple(config.objective.dims) if named else ()


@dataclasses.dataclass(frozen=True)
class Matryoshka(Extension):
    """The sum of a loss over prefixes of the head's output (Kusupati et al., Eq. 1, weights 1).

    A prefix is cut off before the space embeds it, so it is normalised or clipped by itself, and is
    an embedding of its own; `hypjax.retrieval.prefix_points` returns it from points.

    All prefixes share the loss's parameters, which have the head's full dimension;
    `ProxyObjective` takes the first coordinates of its proxies, as the paper does of its
    classifiers (MRL-E). There is no state: a memory would hold points of one dimension.
    """

    # Prefixes that are trained in addition to the full output of the head.
    dims: tuple[int, ...] = setting(
        (8, 16, 32, 64),
        Rule(lambda value: value and is_ascending(value), "one or more ascending numbers above 0"),
    )

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns the parameters of the loss, and no state; too long a prefix is a `UserError`."""
        if self.dims[-1] >= spec.head_dim:
            raise UserError(
                f"objective.dims has {self.dims[-1]}; it must be below the head's {spec.head_dim}"
            )
        return {"base": self.base.init(key, spec)[0]}, {}

    def loss(
        self, params: dict, outputs: Outputs, teacher: Outputs | None, **others: Any
    ) -> tuple[Loss, tuple[PyTree, Metrics]]:
        """Sums the loss over all prefixes.

        Metrics describe the whole output; each prefix adds its loss, such as "loss@16".
        """

        def at(dim: int | None) -> tuple[Loss, tuple[PyTree, Metrics]]:
            prefix, taught = (
                x and x._replace(projected=x.projected[:, :dim]) for x in (outputs, teacher)
            )
            return self.base_loss(params=params["base"], outputs=prefix, teacher=taught, **others)

        total, (state, metrics) = at(None)
        of_prefixes = {f"loss@{dim}": at(dim)[0] for dim in self.dims}
        if "chance_loss" in metrics:  # It does not depend on the dimension.
            metrics = metrics | {"chance_loss": metrics["chance_loss"] * (1 + len(self.dims))}
        return total + sum(of_prefixes.values()), (state, metrics | of_prefixes)
