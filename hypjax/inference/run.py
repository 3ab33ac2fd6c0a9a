"""A run, assembled once: what its configuration names."""

import dataclasses
import functools
from typing import Self

from jax.sharding import Mesh
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.data.parts import Splits
from hypjax.inference.evaluator import Evaluator, create_evaluator
from hypjax.runs.images import open_splits


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A run's configuration and images; its devices and its evaluator are made when first used."""

    config: ConfigDict
    splits: Splits
    name: str = ""  # In reports.
    workdir: str = ""  # Folder or URL of a trained run.

    @classmethod
    def open(cls, config: ConfigDict, name: str = "", workdir: str = "") -> Self:
        """Opens the images that a validated configuration names."""
        return cls(config=config, splits=open_splits(config), name=name, workdir=workdir)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices that share the work."""
        return parallel.create_mesh(self.config.run.mesh)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Scores the run's models; a frozen encoder embeds each image once."""
        return create_evaluator(self.config, mesh=self.mesh, splits=self.splits)
