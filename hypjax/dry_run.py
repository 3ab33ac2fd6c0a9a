"""Estimates of a run's memory and time, from its first steps or from a lowered step."""

import contextlib
import dataclasses
import datetime
import math
import time
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from hypjax import parallel
from hypjax.assemble import assemble, assemble_learner, assemble_method, assemble_training
from hypjax.config import Config, flatten, own_copy, set_fields, validate
from hypjax.data.plans import TuplePlans
from hypjax.errors import UserError, is_out_of_memory, reason
from hypjax.experiment import engines
from hypjax.experiment.experiment import Experiment
from hypjax.inference.pretrained import released_model, starting_parameters
from hypjax.models.architectures import encoder_shapes
from hypjax.objectives import ProblemSizes
from hypjax.system import console, machine, targets
from hypjax.training.input import Input, features_to_keep, open_input
from hypjax.training.lowering import assumed_sizes, lower_step
from hypjax.training.setup import Training, print_summary
from hypjax.training.states import first_state, sharded_shapes
from hypjax.training.step import TrainState, evaluated_model, jit_train_step, shard_batch

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


def dry_run(config: Config, target: str | None = None) -> None:
    """Opens data and weights, embeds a batch, runs the first steps, and prints an estimate.

    Saves nothing but caches, and raises the errors that the run would raise in these steps. First
    prints the encoder's size, which needs neither data nor weights; if these are missing, also
    estimates the hours of training on GPUs. With a `target`, see `hypjax.system.targets`, it only
    compiles the step for these devices, without data and weights, and prints its memory.
    """
    config = own_copy(config)
    validate(config)
    _print_size(config)
    if target is not None:
        _print_memory_on(config, target)
        return
    if flatten(config)["train.total_steps"] == 0:
        method = assemble_method(config)
        params, parts = released_model(method, encoder_only=True)
        experiment = assemble(config, method=method, parts=parts)
        embedding_time = _time_of_embedding(experiment, params)
        print(f"no steps are trained; embedding every image once takes {embedding_time}")
        return
    try:
        method = assemble_method(config)
        pretrained = starting_parameters(method)
        training = assemble_training(config, method=method)
    except UserError:
        with contextlib.suppress(UserError):  # Some objectives need the data's classes.
            _print_gpu_hours(config)
        raise
    experiment, learner = training.experiment, training.learner
    state = first_state(learner, training.sizes, pretrained)
    print_summary(training, state.params)
    embedding_time = _time_of_embedding(experiment, evaluated_model(learner, state))
    with machine.memory_explained("train.batch_size, data.image_size or the model's size"):
        step_times = _time_steps(training, state)
    total, size = training.schedule.total_steps, training.sizes.batch_size
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
        set_fields(config, experiment.method.fields)  # With sizes fitted to the images.
        _print_gpu_hours(config, training.sizes)


def _print_size(config: Config) -> None:
    """Prints the number of the encoder's parameters, and of its operations on one image."""
    config = own_copy(config)
    # XLA does not count operations of cuDNN's attention.
    set_fields(config, {"model.precision": "float32"})
    method = assemble_method(config)
    encoder, view = method.model.encoder, method.pixels.view
    if not encoder.takes_pixels:
        return
    params, example = encoder_shapes(encoder, view.channels), encoder.example(view)
    lowered = jax.jit(encoder.apply).lower({"params": params}, example)
    millions, billions = optax.tree.size(params) / 1e6, _operations(lowered) / 2e9
    print(
        f"the encoder has {millions:.1f} million parameters and takes {billions:.2f} "
        "billion multiplications, each with an addition, for an image"
    )


def _time_of_embedding(experiment: Experiment, params: PyTree) -> datetime.timedelta:
    """Estimates the time to embed all images once, from one batch of the last split."""
    splits = experiment.splits
    datasets = [x for x in (splits.train, splits.validation, splits.test, splits.gallery) if x]
    # Without caches, which would need no time, and by what embeds so many images.
    is_many = max(map(len, datasets)) >= engines.FEWEST
    embedder = dataclasses.replace(experiment.embedder, cached=(), programs=None, is_final=is_many)
    if not embedder.model.encoder.takes_pixels:
        return datetime.timedelta(0)
    sample = datasets[-1][: embedder.options.batch_size]
    console.say("compiling the evaluation")
    params = parallel.place(params, parallel.replicated(embedder.mesh))  # Programs know them again.
    for _ in range(2):  # First, programs are compiled, and translated for an engine.
        start = time.perf_counter()
        embedder.points(params, sample, experiment.spaces(params))
        seconds = time.perf_counter() - start
    return datetime.timedelta(seconds=round(seconds / len(sample) * sum(map(len, datasets))))


def _time_steps(training: Training, state: TrainState) -> list[float]:
    """Runs the first steps and prints their memory; returns the seconds of each, with its input."""
    learner, mesh, plans = training.learner, training.learner.mesh, training.plans
    if isinstance(plans, TuplePlans):  # Any tuples take as long as mined tuples.
        plans = dataclasses.replace(plans, table=np.zeros(training.sizes.tuples, np.int32))
    steps = range(min(_STEPS, training.schedule.total_steps))
    if learner.step.takes_features:
        features = features_to_keep(training, state.params["model"])
        source = Input(training, features=np.zeros(features.shape, features.dtype))
    else:
        source = open_input(training, steps, state.params["model"])
    train_step = jit_train_step(learner, state)
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
    free = machine.free_memory(mesh)
    available = "" if free is None else f"; {free / _GIB:.2f} GiB are free now"
    print(_memory(compiled, state) + available)
    return seconds


def _memory(compiled: jax.stages.Compiled, state: TrainState) -> str:
    """Says what a compiled step needs of each device's memory; the state may be shapes."""
    memory: Any = compiled.memory_analysis()
    parameters, moments = map(_bytes_on_a_device, (state.params, state.opt_state))
    rest = memory.argument_size_in_bytes - parameters - moments
    return (
        f"memory of each device: {parameters / _GIB:.2f} GiB for parameters, "
        f"{moments / _GIB:.2f} for their moments, {rest / _GIB:.2f} for the batch, averages and "
        f"caches, and {memory.temp_size_in_bytes / _GIB:.2f} during a step, for gradients and "
        "activations"
    )


def _print_memory_on(config: Config, target: str) -> None:
    """Compiles the step for absent devices, and prints its memory, and whether it fits."""
    fields, devices = flatten(config), targets.devices_of(target)
    batch_size, samples = fields["train.batch_size"], fields["train.samples_per_class"]
    if not batch_size or fields["train.cached_features"]:
        advice = "set --config.train.batch_size and a recipe that trains the encoder"
        raise UserError(f"--target compiles steps on images in batches of a known size; {advice}")
    if fields["run.attention"] == "auto" and targets.is_absent_gpu(devices[0]):
        set_fields(config, {"run.attention": "cudnn"})
    mesh = parallel.create_mesh(fields["run.mesh"], devices, sharding=fields["run.sharding"])
    learner = assemble_learner(config, mesh)
    sizes = assumed_sizes(learner, batch_size, samples or 1)
    console.say(f"compiling the training step for {mesh.size} × {devices[0].device_kind}")
    remedy = f"lower --config.run.microbatch (now {fields['run.microbatch'] or batch_size}), set "
    remedy += "--config.run.remat=True, or --config.run.sharding=fsdp on several devices"
    options = parallel.compiler_options(mesh)
    try:
        compiled = lower_step(learner, sizes).compile(compiler_options=options)
    except RuntimeError as error:  # Of TPUs; for GPUs, XLA only tells the memory.
        if not is_out_of_memory(error):
            raise
        problem = f"the step does not fit into {target}: {reason(error)}"
        raise UserError(f"{problem}; {remedy}") from error
    print(_memory(compiled, sharded_shapes(learner, sizes)))
    memory: Any = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    verdict, advice = "fits into", ""
    room = f"each chip of {target}"  # Else XLA would not have compiled it.
    if gpu := targets.gpu_of(target):
        room = f"the {gpu.memory / _GIB:.2f} GiB of {gpu.name}"
        if total >= gpu.memory:
            verdict, advice = "does not fit into", f"; {remedy}"
    print(f"{total / _GIB:.2f} GiB in all, which {verdict} {room}{advice}")


def _bytes_on_a_device(tree: PyTree) -> int:
    """Bytes of the parts of arrays that a device holds."""
    shards = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def step_operations(config: Config, sizes: ProblemSizes | None = None) -> float:
    """Counts the additions and multiplications in the lowered training step."""
    config = own_copy(config)
    # XLA counts the body of a loop once, and operations of cuDNN's attention not at all.
    set_fields(config, {"run.microbatch": 0, "model.precision": "float32"})
    learner = assemble_learner(config, parallel.create_mesh((1, 1), jax.devices()[:1]))
    if sizes is None:
        fields = flatten(config)
        batch_size, samples = fields["train.batch_size"], fields["train.samples_per_class"]
        sizes = assumed_sizes(learner, batch_size, samples)
    return _operations(lower_step(learner, sizes))


def _operations(lowered: jax.stages.Lowered) -> float:
    analysis = lowered.cost_analysis()
    assert analysis is not None  # XLA counts operations on all devices that are supported.
    return analysis["flops"]


def _print_gpu_hours(config: Config, sizes: ProblemSizes | None = None) -> None:
    """Estimates the hours of training on GPUs, if the run trains on images in known steps."""
    fields = flatten(config)
    total_steps = fields["train.total_steps"]
    if fields["train.cached_features"] or not (fields["train.batch_size"] and total_steps):
        return
    operations = step_operations(config, sizes)
    times = []
    for name, (peak, bandwidth, bytes_per_operation) in _GPUS.items():
        # Each kernel of a step either moves bytes or computes products, so their times add up.
        seconds = operations * (1 / peak + bytes_per_operation / bandwidth) / _EFFICIENCY
        minutes = math.ceil(total_steps * seconds / 60)
        times.append(f"{datetime.timedelta(minutes=minutes)} on one {name}")
    print(
        f"{total_steps} steps of {operations / 1e12:.3g} TFLOP take about {', '.join(times)} "
        "(estimated from the computed program; the input may be slower)"
    )
