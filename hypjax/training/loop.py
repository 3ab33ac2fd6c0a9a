"""The loop over the steps: it trains, validates, saves, and stops when it is interrupted."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.data.parts import Task
from hypjax.errors import Interrupted
from hypjax.monitoring.health import FiniteWatch, HealthWatch
from hypjax.monitoring.monitor import Monitor, Trace
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import Telemetry
from hypjax.parallel import processes
from hypjax.runs.checkpoints import SharedCheckpoints
from hypjax.system import console, exits, machine
from hypjax.training.input import Feed
from hypjax.training.setup import Setup
from hypjax.training.states import Measured, save
from hypjax.training.step import TrainState, TrainStep, shard_batch
from hypjax.types import Recalls

_STOPPING = "interrupted: finishing this step and saving; once more to stop at once"


class Cadence(NamedTuple):
    """How often the loop does what it does besides training.

    Attributes:
        total: Steps of the run.
        log: Steps between reports.
        validate: Steps between evaluations on the validation classes; 0 for the last step only.
        save: Steps between checkpoints.
    """

    total: int
    log: int
    validate: int
    save: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs the remaining steps of a run.

    A checkpoint is saved every `cadence.save` steps, whenever the validation score is the highest
    so far, after the last step, and when training has to stop.

    Attributes:
        cadence: How often to report, validate and save.
        train_step: One step, jitted.
        mesh: The devices.
        validate: Scores the model's parameters on the validation classes, or None if there are
            none. Called every `cadence.validate` steps and after the last.
        selecting: Name of the head's validation score that selects the best checkpoint.
        checkpoints: The run's checkpoints.
        monitor: Watches every step.
    """

    cadence: Cadence
    train_step: TrainStep
    mesh: Mesh
    validate: Callable[[PyTree], Recalls] | None
    selecting: str
    checkpoints: SharedCheckpoints
    monitor: Monitor

    def run(self, state: TrainState, measured: Measured, feed: Feed) -> tuple[TrainState, Measured]:
        """Runs the steps that remain.

        Args:
            state: The state to start from; it is overwritten.
            measured: Scores measured so far.
            feed: Batches of the remaining steps.

        Returns:
            The state after the last step, and the scores measured until then.

        Raises:
            UserError: A loss is not finite, or an image can no longer be read.
            Interrupted: An interrupt arrived; the state is saved.
        """
        first, total = int(state.step), self.cadence.total
        agreed = processes.Agreement(self.mesh)
        with (
            exits.deferred(_STOPPING) as interrupted,
            machine.memory_explained("train.batch_size, data.image_size or the model's size"),
        ):
            if first < total:
                console.say("compiling the training step")
            for step in range(first + 1, total + 1):
                try:
                    with self.monitor.waiting(step):
                        state, batch = feed.next(state, step - 1)
                except Exception:  # An image cannot be read, or an interrupt ended the workers.
                    if jax.process_count() > 1:
                        raise  # The other processes wait in this step and cannot help to save.
                    self.monitor.settle()
                    if step > first + 1:
                        save(self.checkpoints, state, measured)
                    if interrupted():
                        self._stop(step - 1, interrupted.status)
                    raise
                with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
                    state, metrics = self.train_step(state, shard_batch(self.mesh, batch))
                last = step == total
                saving = last or _due(step, self.cadence.save)
                validating = self.validate and (last or _due(step, self.cadence.validate))
                self.monitor.add(step, batch.ids, metrics)
                if saving or validating or _due(step, self.cadence.log):
                    self.monitor.report(step, judging=not interrupted.status)
                score = None
                if validating:
                    measured = self._validated(step, state, measured)
                    score, best = measured.selecting(self.selecting), self.checkpoints.best_score
                    saving |= best is None or score > best
                status = agreed(interrupted.status)
                stopping = status and not last
                if saving or stopping:
                    self.monitor.report(step, judging=not stopping)
                    with self.monitor.timing("saving"):
                        save(self.checkpoints, state, measured, score)
                if stopping:
                    self._stop(step, status)
        if total > first:
            console.say(self.monitor.summary())
        if skipped := int(state.skipped):
            console.warn(f"{skipped} of {total} updates were not finite and were skipped")
        return state, measured

    def _validated(self, step: int, state: TrainState, measured: Measured) -> Measured:
        with self.monitor.timing("evaluation"):
            measured = measured._replace(validation=self.validate(state.params["model"]))
        self.monitor.validated(step, measured.validation)
        return measured

    def _stop(self, step: int, status: int) -> NoReturn:
        """Ends training after an interrupt, with a status.

        Raises:
            Interrupted: Always.
        """
        self.checkpoints.wait()
        if step in self.checkpoints.steps:
            message = f"step {step} is saved, and the same command resumes from there"
            raise Interrupted(message, status)
        raise Interrupted(f"step {step} could not be saved", status)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def create_loop(
    config: ConfigDict,
    setup: Setup,
    train_step: TrainStep,
    checkpoints: SharedCheckpoints,
    monitor: Monitor,
) -> Loop:
    """Creates the loop that a configuration describes.

    Args:
        config: The run's configuration.
        setup: The run.
        train_step: One step, jitted.
        checkpoints: The run's checkpoints.
        monitor: Watches every step.
    """
    run, validation = config.run, setup.splits.validation

    def validate(params: PyTree) -> Recalls:
        fitted = setup.evaluator.fit(params, setup.splits.train)
        return setup.evaluator.scores(params, Task(validation), fitted)

    return Loop(
        Cadence(config.train.total_steps, run.log_every, config.eval.every, run.checkpoint_every),
        train_step,
        setup.learner.mesh,
        validate if validation else None,
        f"recall@{min(config.eval.ks)}",
        checkpoints,
        monitor,
    )


class Timers(NamedTuple):
    """What measures time.

    Attributes:
        trace: Trace of the steps to profile.
        stopwatch: Counts where the time of this launch goes.
    """

    trace: Trace
    stopwatch: Stopwatch


def create_monitor(
    config: ConfigDict,
    setup: Setup,
    steps: range,
    folder: pathlib.Path,
    checkpoints: SharedCheckpoints,
    timers: Timers,
) -> Monitor:
    """Creates what watches the steps and writes down what they return.

    Args:
        config: The run's configuration.
        setup: The run.
        steps: Steps to train, counted from 0.
        folder: The run's folder.
        checkpoints: The run's checkpoints.
        timers: Trace and stopwatch.
    """
    train = config.train
    most_skipped = train.max_nonfinite if train.on_nonfinite == "skip" else 0
    return Monitor(
        steps,
        train.batch_size,
        Telemetry(folder, steps.start, config),
        FiniteWatch(folder, checkpoints, setup.splits.train.name, most_skipped),
        HealthWatch(
            max(config.optim.warmup_steps, train.total_steps // 10),
            train.batch_size,
            train.samples_per_class,
            stop=train.on_collapse == "stop",
        ),
        *timers,
    )
