"""The learner: what a train step is compiled from."""

import dataclasses

import optax
from jax.sharding import Mesh

from hypjax.geometry.learned import Bounds, Scalars
from hypjax.models import Embedder
from hypjax.models.colours import ColourChanges
from hypjax.objectives import Objective
from hypjax.settings import Pixels, Step
from hypjax.training.lora import Lora


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model with its objective, its optimiser, and the devices that share the work.

    A train step is compiled from it, and reads no configuration.
    """

    model: Embedder  # With the pooling of training.
    objective: Objective  # With the initial values of learned scalars.
    optimizer: optax.GradientTransformation  # For the trained parameters.
    schedule: optax.Schedule
    frozen: tuple[str, ...]
    lora: Lora | None
    pixels: Pixels
    colour_changes: ColourChanges | None
    scalars: Scalars  # Initial values of the learned scalars.
    scalar_bounds: Bounds
    step: Step
    mesh: Mesh
    # With cached features, the block whose output is cached; None for the encoder's embeddings.
    cached_block: str | None = None
