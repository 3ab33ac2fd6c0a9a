"""Trains on synthetic batches, sharded and sliced in several ways.

python -m tests.helpers.trajectories OUTPUT TRAINING CASE...

TRAINING is BATCH/SAMPLES/STEPS, perhaps with /taught or /lora, and a CASE is
DEVICES/PARTS/MICROBATCH[/remat].

XLA_FLAGS must provide the devices of the largest case. Writes an .npz file with the arrays
CASE:start (the first state), CASE:losses and CASE:gradient (of the first step). With 'taught', the
objective is the one of docs/extending.md on noisy outputs, with stochastic depth; CASE:state holds
its parameters, its state and its teacher after the last step. With 'lora', it is the contrastive
loss with a memory of 50 images and with KoLeo, which has a teacher as well, and adapters are
trained.
"""

import dataclasses
import sys

import jax
import numpy as np
import optax
import pytest

from hypjax import parallel
from hypjax.assemble import assemble_learner
from hypjax.config import choose_objective, default_config
from hypjax.objectives import ProblemSizes, loss_function
from hypjax.training.states import first_state
from hypjax.training.step import jit_train_step, shard_batch
from hypjax.types import IMAGES, Batch
from tests.helpers import shown_objective

TINY = {"architecture": "vit", "patch_size": 4, "width": 32, "depth": 2, "num_heads": 2}
TINY["head_dim"] = 16


def config_of(batch, samples, devices=1, parts=1, microbatch=0, *, remat=False, objective=None):
    config = default_config()
    if objective == "taught":
        choose_objective(config, shown_objective.NAME)
    elif objective == "lora":
        choose_objective(config, "contrastive")
        memory = {"memory": 50.0, "memory_decay": 0.9, "koleo_weight": 0.7}
        config.objective.update(memory, space="sphere")
    with config.unlocked():
        config.model.update(TINY)
        config.data.image_size = config.data.resize = 8
        config.train.batch_size, config.train.samples_per_class = batch, samples
        config.optim.learning_rate = 1e-4
        config.run.mesh, config.run.microbatch = (devices // parts, parts), microbatch
        config.run.remat = remat
        config.model.drop_path = 0.5 if objective else 0.0
        config.train.lora_rank = 4 if objective == "lora" else 0
    return config


def noisy(objective):
    """The objective on outputs with noise from its key."""

    class Noisy(type(objective)):
        def loss(self, params, state, outputs, teacher, batch, key):
            noise = jax.random.normal(key, outputs.projected.shape)
            outputs = outputs._replace(projected=outputs.projected + noise)
            return loss_function(objective)(params, state, outputs, teacher, batch, key)

    return Noisy(**vars(objective))


def synthetic_batch(step, config, rows):
    """Noisy images of a few classes, padded with black images to the given number of rows."""
    rng = np.random.default_rng(step)
    size, samples = config.train.batch_size, config.train.samples_per_class
    labels = np.repeat(np.arange(size // samples, dtype=np.int32), samples)
    patterns = np.random.default_rng(9).integers(0, 256, (size, 8, 8, 3))
    images = np.zeros((rows, 8, 8, 3), np.uint8)
    noise = rng.integers(-60, 60, (size, 8, 8, 3))
    images[:size] = np.clip(patterns[labels] + noise, 0, 255)
    flips = np.zeros(rows, bool)
    flips[:size] = rng.random(size) < 0.5
    return Batch({IMAGES: images}, labels, np.arange(size, dtype=np.int32), flips)


def trajectory(config, steps):
    """Trains as `hypjax.train_and_evaluate` does, step by step."""
    learner = assemble_learner(config)
    taught = learner.objective.teacher_decay is not None
    if taught:
        learner = dataclasses.replace(learner, objective=noisy(learner.objective))
    mesh = learner.mesh
    size, samples = config.train.batch_size, config.train.samples_per_class
    spec = ProblemSizes(size // samples, samples, config.model.width, 16, 100, size)
    state = first_state(learner, spec)
    step = jit_train_step(learner, state)
    slices = parallel.slices(size, mesh, config.run.microbatch)
    found = {"start": flat(parallel.gather(state)), "losses": []}
    for i in range(steps):
        batch = synthetic_batch(i, config, slices.rows)
        state, metrics = step(state, shard_batch(mesh, batch))
        found["losses"].append(float(metrics["loss"]))
        if i == 0:  # After one step, Adam's first moment is a tenth of the clipped gradient.
            moments = parallel.gather(optax.tree.get(state.opt_state, "mu"))
            found["gradient"] = flat(moments)
    assert step._cache_size() == 1
    if taught:
        kept = state.params["objective"], state.objective_state, state.teacher
        found["state"] = flat(parallel.gather(kept))
    return found


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def main():
    output, training, *cases = sys.argv[1:]
    *sizes, objective = [*training.split("/"), None][:4]
    batch, samples, steps = map(int, sizes)
    shown_objective.install(pytest.MonkeyPatch())
    found = {}
    for case in cases:
        devices, parts, microbatch, *remat = case.split("/")
        sizes = map(int, (devices, parts, microbatch))
        config = config_of(batch, samples, *sizes, remat=bool(remat), objective=objective)
        for name, values in trajectory(config, steps).items():
            found[f"{case}:{name}"] = np.asarray(values)
    np.savez(output, **found)


if __name__ == "__main__":
    main()
