"""Estimates of a run's memory and time, from its first steps or from a lowered step."""

import contextlib
import dataclasses
import datetime
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config import validate
from hypjax.data.plans import TuplePlans
from hypjax.errors import UserError
from hypjax.inference.pretrained import released_model
from hypjax.inference.run import Run
from hypjax.models import create_embedder
from hypjax.models.architectures import encoder_shapes
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.objectives import ProblemSizes
from hypjax.system import console, machine
from hypjax.training.input import Input, features_to_keep, open_input
from hypjax.training.learner import Learner, learner_of
from hypjax.training.setup import TrainingRun, print_summary
from hypjax.training.states import build_with_weights, random_state, with_pretrained
from hypjax.training.step import (
    TrainState,
    create_state,
    evaluated_model,
    jit_train_step,
    shard_batch,
)
from hypjax.types import Batch, View

_STEPS = 6  # Batches to load; the last is not trained on.
_GIB = 2**30
# Operations and bytes per second from NVIDIA's data sheets, and the bytes that the compiled step of
# ViT-S/16 moves per operation of a matrix product (docs/scale.md). A T4 computes in float32.
_GPUS = {
    "T4": (8.1e12, 320e9, 0.0173),
    "A100": (312e12, 2039e9, 0.00504),
    "H100": (989e12, 3352e9, 0.00504),
}
# The step's shortest time by these figures, divided by the 86.0 ms that it took on an H200.
_EFFICIENCY = 0.57


def dry_run(config: ConfigDict) -> None:
    """Opens data and weights, embeds a batch, runs the first steps, and prints an estimate.

    Saves nothing but caches, and raises the errors that the run would raise in these steps. If data
    or weights are missing, first estimates the hours of training on GPUs.
    """
    validate(config)
    if config.train.total_steps == 0:
        run = Run(config, parts=["encoder"])
        embedding_time = _time_of_embedding(run, released_model(run, encoder_only=True))
        print(f"no steps are trained; embedding every image once takes {embedding_time}")
        return
    try:
        run, pretrained = build_with_weights(Run(config))
    except UserError:
        with contextlib.suppress(UserError):  # Some objectives need the data's classes.
            _print_gpu_hours(config)
        raise
    state = random_state(run.learner, run.spec)
    print_summary(run, state.params)
    _print_size(config)
    state = with_pretrained(run.learner, state, pretrained)
    embedding_time = _time_of_embedding(run, evaluated_model(run.learner, state))
    with machine.memory_explained("train.batch_size, data.image_size or the model's size"):
        step_times = _time_steps(run, state)
    total, size = run.config.train.total_steps, run.config.train.batch_size
    if not step_times:
        print(f"{total} steps are too few to time")
        return
    seconds = float(np.median(step_times))
    print(
        f"a step takes {seconds:.3g} s ({size / seconds:,.0f} images per second), so {total} steps "
        f"take about {datetime.timedelta(seconds=round(seconds * total))}, and embedding every "
        f"image once {embedding_time}"
    )
    if jax.default_backend() == "cpu":
        _print_gpu_hours(run.config, run.spec)


def _print_size(config: ConfigDict) -> None:
    """Prints the number of the encoder's parameters, and of its operations on one image."""
    config = config.copy_and_resolve_references()
    config.model.precision = "float32"  # XLA does not count operations of cuDNN's attention.
    encoder = create_embedder(config, evaluating=True).encoder
    if not encoder.takes_pixels:
        return
    params = encoder_shapes(encoder, config.data.channels)
    example = encoder.example(View.of(config.data))
    lowered = jax.jit(encoder.apply).lower({"params": params}, example)
    millions, billions = optax.tree.size(params) / 1e6, lowered.cost_analysis()["flops"] / 2e9
    print(
        f"the encoder has {millions:.1f} million parameters and takes {billions:.2f} "
        "billion multiplications, each with an addition, for an image"
    )


def _time_of_embedding(run: Run, params: PyTree) -> datetime.timedelta:
    """Estimates the time to embed all images once, from one batch of test images."""
    # Without the cache of embeddings, which would need no time.
    embedder, splits = dataclasses.replace(run.embedder, cached=()), run.splits
    if not embedder.model.encoder.takes_pixels:
        return datetime.timedelta(0)
    sample = splits.test.take(np.arange(min(run.config.run.eval_batch_size, len(splits.test))))
    console.say("compiling the evaluation")
    stopwatch = Stopwatch()
    with stopwatch.part("evaluation"):  # Its time excludes compilation.
        embedder.points(params, sample, run.spaces(params))
    datasets = (splits.train, splits.validation, splits.test, splits.gallery)
    num_images = sum(len(images) for images in datasets if images)
    seconds = stopwatch.seconds()["evaluation"] / len(sample) * num_images
    return datetime.timedelta(seconds=round(seconds))


def _time_steps(run: TrainingRun, state: TrainState) -> list[float]:
    """Runs the first steps and prints their memory; returns the seconds of each, with its input."""
    mesh, plans = run.mesh, run.plans
    if isinstance(plans, TuplePlans):  # Any tuples take as long as mined tuples.
        plans = dataclasses.replace(plans, table=np.zeros(run.spec.tuples, np.int32))
    steps = range(min(_STEPS, run.config.train.total_steps))
    if run.config.train.cached_features:
        features = features_to_keep(run, state.params["model"])
        source = Input(run, features=np.zeros(features.shape, features.dtype))
    else:
        source = open_input(run, steps, state.params["model"])
    train_step = jit_train_step(run.learner, state)
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
    memory, free = compiled.memory_analysis(), machine.free_memory(mesh)
    available = "" if free is None else f"; {free / _GIB:.2f} GiB are free now"
    print(
        f"memory of each device: {memory.argument_size_in_bytes / _GIB:.2f} GiB for parameters, "
        "their moments, the batch and caches, and "
        f"{memory.temp_size_in_bytes / _GIB:.2f} GiB during a step{available}"
    )
    return seconds


def step_operations(config: ConfigDict, spec: ProblemSizes | None = None) -> float:
    """Counts the additions and multiplications in the lowered training step."""
    config = config.copy_and_resolve_references()
    # XLA counts the body of a loop once, and operations of cuDNN's attention not at all.
    config.run.microbatch = 0
    config.model.precision = "float32"
    learner = learner_of(Run(config, mesh=parallel.create_mesh((1, 1), jax.devices()[:1])))
    return lower_step(learner, spec or assumed_sizes(config, learner)).cost_analysis()["flops"]


def assumed_sizes(config: ConfigDict, learner: Learner) -> ProblemSizes:
    """Assumes a training set of ten batches, and ten classes in each coarse class."""
    batch_size, samples_per_class = config.train.batch_size, config.train.samples_per_class
    classes = 10 * batch_size // samples_per_class
    return ProblemSizes(
        classes=classes,
        samples_per_class=samples_per_class,
        encoder_dim=learner.model.encoder.dim,
        head_dim=learner.model.head_dim,
        training_images=10 * batch_size,
        batch_size=batch_size,
        coarse_labels=(tuple(label // 10 for label in range(classes)),),
    )


def lower_step(learner: Learner, spec: ProblemSizes) -> jax.stages.Lowered:
    """Lowers the training step on images, from the shapes of parameters and batch."""
    mesh, view = learner.mesh, learner.pixels.view
    state = jax.eval_shape(lambda: create_state(learner, spec))
    shardings = parallel.parameter_shardings(mesh, state)
    state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state, shardings)
    rows = parallel.slices(spec.batch_size, mesh, learner.step.microbatch).rows
    shape = (rows, view.side, view.side, view.channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=parallel.sharded(mesh))
    replicated = parallel.replicated(mesh)
    integers = jax.ShapeDtypeStruct((spec.batch_size,), jnp.int32, sharding=replicated)
    flips = jax.ShapeDtypeStruct((rows,), jnp.bool, sharding=parallel.sharded(mesh))
    batch = Batch(images, labels=integers, ids=integers, flips=flips)
    return jit_train_step(learner, state).lower(state, batch)


def _print_gpu_hours(config: ConfigDict, spec: ProblemSizes | None = None) -> None:
    """Estimates the hours of training on GPUs, if the run trains on images in known steps."""
    train = config.train
    if train.cached_features or not (train.batch_size and train.total_steps):
        return
    operations = step_operations(config, spec)
    times = []
    for name, (peak, bandwidth, bytes_per_operation) in _GPUS.items():
        # Each kernel of a step either moves bytes or computes products, so their times add up.
        seconds = operations * (1 / peak + bytes_per_operation / bandwidth) / _EFFICIENCY
        minutes = math.ceil(train.total_steps * seconds / 60)
        times.append(f"{datetime.timedelta(minutes=minutes)} on one {name}")
    print(
        f"{train.total_steps} steps of {operations / 1e12:.3g} TFLOP take about {', '.join(times)} "
        "(estimated from the computed program; the input may be slower)"
    )
