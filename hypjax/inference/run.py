"""A run, assembled once: what its configuration names."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.data.parts import Splits
from hypjax.geometry import Space
from hypjax.geometry.learned import learned_values
from hypjax.inference.evaluator import Evaluator, create_evaluator
from hypjax.objectives import Objective, create_objective
from hypjax.runs.images import open_splits


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A run's configuration, objective and images; devices and evaluator come with first use."""

    config: ConfigDict
    objective: Objective
    splits: Splits
    name: str = ""  # In reports.
    workdir: str = ""  # Folder or URL of a trained run.

    @classmethod
    def open(cls, config: ConfigDict, objective: Objective | None = None, **names: str) -> Self:
        """Opens the images that a validated configuration names.

        The objective is the configuration's, or else `saved_objective` of the run's folder.
        """
        objective = objective or create_objective(config)
        return cls(config=config, objective=objective, splits=open_splits(config), **names)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices that share the work."""
        return parallel.create_mesh(self.config.run.mesh)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Scores the run's models; a frozen encoder embeds each image once."""
        return create_evaluator(self.config, self.objective, mesh=self.mesh, splits=self.splits)

    def scalars(self, params: PyTree) -> Mapping[str, Any]:
        """The learned scalars, by name, among the parameters of a model."""
        return learned_values(self.config.objective, params)

    def score_space(self, params: PyTree) -> Space:
        """Space in which the objective scores the head of a model."""
        return self.objective.with_scalars(self.scalars(params)).score_space
