"""The learner: model, objective and optimiser of a train step, built from a configuration."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hypjax.geometry.learned import CURVATURES, Scalars, bounds, initial_scalars
from hypjax.inference.run import Run
from hypjax.models import Embedder
from hypjax.models.colours import ColourChanges
from hypjax.models.embedder import pooled_by
from hypjax.objectives import Group, Objective
from hypjax.training.lora import Lora
from hypjax.training.optim import configured_optimizer, layer_rates, learning_rate
from hypjax.types import View


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model with its objective, its optimiser, and the devices that share the work."""

    model: Embedder
    objective: Objective  # With scalars as before training.
    scalars: Scalars  # Learned ones.
    bounds: Mapping[str, tuple[float, float]]  # Of learned scalars, by name.
    optimizer: optax.GradientTransformation  # Of the trained parameters.
    schedule: optax.Schedule
    frozen: tuple[str, ...]
    lora: Lora | None
    ema_decay: float  # Of the moving average of the model that is evaluated; 0 for none.
    pixel_scaling: tuple[Sequence[float], Sequence[float]]  # Mean and deviation by channel.
    view: View
    mesh: Mesh
    microbatch: int  # Most images embedded at once; 0 for the whole batch.
    skip_nonfinite: bool
    cached_features: bool  # Whether batches hold what frozen layers compute, not pixels.
    # The block whose output is cached; None for the encoder's embeddings.
    cached_block: str | None
    colour_changes: ColourChanges | None
    gradient_covariance: bool  # Whether the spread of the images' gradients is measured.
    drop_path: float  # Rate of stochastic depth in the encoder's last block.
    seed: int  # Of the initial parameters and of the steps' random keys.


def build_learner(config: ConfigDict, mesh: Mesh | None = None) -> Learner:
    """Builds the learner that a validated configuration describes, without images."""
    return learner_of(Run(config, mesh=mesh))


def learner_of(run: Run) -> Learner:
    """Builds the learner of a run; its model pools as training does."""
    config, objective = run.config, run.objective
    model = pooled_by(run.model, config.model.pooling)
    train, fields = config.train, config.objective
    schedule = learning_rate(config.optim, train.total_steps)
    scalars = initial_scalars(fields)
    learned = [
        Group((f"log_{name}",), fields.c_rate if name in CURVATURES else 1.0, weight_decay=0.0)
        for name in scalars
    ]
    rates = None
    if (decay := config.optim.layer_decay) != 1:
        rates = layer_rates(model.encoder.layers, decay, head=model.head_kind != "none")
    options = {"layer_rate": rates, "head_warmup_steps": train.head_warmup_steps}
    changes = ColourChanges(config.data.colour_jitter, config.data.grey, config.data.blur)
    lora = Lora(train.lora_rank, train.lora_alpha, tuple(train.lora_targets))
    return Learner(
        model=model,
        objective=objective,
        scalars=scalars,
        bounds=bounds(fields),
        optimizer=configured_optimizer(
            config.optim, schedule, objective.groups, learned, **options
        ),
        schedule=schedule,
        frozen=tuple(config.optim.frozen),
        lora=lora if train.lora_rank else None,
        ema_decay=train.ema_decay,
        pixel_scaling=(config.data.mean, config.data.std),
        view=View.of(config.data),
        mesh=run.mesh,
        microbatch=config.run.microbatch,
        skip_nonfinite=train.on_nonfinite == "skip",
        cached_features=train.cached_features,
        cached_block=None,  # `hypjax.training.setup` chooses it.
        colour_changes=changes if np.any([*changes.jitter, *changes[1:]]) else None,
        gradient_covariance=config.run.gradient_covariance,
        drop_path=config.model.drop_path,
        seed=config.seed,
    )
