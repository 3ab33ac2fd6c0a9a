"""What is compiled and run on the devices: the train step, and the embedding of images."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.data import device_crops
from hypjax.models import Embedder, example_images
from hypjax.models.normalize import mirror, normalize
from hypjax.objectives import Metrics, Objective, Spec
from hypjax.training import optim
from hypjax.types import Batch, Outputs, View


class TrainState(NamedTuple):
    """All that a step changes.

    Attributes:
        step: Steps done.
        params: {"model": ..., "objective": ...}.
        opt_state: Of the optimiser, for the trained parameters.
        objective_state: What the objective carries along.
        skipped: Steps whose update was dropped, since it was not finite.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    objective_state: PyTree
    skipped: Int[Array, ""]


# From a state and a batch, and, where the device is to crop that itself, from what.
TrainStep = Callable[..., tuple[TrainState, Metrics]]


def create_state(
    config: ConfigDict,
    model: Embedder,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    spec: Spec,
) -> TrainState:
    """The state before the first step, a function of the configuration's seed."""
    model_key, objective_key = jax.random.split(jax.random.key(config.seed))
    view = View(config.data.image_size, config.data.resize, config.data.channels)
    model_params = model.init(model_key, example_images(view))["params"]
    objective_params, objective_state = objective.init(objective_key, spec)
    params = {"model": model_params, "objective": objective_params}
    trained, _ = optim.split_frozen(params, config.optim.frozen)
    return TrainState(
        jnp.int32(0), params, optimizer.init(trained), objective_state, skipped=jnp.int32(0)
    )


def make_train_step(
    config: ConfigDict,
    model: Embedder,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
) -> TrainStep:
    """The function of one step, to be jitted; it may overwrite the state it is given.

    The loss is that of the whole batch, wherever its images are embedded, and whether at once or in
    the slices that `run.microbatch` asks for. The gradient is taken with respect to the trained
    parameters alone, and its norm is theirs. The metrics tell whether loss, gradient and update are
    finite; where they are not, the update is dropped if `train.on_nonfinite` says skip.

    Of a batch of `Crops` the step also takes the `resizing.Store` that they are cut from, a copy on
    each device.

    Args:
        config: The run's configuration.
        model: What is trained.
        objective: By what.
        optimizer: How.
        mesh: Devices that share the images of each batch, which then is filled up to
            `parallel.slices`; None: one device.
    """
    schedule = optim.learning_rate(config)
    mesh = mesh or parallel.create_mesh((1, 1))

    def embed(params: PyTree, images: Array, flips: Array) -> Outputs:
        with jax.named_scope("pixels"):
            images = normalize(images, config.data.mean, config.data.std)
            images = mirror(images, flips)
        return model.apply({"params": params}, images)

    cut = functools.partial(device_crops.cut, side=config.data.image_size)
    cut_all = parallel.map_local_images(cut, mesh)

    def train_step(
        state: TrainState, batch: Batch, store: device_crops.Store | None = None
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        trained, frozen = optim.split_frozen(state.params, config.optim.frozen)
        slices = parallel.slices(len(batch.labels), mesh, config.run.microbatch)
        embed_all = parallel.map_images(embed, mesh, slices.count)
        images = batch.images
        if store is not None:
            with jax.named_scope("crop"):
                images = cut_all(store, images)

        def loss_of(trained: PyTree) -> tuple[Array, tuple[PyTree, Metrics]]:
            params = optim.merge(trained, frozen)
            outputs = embed_all(params["model"], images, batch.flips)
            outputs = jax.tree.map(lambda x: x[: len(batch.labels)], outputs)
            with jax.named_scope("loss"):
                return objective.loss(
                    params["objective"], state.objective_state, outputs, None, batch, key
                )

        (loss, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(trained)
        objective_state, metrics = aux
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradient, state.opt_state, trained)
            changed = optax.apply_updates(trained, updates), opt_state, objective_state
        norms = {
            "loss": loss,
            "gradient_norm": optax.tree.norm(gradient),
            "update_norm": optax.tree.norm(updates),
        }
        finite = jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
        if config.train.on_nonfinite == "skip":
            before = trained, state.opt_state, state.objective_state
            changed = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, before)
        trained, opt_state, objective_state = changed
        dropped = state.skipped
        skipped = dropped + jnp.where(finite, 0, 1)
        params = optim.merge(trained, frozen)
        metrics |= {
            **norms,
            # The optimiser does not count dropped updates, so its schedule lags behind.
            "learning_rate": jnp.asarray(schedule(state.step - dropped)),
            "finite": finite,
            "skipped": skipped,
        }
        return TrainState(state.step + 1, params, opt_state, objective_state, skipped), metrics

    return train_step


def jit_train_step(train_step: TrainStep, mesh: Mesh, state: TrainState) -> TrainStep:
    """Jits a step that takes and returns states lying where this one does."""
    where = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(where, parallel.replicated(mesh)))


def share_out(mesh: Mesh, batch: Batch) -> Batch:
    """Puts a batch on the devices: images, or crops, and flips shared out, the rest everywhere."""
    images, flips = parallel.shard(mesh, (batch.images, batch.flips))
    labels, ids = parallel.place((batch.labels, batch.ids), parallel.replicated(mesh))
    return Batch(images=images, labels=labels, ids=ids, flips=flips)
