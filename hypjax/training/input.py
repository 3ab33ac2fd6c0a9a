"""A run's training batches, from images, features or caches, and the tuples mined each epoch."""

import dataclasses
import functools
from collections.abc import Generator

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hypjax import parallel
from hypjax.data.device_cache import crop_batches, fill
from hypjax.data.device_crops import Store
from hypjax.data.pipeline import training_batches
from hypjax.data.plans import Plans, TuplePlans
from hypjax.errors import UserError, counted
from hypjax.experiment.embedding import ONE_SCALE, DatasetEmbedder
from hypjax.models.layers import normalize
from hypjax.models.split_at_block import lower_blocks
from hypjax.monitoring.monitor import Monitor
from hypjax.parallel import processes
from hypjax.retrieval.mining import hardest_negatives
from hypjax.system import console, machine
from hypjax.training.captions import with_captions
from hypjax.training.setup import Training
from hypjax.training.step import TrainState, trained_model
from hypjax.types import Batch, CachedFeatures


@dataclasses.dataclass(eq=False)
class Input:
    """Source of a run's batches, in the order of the steps."""

    training: Training
    # All images' embeddings, or a block's output for them; None if nothing is cached on the host.
    features: Float[np.ndarray, "images ..."] | None = None
    store: Store | None = None  # Images in device memory, from which steps cut their crops.
    _open: Generator[Batch, None, None] | None = None
    _end: int = 0  # First step whose batch is not in the open generator.

    def batches(self, steps: range, plans: Plans) -> Generator[Batch, None, None]:
        """Opens the batches of steps, counted from 0; close the generator to end the workers."""
        experiment, microbatch = self.training.experiment, self.training.learner.step.microbatch
        slices = parallel.slices(plans.batch_size, experiment.mesh, microbatch)
        rows = parallel.local_rows(experiment.mesh, slices.rows)
        batches = self._images(steps, plans, rows)
        if experiment.texts is None:
            return batches
        images, texts, parents = self.training.images, experiment.texts, experiment.parents
        return with_captions(batches, steps, plans, images, texts, rows, parents)

    def _images(self, steps: range, plans: Plans, rows: range) -> Generator[Batch, None, None]:
        """What the tower of images takes."""
        experiment = self.training.experiment
        if self.features is not None:
            return _feature_batches(self.features, plans, steps, rows)
        if self.training.layout is not None and self.store is not None:
            return crop_batches(self.training.layout, plans, steps, rows)
        view, workers = experiment.method.pixels.view, experiment.method.embedding.workers
        return training_batches(self.training.images, plans, steps, view, workers, rows)

    def next(self, state: TrainState, step: int, monitor: Monitor) -> tuple[TrainState, Batch]:
        """Returns the batch of a step, counted from 0, and the state with the epoch's tuples."""
        if self._open is None or step == self._end:
            self.close()
            plans = self.training.plans
            self._end = self.training.schedule.total_steps
            # An epoch's tuples are mined by the model of that time: no batch can be opened before.
            if isinstance(plans, TuplePlans):
                epoch, epoch_step = divmod(step, plans.batches_per_epoch)
                assert state.tuples is not None
                if epoch_step == 0:  # In later steps of the epoch, the state holds the tuples.
                    with monitor.stopwatch.part("mining"):
                        model = trained_model(self.training.learner, state)
                        table = self.mine(plans, model, epoch)
                    monitor.restart_clock()
                    state = state._replace(tuples=parallel.place(table, state.tuples.sharding))
                plans = dataclasses.replace(plans, table=np.asarray(parallel.gather(state.tuples)))
                self._end = min((epoch + 1) * plans.batches_per_epoch, self._end)
            self._open = self.batches(range(step, self._end), plans)
        return state, next(self._open)

    def close(self) -> None:
        """Ends the workers."""
        if self._open is not None:
            self._open.close()

    @functools.cached_property
    def _embedder(self) -> DatasetEmbedder:
        return _trained_embedder(self.training)

    def mine(self, plans: TuplePlans, params: PyTree, epoch: int) -> Int[np.ndarray, "tuples size"]:
        """Mines the tuples of an epoch, counted from 0, by embeddings under the test view.

        Returns each tuple's positions in the training set: anchor, positive, negatives.
        """
        space = self.training.experiment.method.trained_objective(params).space
        pairs, pool = plans.candidates(epoch)
        anchors, positives = pairs.T
        # Each image is embedded once, in the order of the files.
        ids, rows = np.unique(np.concatenate([anchors, pool]), return_inverse=True)
        images = self.training.images.take(ids)
        points = self._embedder.points(params, images, {"head": space}, ONE_SCALE)["head"]
        anchor_points, pool_points = np.split(points[rows], [len(anchors)])
        negatives = hardest_negatives(
            anchor_points,
            plans.labels[anchors],
            pool_points,
            plans.labels[pool],
            count=plans.negatives,
            space=space,
        )
        table = np.column_stack([anchors, positives, pool[negatives]]).astype(np.int32)
        return processes.arrays_from_first(lambda: table, table)


def open_input(training: Training, steps: range, params: PyTree) -> Input:
    """Opens a run's input; fills its caches if steps remain."""
    learner, layout = training.learner, training.layout
    if steps and learner.step.takes_features:
        compute = training_features if learner.cached_block is None else _training_activations
        return Input(training, features=compute(training, params))
    if steps and layout is not None:
        return Input(training, store=fill(layout, training.images, learner.mesh))
    return Input(training)


def _trained_embedder(training: Training) -> DatasetEmbedder:
    """Embeds images with the model that is trained; evaluation may use another pooling."""
    embedder, model = training.experiment.embedder, training.learner.model
    if embedder.model.encoder == model.encoder:
        return embedder
    return dataclasses.replace(embedder, model=model, cached=())


def training_features(
    training: Training, params: PyTree
) -> Float[np.ndarray, "images encoder_dim"]:
    """The encoder's embeddings of the training images under the test view."""
    images, embedder = training.images, _trained_embedder(training)
    if images.vectors is not None:
        return images.vectors
    if not embedder.cached:
        console.say(f"embedding {counted(len(images), 'training image')} with the encoder")
    return embedder.features(params, images)


def features_to_keep(training: Training, params: PyTree) -> jax.ShapeDtypeStruct:
    """Shape of all training images' cached features; checks that memory suffices."""
    learner = training.learner
    encoder, block = learner.model.encoder, learner.cached_block
    num_images = len(training.images)
    if block is None:
        return jax.ShapeDtypeStruct((num_images, encoder.dim), np.float32)
    lower = functools.partial(lower_blocks, encoder, block)
    example = jax.eval_shape(lower, params["encoder"], encoder.example(learner.pixels.view))
    needed = num_images * example.size * example.dtype.itemsize
    free = machine.free_host_memory()
    features = f"the output of {block} for {num_images} training images"
    if free is not None and needed > free:
        memory = f"{needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free"
        remedy = "lower data.image_size, or set --config.train.cached_features=False"
        raise UserError(f"{features} needs {memory}; {remedy}")
    console.say(f"keeping {features}: {needed / 2**30:.1f} GiB of memory")
    return jax.ShapeDtypeStruct((num_images, *example.shape[1:]), example.dtype)


def _training_activations(training: Training, params: PyTree) -> Float[np.ndarray, "images ..."]:
    """The highest frozen block's output for the training images under the test view."""
    learner = training.learner
    encoder, block, pixels = learner.model.encoder, learner.cached_block, learner.pixels
    assert block is not None

    def activations(params: PyTree, images: Array) -> Array:
        images = normalize(images, pixels.mean, pixels.std)
        return lower_blocks(encoder, block, params, images)

    features_to_keep(training, params)  # Checks the memory.
    embedder, images = training.experiment.embedder, training.images
    params = parallel.place(params["encoder"], parallel.replicated(learner.mesh))
    options = parallel.compiler_options(learner.mesh)
    compute = jax.jit(parallel.map_images(activations, learner.mesh), compiler_options=options)
    by_jax = functools.partial(compute, params)
    function, facts = functools.partial(activations, params), ("below", learner.cached_block)
    return embedder.mapped(embedder.program(by_jax, function, params, facts), images)


def _feature_batches(
    features: Float[np.ndarray, "images ..."], plans: Plans, steps: range, rows: range
) -> Generator[Batch, None, None]:
    """Yields batches of features; rows that pad a batch are zeros."""
    for plan in map(plans, steps):
        local_ids = plan.ids[rows.start : rows.stop]
        images = np.zeros((len(rows), *features.shape[1:]), features.dtype)
        images[: len(local_ids)] = features[local_ids]
        yield plan.batch(CachedFeatures(images), rows)
