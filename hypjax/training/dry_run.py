"""Estimates of a run's memory and time, from its first steps."""

import contextlib
import dataclasses
import datetime
import time

import jax
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config import validate
from hypjax.data.plans import TuplePlans
from hypjax.inference.pretrained import only_encoder
from hypjax.inference.run import Run
from hypjax.models import create_embedder
from hypjax.models.architectures import encoder_shapes
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.system import console, machine
from hypjax.training.input import Input, features_to_keep, open_input
from hypjax.training.setup import TrainingRun, print_summary
from hypjax.training.states import build_with_weights, random_state, with_pretrained
from hypjax.training.step import (
    TrainState,
    evaluated_model,
    jit_train_step,
    make_train_step,
    shard_batch,
)
from hypjax.types import View

_STEPS = 6  # Steps to run; the first is not timed.
_GIB = 2**30


def dry_run(config: ConfigDict) -> None:
    """Opens data and weights, embeds a batch, runs the first steps, and prints an estimate.

    Saves nothing but caches, and raises the errors that the run would raise in these steps.
    """
    validate(config)
    if config.train.total_steps == 0:
        run = Run(config, parts=["encoder"])
        embedding = _seconds_of_embedding(run, only_encoder(run))
        print(f"no steps are trained; embedding every image once takes {_time(embedding)}")
        return
    run, pretrained = build_with_weights(Run(config))
    state = random_state(run.learner, run.spec)
    print_summary(run, state.params)
    _print_size(config)
    state = with_pretrained(run.learner, state, pretrained)
    embedding = _seconds_of_embedding(run, evaluated_model(run.learner, state))
    with machine.memory_explained("train.batch_size, data.image_size or the model's size"):
        seconds = _seconds_of_steps(run, state)
    total, size = run.config.train.total_steps, run.config.train.batch_size
    if not seconds:
        print(f"{total} steps are too few to time")
        return
    step = float(np.median(seconds))
    print(
        f"a step takes {step:.3g} s ({size / step:,.0f} images per second), so {total} steps take "
        f"about {_time(step * total)}, and embedding every image once {_time(embedding)}"
    )


def _time(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=round(seconds))


def _print_size(config: ConfigDict) -> None:
    """Prints the encoder's parameters, and an image's operations as XLA counts them."""
    config = config.copy_and_resolve_references()
    config.model.precision = "float32"  # XLA does not count operations of cuDNN's attention.
    encoder = create_embedder(config, evaluating=True).encoder
    if not encoder.takes_pixels:
        return
    params = encoder_shapes(encoder, config.data.channels)
    lowered = jax.jit(encoder.apply).lower(
        {"params": params}, encoder.example(View.of(config.data))
    )
    cost = lowered.cost_analysis()
    count = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"the encoder has {count / 1e6:.1f} million parameters and takes {cost['flops'] / 2e9:.2f} "
        "billion multiplications, each with an addition, for an image"
    )


def _seconds_of_embedding(run: Run, params: PyTree) -> float:
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
    images = sum(len(part) for part in parts if part)
    return stopwatch.seconds()["evaluation"] / len(sample) * images


def _seconds_of_steps(run: TrainingRun, state: TrainState) -> list[float]:
    """Runs the first steps, prints the memory of their program, and returns their seconds."""
    mesh, plans = run.mesh, run.plans
    if isinstance(plans, TuplePlans):  # Any tuples take as long as mined tuples.
        plans = dataclasses.replace(plans, table=np.zeros(run.spec.tuples, np.int32))
    steps = range(min(_STEPS, run.config.train.total_steps))
    if run.config.train.cached_features:
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
    state_size, step_size = sizes.argument_size_in_bytes / _GIB, sizes.temp_size_in_bytes / _GIB
    print(
        f"memory of each device: {state_size:.2f} GiB for parameters, their moments, the batch and "
        f"caches, and {step_size:.2f} GiB during a step{available}"
    )
    return seconds
