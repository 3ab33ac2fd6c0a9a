"""The loop over the steps: it trains, validates, saves, and stops when it is interrupted."""

import dataclasses
from typing import NoReturn

import jax

from hypjax.data.parts import Task
from hypjax.errors import Interrupted
from hypjax.monitoring.monitor import Monitor
from hypjax.parallel import processes
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.tables import format_recalls
from hypjax.system import console, exits, machine
from hypjax.training.input import Feed
from hypjax.training.setup import Setup
from hypjax.training.states import Measured, save
from hypjax.training.step import TrainState, TrainStep, evaluated_model, shard_batch

_STOPPING = "interrupted: finishing this step and saving; once more to stop at once"


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs the remaining steps of a run.

    A checkpoint is saved every `run.checkpoint_every` steps, whenever the validation score is above
    all before, that of the first state included, after the last step, and when training has to
    stop.
    """

    setup: Setup
    train_step: TrainStep
    probe_step: TrainStep  # The step while the encoder does not change.
    checkpoints: Checkpoints
    monitor: Monitor

    @property
    def selecting(self) -> str:
        """Name of the head's validation score that selects the best checkpoint."""
        return f"recall@{min(self.setup.config.eval.ks)}"

    def save(self, state: TrainState, measured: Measured) -> None:
        """Saves a state unless it is saved already, with the score that selects the best one."""
        score = measured.selecting(self.selecting)
        save(self.checkpoints, self.setup.learner, state, measured, score)

    def run(self, state: TrainState, measured: Measured, feed: Feed) -> tuple[TrainState, Measured]:
        """Runs the steps that remain; returns the last state, and the scores measured until then.

        Raises a `UserError` if a loss is not finite, or an image can no longer be read. If an
        interrupt arrives, it saves the state and raises `Interrupted`.
        """
        config, learner = self.setup.config, self.setup.learner
        first, total = int(state.step), config.train.total_steps
        agreed = processes.Agreement(learner.mesh)
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
                        save(self.checkpoints, learner, state, measured)
                    if interrupted():
                        self._stop(step - 1, interrupted.status)
                    raise
                if step == learner.probe_steps + 1 > first + 1:
                    console.say("the encoder is trained, too, from now on: compiling that step")
                with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
                    train_step = self.probe_step if step <= learner.probe_steps else self.train_step
                    state, metrics = train_step(state, shard_batch(learner.mesh, batch))
                last = step == total
                saving = last or _due(step, config.run.checkpoint_every)
                validating = last or _due(step, config.eval.every)
                validating &= self.setup.splits.validation is not None
                # Metrics stay on the devices until a report: reading them would stall these.
                self.monitor.add(step, batch.ids, metrics)
                if saving or validating or _due(step, config.run.log_every):
                    # A collapse must not keep a run that is being interrupted from saving.
                    self.monitor.report(step, judging=not interrupted.status)
                score = None
                if validating:
                    measured = self._validated(step, state, measured)
                    score, best = measured.selecting(self.selecting), self.checkpoints.best[1]
                    saving |= best is None or score > best
                # A signal reaches processes at different steps; all must stop after the same one.
                status = agreed(interrupted.status)
                stopping = status and not last  # After the last step, results are minutes away.
                if saving or stopping:
                    # Before it is saved, so that a state that is not finite never is.
                    self.monitor.report(step, judging=not stopping)
                    with self.monitor.stopwatch.part("saving"):
                        save(self.checkpoints, learner, state, measured, score)
                if stopping:
                    self._stop(step, status)
        if skipped := int(state.skipped):
            console.warn(f"{skipped} of {total} updates were not finite and were skipped")
        return state, measured

    def _validated(self, step: int, state: TrainState, measured: Measured) -> Measured:
        evaluator, splits = self.setup.evaluator, self.setup.splits
        with self.monitor.stopwatch.part("evaluation"):
            params = evaluated_model(self.setup.learner, state)
            fitted = evaluator.fit(params, splits.train)
            scores = evaluator.scores(params, Task(splits.validation), fitted)
        self.monitor.write(step, {"validation": scores})
        console.say(f"step {step}: validation {format_recalls(scores)}")
        return measured._replace(validation=scores)

    def _stop(self, step: int, status: int) -> NoReturn:
        """Ends training after an interrupt, with a status."""
        self.checkpoints.wait()
        if step in self.checkpoints.steps:
            message = f"step {step} is saved, and the same command resumes from there"
            raise Interrupted(message, status)
        raise Interrupted(f"step {step} could not be saved", status)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
