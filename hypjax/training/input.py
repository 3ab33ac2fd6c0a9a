"""The images of a run and the batches of its steps."""

import dataclasses
from collections.abc import Generator

import numpy as np
from jaxtyping import Float, PyTree

from hypjax import parallel
from hypjax.data.device_cache import crop_batches, fill
from hypjax.data.device_crops import Store
from hypjax.data.pipeline import training_batches
from hypjax.data.plans import Plans
from hypjax.inference.features import Encodings
from hypjax.system import console
from hypjax.training.setup import Setup
from hypjax.types import Batch, Workers


@dataclasses.dataclass(frozen=True, eq=False)
class Input:
    """The images of a run, from which batches are made.

    Attributes:
        setup: The run.
        workers: What decodes images.
        features: The encoder's embeddings of all training images, if they are cached.
        store: The images in device memory, from which steps cut their crops, if there is that
            cache.
    """

    setup: Setup
    workers: Workers
    features: Float[np.ndarray, "images encoder_dim"] | None = None
    store: Store | None = None

    def batches(self, steps: range, plans: Plans) -> Generator[Batch, None, None]:
        """Opens the batches of some steps, counted from 0; close them to end the workers.

        Raises:
            UserError: An image cannot be read, when its batch is taken.
        """
        setup, learner = self.setup, self.setup.learner
        slices = parallel.slices(plans.batch_size, learner.mesh, learner.microbatch)
        rows = parallel.local_rows(learner.mesh, slices.rows)
        if self.features is not None:
            return _feature_batches(self.features, plans, steps, rows)
        if self.store is not None:
            return crop_batches(setup.layout, plans, steps, rows)
        train = setup.splits.train
        return training_batches(train, plans, steps, learner.view, self.workers, rows)


def open_input(setup: Setup, steps: range, workers: Workers, params: PyTree) -> Input:
    """Fills the caches of a run, unless no step remains.

    Args:
        setup: The run.
        steps: Steps to train, counted from 0.
        workers: What decodes images.
        params: Parameters of the model, for cached features.

    Raises:
        UserError: An image cannot be read.
    """
    learner = setup.learner
    if not steps:
        return Input(setup, workers)
    if learner.cached_features:
        return Input(setup, workers, features=_features(setup, params))
    if setup.layout is not None:
        store = fill(setup.layout, setup.splits.train, learner.mesh)
        return Input(setup, workers, store=store)
    return Input(setup, workers)


def _features(setup: Setup, params: PyTree) -> Float[np.ndarray, "images encoder_dim"]:
    """Embeds all training images with the encoder, as it is trained."""
    learner, train, images = setup.learner, setup.splits.train, setup.evaluator.images
    if learner.model.encoder == images.model.encoder and 1.0 in images.scales:
        return images.encodings.of(params, train)[1.0]
    console.say(f"embedding {len(train)} training images with the frozen encoder")
    encodings = Encodings(learner.model, learner.pixel_scaling, images.source)
    return encodings.encode(params, train)[0]


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
