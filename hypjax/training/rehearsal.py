"""A rehearsal of a run: everything up to its first steps, without a trace on the disk."""

import contextlib
import dataclasses
import time

import jax
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.data.dataset import Dataset
from hypjax.data.plans import TuplePlans
from hypjax.inference import matches
from hypjax.inference.weights import warn_of_known_classes
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.system import console, machine
from hypjax.training.input import Input, activations_to_keep, open_input
from hypjax.training.setup import Setup, build, describe
from hypjax.training.states import (
    check_paths,
    random_state,
    starting_parameters,
    with_pretrained,
)
from hypjax.training.step import (
    TrainState,
    evaluated_model,
    jit_train_step,
    make_train_step,
    shard_batch,
)

_STEPS = 6  # Steps that are run; the first is not timed.
_GIB = 2**30


def rehearse(config: ConfigDict) -> None:
    """Opens the data and the weights, embeds a batch, runs a few steps and reports.

    Memory and expected time, evaluations included, are printed. No folder is created, and nothing
    is saved but the caches. Raises what the run itself would raise until then.
    """
    setup = build(config)
    learner, config = setup.learner, setup.config
    check_paths(setup)
    state = random_state(learner, setup.spec)
    describe(setup, state.params)
    warn_of_known_classes(config, setup.splits.fingerprint)
    state = with_pretrained(learner, state, starting_parameters(config, learner))
    embedding = _seconds_of_embedding(setup, evaluated_model(learner, state))
    embedding *= _embedded(setup)
    with machine.memory_explained("train.batch_size, data.image_size or the model's size"):
        _report(setup, embedding, *_run(setup, state))


def _seconds_of_embedding(setup: Setup, params: PyTree) -> float:
    """Seconds that evaluation spends on an image, measured with one batch."""
    images, stopwatch = setup.evaluator.images, Stopwatch()
    if not images.model.encoder.takes_pixels:
        return 0.0
    size, test = images.source.batch_size, setup.splits.test
    sample = test.take(np.arange(min(size, len(test))))
    console.say("compiling the evaluation")
    with stopwatch.part("evaluation"):
        if images.encodings is not None:
            images.encodings.encode(params, sample)
        else:
            images.points(params, sample)
    return stopwatch.seconds()["evaluation"] / size


def _embedded(setup: Setup) -> int:
    """Number of images, padding included, that evaluations and the report embed."""
    config, splits, kept = setup.config, setup.splits, setup.evaluator.images.encodings
    size, total, every = config.run.eval_batch_size, config.train.total_steps, config.eval.every

    def rows(*datasets: Dataset | None) -> int:
        anew = [images for images in filter(None, datasets) if not (kept and kept.keeps(images))]
        return sum(-(-len(images) // size) * size for images in anew)

    scored = rows(*(images for task in splits.tasks.values() for images in task[:2]))
    fitted = rows(splits.train) if any(config.eval.pca.values()) else 0
    validation = rows(splits.validation) + fitted
    states = 2 + (splits.validation is not None)  # Untrained, final and best.
    count = states * (scored + fitted)
    if splits.validation is not None:
        count += (2 + (-(-total // every) if every else 1)) * validation
    if chosen := matches.choose(splits):
        count += rows(*chosen[1:])
    if config.run.report and jax.process_count() == 1:
        count += rows(splits.test, splits.gallery)
    return count + (-(-len(kept) // size) * size if kept else 0)


def _open(setup: Setup, steps: range, state: TrainState) -> Input:
    """The input of the steps, with features that take as long as those of the images."""
    workers = setup.config.run.workers
    if setup.learner.cached_features:
        kept = jax.ShapeDtypeStruct((len(setup.splits.train), setup.spec.encoder_dim), np.float32)
        if setup.learner.block is not None:
            kept = activations_to_keep(setup, state.params["model"])
        return Input(setup, workers, features=np.zeros(kept.shape, kept.dtype))
    return open_input(setup, steps, workers, state.params["model"])


def _run(setup: Setup, state: TrainState) -> tuple[float, float, list[float]]:
    """Returns bytes of the program's arguments and of its temporaries, and seconds of each step."""
    mesh, total, plans = setup.learner.mesh, setup.config.train.total_steps, setup.plans
    if isinstance(plans, TuplePlans):  # Any tuples take the time of mined ones.
        plans = dataclasses.replace(plans, table=np.zeros(setup.spec.tuples, np.int32))
    steps = range(min(_STEPS, total))
    source = _open(setup, steps, state)
    train_step = jit_train_step(make_train_step(setup.learner), mesh, state)
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
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes, sizes.temp_size_in_bytes, seconds


def _report(
    setup: Setup, embedding: float, arguments: float, temporary: float, seconds: list[float]
) -> None:
    free = machine.free_memory(setup.learner.mesh)
    available = "" if free is None else f"; {free / _GIB:.2f} GiB are free now"
    print(
        f"memory of each device: {arguments / _GIB:.2f} GiB for parameters, their moments, the "
        f"batch and caches, and {temporary / _GIB:.2f} GiB during a step{available}"
    )
    config, total = setup.config, setup.config.train.total_steps
    aim = "evaluations and the report" if config.run.report else "evaluations"
    print(f"embedding images for {aim} takes about {_duration(embedding)}")
    if not seconds:
        print(f"{total} steps are too few to time")
        return
    step = float(np.median(seconds))
    print(
        f"a step takes {step:.3g} s ({config.train.batch_size / step:,.0f} images per second), so "
        f"{total} steps take about {_duration(step * total)}, and with these embeddings "
        f"{_duration(step * total + embedding)}; compiling, scoring and saving come on top"
    )
    if isinstance(setup.plans, TuplePlans):
        print("mining negatives, once an epoch, comes on top, too")


def _duration(seconds: float) -> str:
    """A duration in the two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
