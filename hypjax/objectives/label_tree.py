"""Losses that know the tree of a training set's labels, beside another loss."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.fields import Field
from hypjax.geometry import Space
from hypjax.objectives.base import (
    Extension,
    Loss,
    Metrics,
    Objective,
    ProblemSizes,
    adjacent_samples,
)
from hypjax.types import Batch, Outputs

# For each level from the classes upwards, the node above each node in the next level. The root is
# the last level; without coarse classes, it is the parent of all classes.
Tree = tuple[Int[Array, " nodes"], ...]


@dataclasses.dataclass(frozen=True)
class TreeExtension(Extension):
    """A base loss in any space, plus `tree_loss`, which names what it needs of its arguments.

    These are params, outputs, labels, tree and key. Fields of the dataclass follow `declared`.
    """

    declared: ClassVar[Mapping[str, Field]]  # Fields of `config.objective`.
    samples_per_class: int  # At least, of each class in a batch.

    @classmethod
    def create(
        cls, create_base: Callable[[ConfigDict, Space], Objective], config: ConfigDict, space: Space
    ) -> Self:
        """Builds a run's objective; `create_base` builds the base."""
        settings = (config.objective[name] for name in cls.declared)
        return cls(create_base(config, space), adjacent_samples(config) or 1, *settings)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns the base's parameters, and the base's state with the tree."""
        params, state = self.base.init(key, spec)
        levels = map(np.asarray, (range(spec.classes), *spec.coarse_labels, [0] * spec.classes))
        tree = []
        for fine, coarse in itertools.pairwise(levels):
            parents = np.zeros(fine.max() + 1, np.int32)
            parents[fine] = coarse
            tree.append(jnp.asarray(parents))
        return {"base": params}, {"base": state, "tree": tuple(tree)}

    def loss(
        self, params: dict, state: dict, outputs: Outputs, batch: Batch, key: PRNGKeyArray, **others
    ) -> tuple[Loss, tuple[dict, Metrics]]:
        """Loss of a batch, see `Objective.loss`."""
        for_base, for_tree = jax.random.split(key)
        base = {"params": params["base"], "state": state["base"], "key": for_base}
        loss, (of_base, metrics) = self.base_loss(**base, outputs=outputs, batch=batch, **others)
        values = {"params": params, "tree": state["tree"], "key": for_tree}
        of_tree, curves = self.tree_loss(outputs=outputs, labels=batch.labels, **values)
        return loss + of_tree, (state | {"base": of_base}, metrics | curves)


def labels_by_level(labels: Int[Array, " n"], tree: Tree) -> Int[Array, "levels n"]:
    """Nodes above images at each level: their classes, coarse classes, and the root, 0."""
    return jnp.stack([*itertools.accumulate(tree, lambda below, up: up[below], initial=labels)])
