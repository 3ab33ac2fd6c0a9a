"""Train steps that are lowered from shapes, without images or parameters."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hypjax import parallel
from hypjax.objectives import ProblemSizes
from hypjax.training.learner import Learner
from hypjax.training.states import sharded_shapes
from hypjax.training.step import jit_train_step
from hypjax.types import IMAGES, POSITIVES, Batch


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
    """Lowers the training step on images, and texts, from the shapes of parameters and batch."""
    mesh, view = learner.mesh, learner.pixels.view
    state = sharded_shapes(learner, sizes)
    rows = parallel.slices(sizes.batch_size, mesh, learner.step.microbatch).rows
    sharded = parallel.sharded(mesh)

    def input_of(dtype: DTypeLike, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *sizes), dtype, sharding=sharded)

    inputs = {IMAGES: input_of(jnp.uint8, view.side, view.side, view.channels)}
    for name, tower in learner.model.towers.items():
        example = tower.encoder.example(view)
        inputs |= {name: input_of(example.dtype, *example.shape[1:])}
        inputs |= {POSITIVES: input_of(jnp.bool, sizes.batch_size)}
    replicated = parallel.replicated(mesh)
    integers = jax.ShapeDtypeStruct((sizes.batch_size,), jnp.int32, sharding=replicated)
    batch = Batch(inputs, labels=integers, ids=integers, flips=input_of(jnp.bool))
    return jit_train_step(learner, state).lower(state, batch)
