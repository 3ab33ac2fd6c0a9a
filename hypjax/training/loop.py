"""The training loop, which trains, validates, saves checkpoints, and stops on an interrupt."""

import dataclasses
import math
from typing import NoReturn

import jax

from hypjax.errors import Interrupted
from hypjax.monitoring.monitor import Monitor
from hypjax.parallel import processes
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.tables import format_recalls, selection_metric
from hypjax.system import console, exits, machine
from hypjax.training.input import Input
from hypjax.training.setup import Training
from hypjax.training.states import Measured, trees
from hypjax.training.step import TrainState, evaluated_model, jit_train_step, shard_batch

_STOPPING = "interrupted: finishing this step and saving; interrupt again to stop at once"


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs the remaining steps of a run.

    A checkpoint is saved every `checkpoint_every` steps, whenever the validation score reaches
    the best so far (including the first state's), after the last step, and on an interrupt.
    """

    training: Training
    source: Input
    checkpoints: Checkpoints
    monitor: Monitor

    def save(self, state: TrainState, measured: Measured, *, scored: bool = True) -> None:
        """Saves a state, once; without `scored`, the state cannot become the best."""
        step = int(state.step)
        if step not in self.checkpoints.steps:
            score = _score(measured) if scored else None
            state_trees = trees(self.training.learner, state)
            self.checkpoints.save(step, record=measured._asdict(), score=score, **state_trees)

    def train(self, state: TrainState, measured: Measured) -> tuple[TrainState, Measured]:
        """Trains to the last step, and returns its state and scores; saves on an interrupt."""
        schedule, learner = self.training.schedule, self.training.learner
        completed, total, monitor = int(state.step), schedule.total_steps, self.monitor
        agree_on = processes.Agreement(learner.mesh)
        train_step = jit_train_step(learner, state)
        head_step = jit_train_step(learner, state, head_only=True)  # For the head's warm-up.
        with (
            exits.deferred(_STOPPING) as interrupted,
            machine.memory_explained("train.batch_size, data.image_size or the model's size"),
        ):
            if completed < total:
                console.say("compiling the training step")
            for step in range(completed + 1, total + 1):
                if self._is_out_of_patience(step - 1, measured):
                    break
                try:
                    with monitor.waiting(step):
                        state, batch = self.source.next(state, step - 1, monitor)
                except Exception:  # An image cannot be read, or an interrupt ended the workers.
                    if jax.process_count() > 1:
                        raise  # The other processes wait in this step, so none can save.
                    monitor.settle()
                    if step > completed + 1:  # At least one step has been run.
                        self.save(state, measured, scored=False)
                    if interrupted():
                        self._stop(step - 1, interrupted())
                    raise
                warmup_steps = schedule.head_warmup_steps
                if step == warmup_steps + 1 and step > completed + 1:
                    console.say("training the encoder, too, from this step on: compiling the step")
                run_step = head_step if step <= warmup_steps else train_step
                with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
                    batch_on_devices = shard_batch(learner.mesh, batch)
                    state, metrics = run_step(state, batch_on_devices, store=self.source.store)
                is_last = step == total
                saving = is_last or _is_due(step, schedule.checkpoint_every)
                validating = is_last or _is_due(step, schedule.validate_every)
                validating &= self.training.experiment.splits.validation is not None
                # Metrics stay on the devices until a report: reading them would stall the devices.
                monitor.add(step, batch.ids, metrics)
                if saving or validating or _is_due(step, schedule.log_every):
                    # A collapse must not prevent an interrupted run from saving.
                    monitor.report(step, judging=not interrupted())
                if validating:
                    measured = self._validate(step, state, measured)
                    is_last |= self._is_out_of_patience(step, measured)
                    saving |= is_last or step in measured.best_steps
                # A signal reaches processes at different steps; all must stop after the same step.
                status = agree_on(interrupted())
                # After the last step, results are minutes away.
                stopping = status != 0 and not is_last
                if saving or stopping:
                    # Reported before saving, so that a state that is not finite is never saved.
                    monitor.report(step, judging=not stopping)
                    with monitor.stopwatch.part("saving"):
                        self.save(state, measured, scored=validating)
                if stopping:
                    self._stop(step, status)
        if skipped := int(state.skipped):
            console.warn(f"updates that were not finite were skipped: {skipped} of {total}")
        return state, measured

    def _validate(self, step: int, state: TrainState, measured: Measured) -> Measured:
        """Scores a state on the validation images; the result lists `step` if it is a best step."""
        with self.monitor.stopwatch.part("evaluation"):
            model = evaluated_model(self.training.learner, state)
            scores = self.training.experiment.validation_scores(model)
        self.monitor.write(step, {"validation": scores})
        console.say(f"step {step}: validation {format_recalls(scores)}")
        measured = measured._replace(validation=scores)
        score = _score(measured)
        _, best_score = self.checkpoints.best
        if score is not None and (best_score is None or score >= best_score):
            tied_steps = measured.best_steps if score == best_score else ()
            measured = measured._replace(best_steps=[*tied_steps, step])
        return measured

    def _is_out_of_patience(self, step: int, measured: Measured) -> bool:
        """Whether `train.patience` validations up to a step found no better score."""
        schedule = self.training.schedule
        patience, every = schedule.patience, schedule.validate_every
        best_step = [*measured.best_steps, 0][0]
        return patience > 0 and step // every - best_step // every >= patience

    def _stop(self, step: int, status: int) -> NoReturn:
        """Ends training after an interrupt, with this exit status."""
        self.checkpoints.wait()
        outcome = "could not be saved"
        if step in self.checkpoints.steps:
            outcome = "is saved, and the same command resumes from there"
        raise Interrupted(f"step {step} {outcome}", status)


def _score(measured: Measured) -> float | None:
    """The validation score that selects the best checkpoint; None without one, or if it is NaN."""
    if measured.validation is None:
        return None
    head = measured.validation["head"]
    score = head[selection_metric(head)]
    return None if math.isnan(score) else score


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
