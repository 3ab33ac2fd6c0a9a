"""Train steps that are lowered from shapes, without images or parameters."""

import jax
import jax.numpy as jnp

from hypjax import parallel
from hypjax.objectives import ProblemSizes
from hypjax.training.learner import Learner
from hypjax.training.step import create_state, jit_train_step
from hypjax.types import IMAGES, Batch


def assumed_sizes(learner: Learner, batch_size: int, samples_per_class: int) -> ProblemSizes:
    """Assumes a training set of ten batches, and ten classes in each coarse class."""
    classes = 10 * batch_size // samples_per_class
    return ProblemSizes(
        classes=classes,
        samples_per_class=samples_per_class,
        encoder_dim=learner.model.encoder.dim,
        head_dim=learner.model.head_dim,
        training_images=10 * batch_size,
        batch_size=batch_size,
        coarse_labels=(tuple(label // 10 for label in range(classes)),),
    )


def lower_step(learner: Learner, sizes: ProblemSizes) -> jax.stages.Lowered:
    """Lowers the training step on images, from the shapes of parameters and batch."""
    mesh, view = learner.mesh, learner.pixels.view
    state = jax.eval_shape(lambda: create_state(learner, sizes))
    shardings = parallel.parameter_shardings(mesh, state)
    state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state, shardings)
    rows = parallel.slices(sizes.batch_size, mesh, learner.step.microbatch).rows
    shape = (rows, view.side, view.side, view.channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=parallel.sharded(mesh))
    replicated = parallel.replicated(mesh)
    integers = jax.ShapeDtypeStruct((sizes.batch_size,), jnp.int32, sharding=replicated)
    flips = jax.ShapeDtypeStruct((rows,), jnp.bool, sharding=parallel.sharded(mesh))
    batch = Batch({IMAGES: images}, labels=integers, ids=integers, flips=flips)
    return jit_train_step(learner, state).lower(state, batch)
