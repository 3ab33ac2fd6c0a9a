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
from hypjax.inference.embedding import ONE_SCALE
from hypjax.models.layers import normalize
from hypjax.models.split_at_block import lower_blocks
from hypjax.monitoring.monitor import Monitor
from hypjax.parallel import processes
from hypjax.retrieval.mining import hardest_negatives
from hypjax.system import console, machine
from hypjax.training.setup import TrainingRun
from hypjax.training.step import TrainState, trained_model
from hypjax.types import Batch


@dataclasses.dataclass(eq=False)
class Input:
    """Source of a run's batches, in the order of the steps."""

    run: TrainingRun
    # Cached embeddings, or activations of a block, of all images; None if nothing is cached.
    features: Float[np.ndarray, "images ..."] | None = None
    store: Store | None = None  # Images in device memory, from which steps cut their crops.
    _open: Generator[Batch, None, None] | None = None
    _end: int = 0  # First step whose batch is not in the open generator.

    def batches(self, steps: range, plans: Plans) -> Generator[Batch, None, None]:
        """Opens the batches of steps, counted from 0; close the generator to end the workers."""
        run, learner = self.run, self.run.learner
        slices = parallel.slices(plans.batch_size, learner.mesh, learner.config.run.microbatch)
        rows = parallel.local_rows(learner.mesh, slices.rows)
        if self.features is not None:
            return _feature_batches(self.features, plans, steps, rows)
        if self.store is not None:
            return crop_batches(run.layout, plans, steps, rows)
        images, workers = run.splits.train, run.config.run.workers
        return training_batches(images, plans, steps, learner.view, workers, rows)

    def next(self, state: TrainState, step: int, monitor: Monitor) -> tuple[TrainState, Batch]:
        """Returns the state, with its epoch's tuples, and the batch of a step, counted from 0."""
        if self._open is None or step == self._end:
            self.close()
            plans, self._end = self.run.plans, self.run.config.train.total_steps
            # An epoch's tuples are mined by the model of that time: no batch can be opened before.
            if isinstance(plans, TuplePlans):
                epoch, position = divmod(step, plans.batches_per_epoch)
                if position == 0:  # In later steps of the epoch, the state holds the tuples.
                    with monitor.stopwatch.part("mining"):
                        table = self.mine(trained_model(self.run.learner, state), epoch)
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

    def mine(self, params: PyTree, epoch: int) -> Int[np.ndarray, "tuples size"]:
        """Mines the tuples of an epoch, counted from 0, by embeddings under the test view.

        Returns each tuple's positions in the training set: anchor, positive, negatives.
        """
        plans, space = self.run.plans, self.run.trained_objective(params).space
        pairs, pool = plans.candidates(epoch)
        anchors, positives = pairs.T
        # Each image is embedded once, in the order of the files.
        ids, rows = np.unique(np.concatenate([anchors, pool]), return_inverse=True)
        images = self.run.splits.train.take(ids)
        points = self.run.embedder.points(params, images, {"head": space}, ONE_SCALE)["head"]
        anchor_points, pool_points = np.split(points[rows], [len(anchors)])
        searched = anchor_points, plans.labels[anchors], pool_points, plans.labels[pool]
        negatives = hardest_negatives(*searched, count=plans.negatives, space=space)
        table = np.column_stack([anchors, positives, pool[negatives]]).astype(np.int32)
        return processes.arrays_from_first(lambda: table, table)


def open_input(run: TrainingRun, steps: range, params: PyTree) -> Input:
    """Opens a run's input; fills its caches if steps remain."""
    features = store = None
    if steps and run.config.train.cached_features:
        compute = training_features if run.learner.cached_block is None else training_activations
        features = compute(run, params)
    elif steps and run.layout is not None:
        store = fill(run.layout, run.splits.train, run.learner.mesh)
    return Input(run, features, store)


def training_features(run: TrainingRun, params: PyTree) -> Float[np.ndarray, "images encoder_dim"]:
    """The encoder's embeddings of the training images under the test view."""
    learner, train, embedder = run.learner, run.splits.train, run.embedder
    if train.vectors is not None:
        return train.vectors
    # Evaluation may use another pooling.
    if not embedder.cached or learner.model.encoder != embedder.model.encoder:
        embedder = dataclasses.replace(embedder, model=learner.model, cached=())
        console.say(f"embedding {counted(len(train), 'training image')} with the encoder")
    return embedder.features(params, train)


def features_to_keep(run: TrainingRun, params: PyTree) -> jax.ShapeDtypeStruct:
    """Shape of all training images' cached features; checks that memory suffices."""
    learner, count = run.learner, len(run.splits.train)
    encoder, block = learner.model.encoder, learner.cached_block
    if block is None:
        return jax.ShapeDtypeStruct((count, encoder.dim), np.float32)
    lower = functools.partial(lower_blocks, encoder, block)
    example = jax.eval_shape(lower, params["encoder"], encoder.example(learner.view))
    needed, free = count * example.size * example.dtype.itemsize / 2**30, machine.free_host_memory()
    features = f"the output of {block} for {count} training images"
    if free is not None and needed > free / 2**30:
        remedy = "lower data.image_size, or set --config.train.cached_features=False"
        problem = f"{features} needs {needed:.1f} GiB of memory, and {free / 2**30:.1f} are free"
        raise UserError(f"{problem}; {remedy}")
    console.say(f"keeping {features}: {needed:.1f} GiB of memory")
    return jax.ShapeDtypeStruct((count, *example.shape[1:]), example.dtype)


def training_activations(run: TrainingRun, params: PyTree) -> Float[np.ndarray, "images ..."]:
    """The highest frozen block's output for the training images under the test view."""
    learner, mesh = run.learner, run.learner.mesh

    def activations(params: PyTree, images: Array) -> Array:
        pixels = normalize(images, run.config.data.mean, run.config.data.std)
        return lower_blocks(learner.model.encoder, learner.cached_block, params, pixels)

    features_to_keep(run, params)
    params = parallel.place(params["encoder"], parallel.replicated(mesh))
    options = parallel.compiler_options(mesh)
    compute = jax.jit(parallel.map_images(activations, mesh), compiler_options=options)
    return run.embedder.mapped(functools.partial(compute, params), run.splits.train)


def _feature_batches(
    features: Float[np.ndarray, "images ..."], plans: Plans, steps: range, rows: range
) -> Generator[Batch, None, None]:
    """Yields batches of features; rows that pad a batch are zeros."""
    for plan in map(plans, steps):
        local = plan.ids[rows.start : rows.stop]
        images = np.zeros((len(rows), *features.shape[1:]), features.dtype)
        images[: len(local)] = features[local]
        yield plan._replace(images=images, flips=np.zeros(len(rows), bool))
