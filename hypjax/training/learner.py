"""The learner: a train step's model, objective and optimiser, built from a configuration."""

import dataclasses

import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hypjax.geometry.learned import CURVATURES, initial_scalars
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

    config: ConfigDict
    model: Embedder  # With the pooling of training.
    objective: Objective  # With the initial values of learned scalars.
    optimizer: optax.GradientTransformation  # For the trained parameters.
    schedule: optax.Schedule
    frozen: tuple[str, ...]
    lora: Lora | None
    view: View
    mesh: Mesh
    colour_changes: ColourChanges | None
    # With cached features, the block whose output is cached; None for the encoder's embeddings.
    cached_block: str | None = None


def learner_of(run: Run) -> Learner:
    """Builds the learner of a run."""
    config, objective = run.config, run.objective
    model = pooled_by(run.model, config.model.pooling)
    train, fields = config.train, config.objective
    schedule = learning_rate(config.optim, train.total_steps)
    scalar_groups = [
        Group((f"log_{name}",), fields.c_rate if name in CURVATURES else 1.0, weight_decay=0.0)
        for name in initial_scalars(fields)
    ]
    rates = None
    if (decay := config.optim.layer_decay) != 1:
        rates = layer_rates(model.encoder.layers, decay, head=model.head_kind != "none")
    options = {"layer_rate": rates, "head_warmup_steps": train.head_warmup_steps}
    changes = ColourChanges(config.data.colour_jitter, config.data.grey, config.data.blur)
    lora = Lora(train.lora_rank, train.lora_alpha, tuple(train.lora_targets))
    groups = objective.groups, scalar_groups
    optimizer = configured_optimizer(config.optim, schedule, *groups, **options)
    return Learner(
        config=config,
        model=model,
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
        frozen=tuple(config.optim.frozen),
        lora=lora if train.lora_rank else None,
        view=View.of(config.data),
        mesh=run.mesh,
        colour_changes=changes if np.any([*changes.jitter, *changes[1:]]) else None,
    )
