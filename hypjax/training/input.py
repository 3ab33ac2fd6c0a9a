"""The batches of a run's remaining steps."""

from collections.abc import Generator

import numpy as np
from jaxtyping import Float, PyTree

from hypjax import parallel
from hypjax.data.device_cache import crop_batches, fill
from hypjax.data.device_crops import Store
from hypjax.data.pipeline import training_batches
from hypjax.data.plans import Plans
from hypjax.inference.features import encoder_features
from hypjax.system import console
from hypjax.training.setup import Setup
from hypjax.types import Batch, Workers


def open_input(
    setup: Setup, steps: range, workers: Workers, params: PyTree
) -> tuple[Generator[Batch, None, None], Store | None]:
    """Opens the batches of some steps.

    Args:
        setup: The run.
        steps: Steps to train, counted from 0.
        workers: What decodes images.
        params: Parameters of the model, for cached features.

    Returns:
        The batches, and with the device cache the store that they are cut from, or else None.

    Raises:
        UserError: An image cannot be read.
    """
    learner, train = setup.learner, setup.splits.train
    slices = parallel.slices(setup.plans.batch_size, learner.mesh, learner.microbatch)
    rows = parallel.local_rows(learner.mesh, slices.rows)
    if learner.cached_features:
        features = _features(setup, params) if steps else np.empty((0, 0))
        return _feature_batches(features, setup.plans, steps, rows), None
    if setup.layout is not None:
        store = fill(setup.layout, train, learner.mesh) if steps else None
        return crop_batches(setup.layout, setup.plans, steps, rows), store
    return training_batches(train, setup.plans, steps, learner.view, workers, rows), None


def _features(setup: Setup, params: PyTree) -> Float[np.ndarray, "images encoder_dim"]:
    """Embeds all training images with the encoder, as it is trained."""
    learner, train = setup.learner, setup.splits.train
    console.say(f"embedding {len(train)} training images with the frozen encoder")
    return encoder_features(
        learner.model.encoder,
        params["encoder"],
        train,
        setup.evaluator.source,
        learner.pixel_scaling,
    )


def _feature_batches(
    features: Float[np.ndarray, "images encoder_dim"], plans: Plans, steps: range, rows: range
) -> Generator[Batch, None, None]:
    """Yields the batches of embeddings; of rows that pad a batch, the embeddings are zero."""
    for step in steps:
        planned = plans(step)
        local = planned.ids[rows.start : rows.stop]
        images = np.zeros((len(rows), features.shape[1]), np.float32)
        images[: len(local)] = features[local]
        flips = np.zeros(len(rows), bool)
        yield Batch(images=images, labels=planned.labels, ids=planned.ids, flips=flips)
