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
    """A model with its objective, its optimiser, and the devices that share the work.

    Attributes:
        model: Encoder and head.
        objective: Training objective.
        optimizer: Optimiser of the trained parameters.
        schedule: Learning rate at each step.
        frozen: Names of the parameter groups that are not trained.
        pixel_scaling: Mean and standard deviation of pixels, one number per channel each.
        view: Size of the images.
        mesh: Devices that share each batch.
        microbatch: Most images embedded at once; 0 for the whole batch.
        skip_nonfinite: Whether an update that is not finite is dropped.
        cached_features: Whether batches hold embeddings of the frozen encoder instead of pixels.
        drop_path: Rate of stochastic depth in the encoder's last block.
        seed: Seed of the initial parameters and of the steps' random keys.
    """

    model: Embedder
    objective: Objective
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    frozen: tuple[str, ...]
    pixel_scaling: tuple[Sequence[float], Sequence[float]]
    view: View
    mesh: Mesh
    microbatch: int
    skip_nonfinite: bool
    cached_features: bool
    drop_path: float
    seed: int


def build_learner(
    config: ConfigDict, mesh: Mesh | None = None, model: Embedder | None = None
) -> Learner:
    """Builds the learner that a validated configuration describes.

    Args:
        config: The run's configuration.
        mesh: Devices to use; by default those that `run.mesh` names.
        model: The model, if it is built already.

    Raises:
        UserError: The model or the mesh cannot be built.
    """
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
