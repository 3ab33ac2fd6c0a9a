"""Hours that training takes on GPUs, estimated from the program of one step."""

import datetime
import math

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.objectives import ProblemSizes
from hypjax.training.learner import Learner, build_learner
from hypjax.training.step import create_state, jit_train_step, make_train_step
from hypjax.types import Batch

# Operations and bytes per second in NVIDIA's data sheets, and the bytes that the compiled step of
# ViT-S/16 moves for each operation of a product (docs/scale.md). A T4 computes in float32.
_GPUS = {
    "T4": (8.1e12, 320e9, 0.0173),
    "A100": (312e12, 2039e9, 0.00504),
    "H100": (989e12, 3352e9, 0.00504),
}
# The least time by these figures, as a share of the 86.0 ms that a step took on an H200.
_EFFICIENCY = 0.57


def gpu_hours(operations: float, steps: int) -> dict[str, float]:
    """Estimates the hours of training on GPUs, by name, from the operations of one step.

    Each kernel of a step either moves bytes or computes products, so their times are added.
    """
    return {
        name: steps * operations * (1 / peak + moved / bandwidth) / _EFFICIENCY / 3600
        for name, (peak, bandwidth, moved) in _GPUS.items()
    }


def step_operations(config: ConfigDict, spec: ProblemSizes | None = None) -> float:
    """Counts the additions and multiplications in the lowered training step."""
    config = config.copy_and_resolve_references()
    config.run.microbatch = 0  # The body of a loop counts once,
    config.model.precision = "float32"  # and what cuDNN's attention computes not at all.
    learner = build_learner(config, parallel.create_mesh((1, 1), jax.devices()[:1]))
    lowered = lower_step(learner, spec or assumed_sizes(config, learner))
    return lowered.cost_analysis()["flops"]


def assumed_sizes(config: ConfigDict, learner: Learner) -> ProblemSizes:
    """Sizes of a training split of ten batches, for use without the data."""
    size, samples = config.train.batch_size, config.train.samples_per_class
    dims = learner.model.encoder.dim, learner.model.head_dim
    return ProblemSizes(10 * size // samples, samples, *dims, 10 * size, size)


def lower_step(learner: Learner, spec: ProblemSizes) -> jax.stages.Lowered:
    """Lowers the training step for images, with shapes in place of parameters and batch."""
    mesh, view = learner.mesh, learner.view
    state = jax.eval_shape(lambda: create_state(learner, spec))
    shardings = parallel.parameter_shardings(mesh, state)
    state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state, shardings)
    rows = parallel.slices(spec.batch_size, mesh, learner.microbatch).rows
    shape = (rows, view.side, view.side, view.channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=parallel.sharded(mesh))
    replicated = parallel.replicated(mesh)
    numbers = jax.ShapeDtypeStruct((spec.batch_size,), jnp.int32, sharding=replicated)
    flips = jax.ShapeDtypeStruct((rows,), jnp.bool, sharding=parallel.sharded(mesh))
    step = jit_train_step(make_train_step(learner), mesh, state)
    return step.lower(state, Batch(images, numbers, numbers, flips))


def print_gpu_hours(config: ConfigDict, spec: ProblemSizes | None = None) -> None:
    """Prints an estimate for a run that trains on images, if its batches and steps are known."""
    train = config.train
    if train.cached_features or not (train.batch_size and train.total_steps):
        return
    operations = step_operations(config, spec)
    hours = gpu_hours(operations, train.total_steps)
    times = {name: datetime.timedelta(minutes=math.ceil(60 * x)) for name, x in hours.items()}
    print(
        f"{train.total_steps} steps of {operations / 1e12:.3g} TFLOP take about "
        + ", ".join(f"{time} on one {name}" for name, time in times.items())
        + " (estimated from the computed program; the input may be slower)"
    )
