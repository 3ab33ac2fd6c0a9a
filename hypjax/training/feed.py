"""The batches of a run's remaining steps, epoch by epoch where tuples are mined."""

import dataclasses
from collections.abc import Generator

import numpy as np

from hypjax import parallel
from hypjax.data.plans import Plans, TuplePlans
from hypjax.monitoring.monitor import Monitor
from hypjax.training.input import Input
from hypjax.training.mining import Miner
from hypjax.training.step import TrainState
from hypjax.types import Batch


class Feed:
    """Hands out batches in the order of the steps, and mines tuples when an epoch begins."""

    def __init__(self, source: Input, steps: range, monitor: Monitor) -> None:
        """Opens nothing yet.

        Args:
            source: The images of the run.
            steps: Steps to train, counted from 0.
            monitor: Watches the run.
        """
        self._source, self._stop, self._monitor = source, steps.stop, monitor
        plans = source.setup.plans
        self._miner = Miner(source.setup) if isinstance(plans, TuplePlans) else None
        self._batches: Generator[Batch, None, None] | None = None
        self._end = steps.start  # First step whose batch is not in the open generator.

    def next(self, state: TrainState, step: int) -> tuple[TrainState, Batch]:
        """The state with the tuples of the step's epoch, and the step's batch.

        Args:
            state: The state before the step.
            step: The step, counted from 0; the one after the last call's.

        Raises:
            UserError: An image cannot be read, or tuples cannot be mined.
        """
        if step == self._end:
            self.close()
            plans: Plans = self._source.setup.plans
            self._end = self._stop
            if self._miner is not None:
                state = self._with_tuples(state, step)
                table = np.asarray(parallel.gather(state.tuples))
                plans = dataclasses.replace(plans, table=table)
                epoch = step // plans.batches_per_epoch
                self._end = min((epoch + 1) * plans.batches_per_epoch, self._stop)
            self._batches = self._source.batches(range(step, self._end), plans)
        return state, next(self._batches)

    def _with_tuples(self, state: TrainState, step: int) -> TrainState:
        """Mines at the first step of an epoch; later the state holds the epoch's tuples."""
        epoch, rest = divmod(step, self._miner.plans.batches_per_epoch)
        if rest:
            return state
        with self._monitor.timing("mining"):
            mined = self._miner.mine(state.params["model"], epoch)
        self._monitor.mined(step + 1, mined.metrics)  # A run resumed here writes it again.
        return state._replace(tuples=parallel.place(mined.table, state.tuples.sharding))

    def close(self) -> None:
        """Ends the workers."""
        if self._batches is not None:
            self._batches.close()
