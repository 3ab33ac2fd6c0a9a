"""Matryoshka: a loss summed over nested prefixes of the embedding (Kusupati et al., 2022)."""

import dataclasses
from typing import Any

from jaxtyping import PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import Rule, is_ascending
from hypjax.objectives.base import Extension, Loss, Metrics, ProblemSizes, setting
from hypjax.types import Outputs

PREFIX = "matryoshka+"  # These objectives' names begin with it.


def trained_prefixes(config: ConfigDict) -> tuple[int, ...]:
    """Dimensions of the prefixes that a run's objective trains; none for other objectives."""
    named = config.objective.name.startswith(PREFIX)
    return tuple(config.objective.dims) if named else ()


@dataclasses.dataclass(frozen=True)
class Matryoshka(Extension):
    """Sums a loss over prefixes of the head's output (Kusupati et al., Eq. 1, with weights 1).

    The space embeds each prefix separately, so that the prefix is normalised or clipped as an
    embedding of its own.

    All prefixes share the loss's parameters, which have the head's full dimension. `ProxyObjective`
    takes the first coordinates of its proxies, as the paper does for its classifiers (MRL-E). The
    base has no state: a memory would hold points of a single dimension.
    """

    # Dimensions of the prefixes, which are trained in addition to the head's full output.
    dims: tuple[int, ...] = setting(
        (8, 16, 32, 64),
        Rule(lambda value: value and is_ascending(value), "one or more ascending numbers above 0"),
    )

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns the base's parameters, and no state; too long a prefix is a `UserError`."""
        if self.dims[-1] >= spec.head_dim:
            raise UserError(
                f"objective.dims has {self.dims[-1]}; it must be below the head's {spec.head_dim}"
            )
        return {"base": self.base.init(key, spec)[0]}, {}

    def loss(
        self, params: dict, outputs: Outputs, teacher: Outputs | None, **others: Any
    ) -> tuple[Loss, tuple[PyTree, Metrics]]:
        """Sums the base loss over all prefixes.

        Metrics are those of the full output, plus the loss of each prefix, such as "loss@16".
        """

        def prefix_loss(dim: int | None) -> tuple[Loss, tuple[PyTree, Metrics]]:
            outputs_prefix = outputs._replace(projected=outputs.projected[:, :dim])
            teacher_prefix = teacher and teacher._replace(projected=teacher.projected[:, :dim])
            prefixes = {"outputs": outputs_prefix, "teacher": teacher_prefix}
            return self.base_loss(params=params["base"], **prefixes, **others)

        total, (state, metrics) = prefix_loss(None)
        prefix_losses = {f"loss@{dim}": prefix_loss(dim)[0] for dim in self.dims}
        if "chance_loss" in metrics:  # Equal for all dimensions.
            metrics = metrics | {"chance_loss": metrics["chance_loss"] * (1 + len(self.dims))}
        return total + sum(prefix_losses.values()), (state, metrics | prefix_losses)
