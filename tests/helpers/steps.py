"""Train steps on small batches of random images, and their lowered programs."""

import dataclasses
import re

import jax
import numpy as np

from hypjax import parallel
from hypjax.assemble import assemble_learner
from hypjax.objectives import ProblemSizes
from hypjax.training.states import first_state
from hypjax.training.step import create_state, jit_train_step
from hypjax.types import IMAGES, Batch

COARSE = (0, 1, 2) * 4  # Groups of the classes.
_PRODUCT = r"stablehlo\.(dot_general|convolution)\b"


def learner_of(config, **changes):
    """The learner of a configuration, with changed attributes."""
    learner = assemble_learner(config, parallel.create_mesh((1, 1)))
    return dataclasses.replace(learner, **changes)


def sizes_of(config):
    dims = config.model.width, config.model.head_dim
    return ProblemSizes(12, 2, *dims, 100, 24, coarse_labels=(COARSE,))


def start(config, **changes):
    """The first state, and the step, of a learner with changed attributes."""
    learner = learner_of(config, **changes)
    state = first_state(learner, sizes_of(config))
    return state, jit_train_step(learner, state)


def first_shapes(config):
    """A learner, and the shapes of its first state."""
    learner = learner_of(config)
    return learner, jax.eval_shape(lambda: create_state(learner, sizes_of(config)))


def copied(state):
    """A state for a step, which overwrites it."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), state)


def random_batch(seed=0, size=24):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(size // 2, dtype=np.int32), 2)
    pixels = rng.integers(0, 256, (size, 32, 32, 1), dtype=np.uint8)
    ids = np.arange(size, dtype=np.int32)
    return jax.device_put(Batch({IMAGES: pixels}, labels, ids, np.zeros(size, bool)))


def leaves(tree):
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}


def float32_products(lowered):
    """The precision of each product with a float32 factor in a lowered program.

    Attention's own products of bfloat16 queries, keys and values ask for bfloat16 by name, also
    where their gradients arrive in float32; they belong to the encoder and are left out.
    """
    text = lowered.as_text()
    products = [line for line in text.splitlines() if re.search(_PRODUCT, line)]
    single = [line for line in products if "f32" in re.search(r": \(([^)]*)\)", line)[1]]
    attention = ("batching_dims = [0, 1]", "lhs_precision_type = bf16")
    others = [line for line in single if not all(mark in line for mark in attention)]
    return [re.search(r"precision = \[(\w+), (\w+)\]", line) or line for line in others]


def lower(function, *args, **kwargs):
    """Lowers for an accelerator, where precision matters."""
    return jax.jit(function).trace(*args, **kwargs).lower(lowering_platforms=("tpu",))
