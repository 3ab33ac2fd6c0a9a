"""The learner: a train step's model, objective and optimiser, built from a configuration."""

import dataclasses

import optax
from jax.sharding import Mesh

from hypjax.geometry.learned import CURVATURES, Bounds, Scalars, bounds, initial_scalars
from hypjax.inference.run import Run
from hypjax.models import Embedder
from hypjax.models.colours import ColourChanges
from hypjax.models.embedder import pooled_by
from hypjax.objectives import Group, Objective
from hypjax.settings import Pixels, Step
from hypjax.training.lora import Lora
from hypjax.training.optim import configured_optimizer, layer_rates, learning_rate


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


def learner_of(run: Run) -> Learner:
    """Builds the learner of a run."""
    config, objective = run.config, run.objective
    data, optim, train = config.data, config.optim, config.train
    model = pooled_by(run.model, config.model.pooling)
    schedule = learning_rate(optim, train.total_steps)
    c_rate = config.objective.c_rate
    scalars = initial_scalars(config.objective)
    scalar_groups = [
        Group((f"log_{name}",), c_rate if name in CURVATURES else 1.0, weight_decay=0.0)
        for name in scalars
    ]
    layer_rate = None
    if optim.layer_decay != 1:
        layer_rate = layer_rates(model.encoder.layers, optim.layer_decay, model.head_kind != "none")
    options = {"layer_rate": layer_rate, "head_warmup_steps": train.head_warmup_steps}
    optimizer = configured_optimizer(optim, schedule, objective.groups, scalar_groups, **options)
    lora = Lora(train.lora_rank, train.lora_alpha, tuple(train.lora_targets))
    colours = ColourChanges(data.colour_jitter, data.grey, data.blur)
    return Learner(
        model=model,
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
        frozen=tuple(optim.frozen),
        lora=lora if train.lora_rank else None,
        pixels=run.pixels,
        colour_changes=colours if any((*data.colour_jitter, data.grey, data.blur)) else None,
        scalars=scalars,
        scalar_bounds=bounds(config.objective),
        step=Step(
            seed=config.seed,
            microbatch=config.run.microbatch,
            drop_path=config.model.drop_path,
            ema_decay=train.ema_decay,
            skips_nonfinite=train.on_nonfinite == "skip",
            gradient_covariance=config.run.gradient_covariance,
            takes_features=train.cached_features,
        ),
        mesh=run.mesh,
    )
