"""What a train step computes with, built from a configuration."""

import dataclasses
from collections.abc import Sequence

import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.models import Embedder, create_embedder
from hypjax.objectives import Objective, create_objective
from hypjax.training.optim import create_optimizer, learning_rate
from hypjax.types import View


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model with its objective, its optimiser, and the devices that share the work."""

    model: Embedder
    objective: Objective
    optimizer: optax.GradientTransformation  # Of the trained parameters.
    schedule: optax.Schedule
    frozen: tuple[str, ...]
    pixel_scaling: tuple[Sequence[float], Sequence[float]]  # Mean and deviation by channel.
    view: View
    mesh: Mesh
    microbatch: int  # Most images embedded at once; 0 for the whole batch.
    skip_nonfinite: bool
    cached_features: bool  # Whether batches hold embeddings of the frozen encoder, not pixels.
    drop_path: float  # Rate of stochastic depth in the encoder's last block.
    seed: int  # Of the initial parameters and of the steps' random keys.


def build_learner(
    config: ConfigDict, mesh: Mesh | None = None, model: Embedder | None = None
) -> Learner:
    """Builds the learner that a validated configuration describes."""
    mesh = mesh or parallel.create_mesh(config.run.mesh)
    schedule = learning_rate(config.optim, config.train.total_steps)
    objective = create_objective(config)
    return Learner(
        model=model or create_embedder(config, device=mesh.devices.flat[0]),
        objective=objective,
        optimizer=create_optimizer(config.optim, schedule, objective.groups),
        schedule=schedule,
        frozen=tuple(config.optim.frozen),
        pixel_scaling=(config.data.mean, config.data.std),
        view=View.of(config.data),
        mesh=mesh,
        microbatch=config.run.microbatch,
        skip_nonfinite=config.train.on_nonfinite == "skip",
        cached_features=config.train.cached_features,
        drop_path=config.model.drop_path,
        seed=config.seed,
    )
