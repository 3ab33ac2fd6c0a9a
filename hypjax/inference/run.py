"""A run, assembled once: what its configuration names."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config.choices import PARTS
from hypjax.data.parts import Splits
from hypjax.geometry import Space
from hypjax.geometry.learned import learned_values
from hypjax.inference.embedding import part_of, scored_spaces
from hypjax.inference.evaluator import Evaluator
from hypjax.inference.features import DatasetEmbedder, keeping
from hypjax.inference.trained import TrainedModel
from hypjax.models import create_embedder
from hypjax.objectives import Objective, create_objective
from hypjax.runs.images import open_splits


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A run's configuration, objective and images; devices and models come with first use."""

    config: ConfigDict
    objective: Objective
    splits: Splits
    name: str = ""  # In reports.
    workdir: str = ""  # Folder or URL of a trained run.
    parts: Sequence[str] = PARTS  # Of the model, that are scored.

    @classmethod
    def open(cls, config: ConfigDict, objective: Objective | None = None, **fields: Any) -> Self:
        """Opens the images that a validated configuration names.

        The objective is the configuration's, or else `saved_objective` of the run's folder.
        """
        objective = objective or create_objective(config)
        return cls(config=config, objective=objective, splits=open_splits(config), **fields)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices that share the work."""
        return parallel.create_mesh(self.config.run.mesh)

    @functools.cached_property
    def images(self) -> DatasetEmbedder:
        """Embeds the run's images with its model as it is evaluated."""
        model = create_embedder(self.config, evaluating=True)
        kept = keeping(self.config, model, self.splits)
        return DatasetEmbedder(model, self.config, self.mesh, *kept)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Scores the run's models."""
        return Evaluator(self)

    def spaces(self, params: PyTree) -> dict[str, Space]:
        """The spaces in which a model is scored, by name."""
        found = scored_spaces(self.config, self.objective, params)
        return {name: space for name, space in found.items() if part_of(name) in self.parts}

    def scalars(self, params: PyTree) -> Mapping[str, Any]:
        """The learned scalars, by name, among the parameters of a model."""
        return learned_values(self.config.objective, params)

    def score_space(self, params: PyTree) -> Space:
        """Space in which the objective scores the head of a model."""
        return self.objective.with_scalars(self.scalars(params)).score_space

    def trained(self, params: PyTree) -> TrainedModel:
        """The model of parameters that devices may share."""
        params = parallel.place(params, parallel.replicated(self.mesh))
        return TrainedModel(self.config, self.images.model, params, self.objective)
