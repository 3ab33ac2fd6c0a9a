"""Matryoshka: a loss summed over nested prefixes of the embedding (Kusupati et al., 2022)."""

import dataclasses
from typing import Any

from jaxtyping import PRNGKeyArray

from hypjax.errors import UserError
from hypjax.fields import Rule, Values, is_ascending
from hypjax.objectives.base import Extension, LossResult, ProblemSizes, setting
from hypjax.types import Outputs

PREFIX = "matryoshka+"  # Beginning of the objectives' names.


def trained_prefixes(fields: Values) -> tuple[int, ...]:
    """Dimensions of the prefixes that the loss of `config.objective` trains; () for others."""
    return tuple(fields["dims"]) if fields["name"].startswith(PREFIX) else ()


@dataclasses.dataclass(frozen=True)
class Matryoshka(Extension):
    """Sums a loss over prefixes of the head's output (Kusupati et al., Eq. 1, with weights 1).

    The space normalises or clips each prefix like an embedding. All prefixes share the loss's
    parameters, which have the head's full dimension: `ProxyObjective` takes the first coordinates
    of its proxies, as the paper does for its classifiers (MRL-E). The base has no state: a memory
    would hold points of a single dimension.
    """

    # Dimensions of the prefixes, which are trained in addition to the head's full output.
    dims: tuple[int, ...] = setting(
        (8, 16, 32, 64),
        Rule(lambda dims: dims and is_ascending(dims), "one or more ascending numbers above 0"),
    )

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns the base's parameters, and no state; too long a prefix is a `UserError`."""
        if self.dims[-1] >= spec.head_dim:
            rule = f"it must be below the head's {spec.head_dim}"
            raise UserError(f"objective.dims has {self.dims[-1]}; {rule}")
        return {"base": self.base.init(key, spec)[0]}, {}

    def loss(
        self, params: dict, outputs: Outputs, teacher: Outputs | None, **others: Any
    ) -> LossResult:
        """Sums the base loss over all prefixes.

        Metrics are those of the full output, plus the loss of each prefix, such as "loss@16".
        """

        def prefix_loss(dim: int | None) -> LossResult:
            return self.base_loss(
                params=params["base"],
                outputs=outputs._replace(projected=outputs.projected[:, :dim]),
                teacher=teacher and teacher._replace(projected=teacher.projected[:, :dim]),
                **others,
            )

        total, (state, metrics) = prefix_loss(None)
        prefix_losses = {f"loss@{dim}": prefix_loss(dim)[0] for dim in self.dims}
        if "chance_loss" in metrics:  # Equal for all dimensions.
            metrics = metrics | {"chance_loss": metrics["chance_loss"] * (1 + len(self.dims))}
        return total + sum(prefix_losses.values()), (state, metrics | prefix_losses)
