"""Estimates of a run's memory and time: measured on its first steps, and computed for GPUs."""

import contextlib
import dataclasses
import datetime
import time

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config import validate
from hypjax.data.plans import TuplePlans
from hypjax.errors import UserError
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.objectives import ProblemSizes
from hypjax.system import console, machine
from hypjax.training.input import Input, features_to_keep, open_input
from hypjax.training.learner import Learner, build_learner
from hypjax.training.setup import TrainingRun, build, print_summary
from hypjax.training.states import random_state, starting_parameters, with_pretrained
from hypjax.training.step import (
    TrainState,
    create_state,
    evaluated_model,
    jit_train_step,
    make_train_step,
    shard_batch,
)
from hypjax.types import Batch

_STEPS = 6  # Steps that are run; the first is not timed.
_GIB = 2**30
# Products per second and bytes per second of NVIDIA's data sheets, and the bytes that the compiled
# step of ViT-S/16 moves for each operation of a product (docs/scale.md). A T4 computes in float32.
_GPUS = {
    "T4": (8.1e12, 320e9, 0.0173),
    "A100": (312e12, 2039e9, 0.00504),
    "H100": (989e12, 3352e9, 0.00504),
}
# Of the least time that these give, the share in the 86.0 ms that a step took on an H200.
_EFFICIENCY = 0.57


def dry_run(config: ConfigDict) -> None:
    """Opens data and weights, embeds a batch, runs a few steps and prints an estimate.

    Saves nothing but the caches, and raises what the run itself would raise until then. If data or
    weights are missing, it first estimates the hours of training on GPUs.
    """
    validate(config)
    try:
        run = build(config)
        start = starting_parameters(run)
    except UserError:
        with contextlib.suppress(UserError):  # Some objectives need the classes of the data.
            _print_gpu_hours(config)
        raise
    state = random_state(run.learner, run.spec)
    print_summary(run, state.params)
    state = with_pretrained(run.learner, state, start)
    embedding = _seconds_of_embedding(run, evaluated_model(run.learner, state))
    with machine.memory_explained("train.batch_size, data.image_size or the model's size"):
        seconds = _seconds_of_steps(run, state)
    total, size = run.config.train.total_steps, run.config.train.batch_size
    if not seconds:
        print(f"{total} steps are too few to time")
        return
    step = float(np.median(seconds))
    whole, once = (datetime.timedelta(seconds=round(x)) for x in (step * total, embedding))
    print(
        f"a step takes {step:.3g} s ({size / step:,.0f} images per second), so {total} steps take "
        f"about {whole}, and embedding every image once {once}"
    )
    if jax.default_backend() == "cpu":
        _print_gpu_hours(run.config)


def gpu_hours(operations: float, steps: int) -> dict[str, float]:
    """Estimates the hours of training on GPUs, by name.

    Each kernel of a step either moves bytes or computes products, so their times are added.

    Args:
        operations: Additions and multiplications of one step.
        steps: Number of steps.
    """
    return {
        name: steps * operations * (1 / peak + moved / bandwidth) / _EFFICIENCY / 3600
        for name, (peak, bandwidth, moved) in _GPUS.items()
    }


def step_operations(config: ConfigDict) -> float:
    """Counts the operations of a training step in its lowered program, without data or weights."""
    learner = build_learner(config, parallel.create_mesh((1, 1), jax.devices()[:1]))
    learner = dataclasses.replace(learner, microbatch=0)  # The body of a loop counts once.
    return lower_step(learner, assumed_sizes(config, learner)).cost_analysis()["flops"]


def assumed_sizes(config: ConfigDict, learner: Learner) -> ProblemSizes:
    """Returns the sizes of a training split of ten batches, where the data are not at hand."""
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


def _print_gpu_hours(config: ConfigDict) -> None:
    train = config.train
    if train.cached_features or not (train.batch_size and train.total_steps):
        return
    operations = step_operations(config)
    hours = gpu_hours(operations, train.total_steps)
    times = {name: datetime.timedelta(minutes=np.ceil(60 * x)) for name, x in hours.items()}
    print(
        f"{train.total_steps} steps of {operations / 1e12:.3g} TFLOP take about "
        + ", ".join(f"{time} on one {name}" for name, time in times.items())
        + " (estimated from the computed program; the input may be slower)"
    )


def _seconds_of_embedding(run: TrainingRun, params: PyTree) -> float:
    """Estimates the seconds to embed all images once, from one batch."""
    embedder, splits = dataclasses.replace(run.embedder, cached=()), run.splits
    if not embedder.model.encoder.takes_pixels:
        return 0.0
    sample = splits.test.take(np.arange(min(run.config.run.eval_batch_size, len(splits.test))))
    console.say("compiling the evaluation")
    stopwatch = Stopwatch()
    with stopwatch.part("evaluation"):
        embedder.points(params, sample, run.spaces(params))
    parts = (splits.train, splits.validation, splits.test, splits.gallery)
    return stopwatch.seconds()["evaluation"] / len(sample) * sum(len(x) for x in parts if x)


def _seconds_of_steps(run: TrainingRun, state: TrainState) -> list[float]:
    """Runs the first steps, and prints the memory that their program needs."""
    mesh, plans = run.mesh, run.plans
    if isinstance(plans, TuplePlans):  # Any tuples take the time of mined ones.
        plans = dataclasses.replace(plans, table=np.zeros(run.spec.tuples, np.int32))
    steps = range(min(_STEPS, run.config.train.total_steps))
    if run.learner.cached_features:
        features = features_to_keep(run, state.params["model"])
        source = Input(run, features=np.zeros(features.shape, features.dtype))
    else:
        source = open_input(run, steps, state.params["model"])
    train_step = jit_train_step(make_train_step(run.learner), mesh, state)
    seconds = []
    with contextlib.closing(source.batches(steps, plans)) as batches:
        batch = shard_batch(mesh, next(batches))
        console.say("compiling the training step")
        compiled = train_step.lower(state, batch, store=source.store).compile()
        for _ in steps[1:]:
            start = time.perf_counter()
            state, _ = compiled(state, batch, store=source.store)
            batch = shard_batch(mesh, next(batches))
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - start)
    sizes, free = compiled.memory_analysis(), machine.free_memory(mesh)
    available = "" if free is None else f"; {free / _GIB:.2f} GiB are free now"
    print(
        f"memory of each device: {sizes.argument_size_in_bytes / _GIB:.2f} GiB for parameters, "
        "their moments, the batch and caches, and "
        f"{sizes.temp_size_in_bytes / _GIB:.2f} GiB during a step{available}"
    )
    return seconds
