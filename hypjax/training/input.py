"""The batches of a run's remaining steps."""

from collections.abc import Generator

from hypjax import parallel
from hypjax.data.device_cache import crop_batches, fill
from hypjax.data.device_crops import Store
from hypjax.data.pipeline import training_batches
from hypjax.training.setup import Setup
from hypjax.types import Batch, Workers


def open_input(
    setup: Setup, steps: range, workers: Workers
) -> tuple[Generator[Batch, None, None], Store | None]:
    """Opens the batches of some steps.

    Args:
        setup: The run.
        steps: Steps to train, counted from 0.
        workers: What decodes images.

    Returns:
        The batches, and with the device cache the store that they are cut from, or else None.

    Raises:
        UserError: An image cannot be read.
    """
    learner, train = setup.learner, setup.splits.train
    slices = parallel.slices(setup.plans.batch_size, learner.mesh, learner.microbatch)
    rows = parallel.local_rows(learner.mesh, slices.rows)
    if setup.layout is not None:
        store = fill(setup.layout, train, learner.mesh) if steps else None
        return crop_batches(setup.layout, setup.plans, steps, rows), store
    return training_batches(train, setup.plans, steps, learner.view, workers, rows), None
