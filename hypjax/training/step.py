"""The train step: one jitted function from a state and a batch to the next state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PyTree

from hypjax import parallel
from hypjax.config.choices import matches
from hypjax.data.device_crops import Store
from hypjax.geometry import Space, Sphere, learned
from hypjax.objectives import Metrics, ProblemSizes, loss_function
from hypjax.objectives.base import LEARNED, compared
from hypjax.training import lora, optim, towers
from hypjax.training.learner import Learner
from hypjax.types import IMAGES, Batch, Outputs


class TrainState(NamedTuple):
    """Everything that a step changes, and the tuples of images mined for the current epoch."""

    step: Int[Array, ""]  # Number of completed steps.
    params: PyTree  # {"model": ..., "objective": ...}.
    opt_state: PyTree  # Optimiser state of the trained parameters.
    objective_state: PyTree
    skipped: Int[Array, ""]  # Number of updates dropped because they were not finite.
    teacher: PyTree = None  # Moving average of the trained model, if the objective needs a teacher.
    # Positions in the training set of the tuples' images, if batches are made of tuples.
    tuples: Int[Array, "tuples size"] | None = None
    average: PyTree = None  # Moving average with `train.ema_decay`, for evaluation.


# Takes a state, a batch and, with the device cache, the store that crops are cut from.
TrainStep = Callable[..., tuple[TrainState, Metrics]]


def create_state(learner: Learner, spec: ProblemSizes) -> TrainState:
    """Creates the state before the first step, which is a function of the seed."""
    model_key, objective_key = jax.random.split(jax.random.key(learner.step.seed))
    model, objective = learner.model, learner.objective
    objective_params, objective_state = objective.init(objective_key, spec)
    for group in objective.groups:
        if not any(matches(group.path, path) for path in flatten_dict(objective_params)):
            raise ValueError(f"the objective has a group {group.path}, but no such parameters")
    model_params = model.initial_parameters(model_key, learner.pixels.view)
    scalars = learned.initial_parameters(learner.scalars)
    params = {"model": model_params | scalars, "objective": objective_params}
    if learner.lora is not None:
        key = jax.random.fold_in(model_key, 0)
        params = lora.with_adapters(params, learner.lora, learner.frozen, key)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=learner.optimizer.init(optim.split_frozen(params, learner.frozen)[0]),
        objective_state=objective_state,
        skipped=jnp.int32(0),
        tuples=jnp.zeros(spec.tuples, jnp.int32) if all(spec.tuples) else None,
        **start_averages(learner, params),
    )


def start_averages(learner: Learner, params: PyTree) -> dict[str, PyTree]:
    """Starts the teacher and the moving average, where needed, as copies of the trained model."""
    model = optim.split_frozen(params, learner.frozen)[0].get("model", {})
    needs_teacher = learner.objective.teacher_decay is not None
    needs_average = learner.step.ema_decay > 0
    return {  # Copies, since a step donates each buffer.
        "teacher": jax.tree.map(jnp.copy, model) if needs_teacher else None,
        "average": jax.tree.map(jnp.copy, model) if needs_average else None,
    }


def trained_model(learner: Learner, state: TrainState) -> PyTree:
    """The model's parameters after the last step, with adapters merged into the kernels."""
    model = state.params["model"]
    return model if learner.lora is None else _without_adapters(model, learner.lora, learner.mesh)


def evaluated_model(learner: Learner, state: TrainState) -> PyTree:
    """The parameters to evaluate and save: `trained_model`, or the moving average if any."""
    if state.average is not None:
        _, frozen = optim.split_frozen(state.params, learner.frozen)
        state = state._replace(params=optim.merge({"model": state.average}, frozen))
    return trained_model(learner, state)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _without_adapters(model: PyTree, adapters: lora.Lora, mesh: Mesh) -> PyTree:
    model = lora.merged(model, adapters)
    return jax.lax.with_sharding_constraint(model, parallel.parameter_shardings(mesh, model))


def make_train_step(learner: Learner, *, head_only: bool = False) -> TrainStep:
    """Builds the train step. Jit it with `donate_argnums=0`.

    The loss covers the whole batch, for any number of devices and microbatches. The gradient and
    its norm cover only trained parameters; with `head_only`, for `train.head_warmup_steps`, not the
    encoder's, which saves time and memory. The teacher embeds the same inputs without stochastic
    depth. With the device cache, batches hold `Crops` of the store.
    """

    def train_step(
        state: TrainState, batch: Batch, store: Store | None = None
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(learner.step.seed), state.step)
        trained, frozen = optim.split_frozen(state.params, learner.frozen)
        batch_size = len(batch.labels)
        slices = parallel.slices(batch_size, learner.mesh, learner.step.microbatch)
        embed_all = towers.embed_all_function(learner, slices.count)
        key, rows = towers.prepare(learner, key, batch, store)

        def outputs_of(model: PyTree, rows: towers.Rows) -> dict[str, Outputs]:
            outputs = embed_all(model, rows)
            return jax.tree.map(lambda x: x[:batch_size], outputs)  # Without the padding.

        teacher = None
        if state.teacher is not None:
            with jax.named_scope("teacher"):
                model = optim.merge({"model": state.teacher}, frozen)["model"]
                teacher = outputs_of(model, rows._replace(drop_path_masks=None))

        # Parameters with a gradient, and parameters that wait for the end of the head's warm-up.
        active, waiting = optim.split_frozen(trained, ("encoder",)) if head_only else (trained, {})

        def loss_of(active: PyTree) -> tuple[Array, tuple[PyTree, Metrics]]:
            params = optim.merge(optim.merge(active, waiting), frozen)
            outputs = outputs_of(params["model"], rows)
            with jax.named_scope("loss"):
                scalars = learned.scalar_values(params["model"].get("scalars", {}))
                objective = learner.objective.with_scalars(scalars)
                loss, taught = loss_function(objective), compared(objective, teacher)
                variables = params["objective"], state.objective_state

                def loss_at(outputs: dict[str, Outputs]) -> tuple[Array, tuple[PyTree, Metrics]]:
                    return loss(*variables, compared(objective, outputs), taught, batch, key)

                value, (objective_state, metrics) = loss_at(outputs)
                if learner.step.gradient_covariance:
                    norm = _gradient_covariance(lambda x: loss_at(x)[0], outputs, objective.space)
                    metrics = {**metrics, "gradient_covariance": norm}
                return value, (objective_state, metrics)

        (loss, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(active)
        gradient = optim.merge(gradient, jax.tree.map(jnp.zeros_like, waiting))
        return _apply_gradient(learner, state, gradient, loss, aux)

    return train_step


def _gradient_covariance(
    loss_of: Callable[[dict[str, Outputs]], Array], outputs: dict[str, Outputs], space: Space
) -> Array:
    """Nuclear norm of the covariance of the images' gradients: its trace (IRT, Section 3.5).

    Gradients are those by the descriptors. If the space normalises features, so are descriptors:
    otherwise features of twice the length would have a quarter of the norm at the same loss.
    """
    fixed = jax.lax.stop_gradient(outputs)
    images = fixed[IMAGES]

    def loss_at(descriptors: Array) -> Array:
        return loss_of({**fixed, IMAGES: images._replace(projected=descriptors)})

    descriptors = Sphere().embed(images.projected) if space.normalized else images.projected
    gradients = jax.grad(loss_at)(descriptors)
    # Gradients of the sum of the images' losses, not of their mean.
    return jnp.sum(jnp.var(len(gradients) * gradients, axis=0))


def _apply_gradient(
    learner: Learner, state: TrainState, gradient: PyTree, loss: Array, aux: tuple[PyTree, Metrics]
) -> tuple[TrainState, Metrics]:
    """Returns the next state and metrics; `aux` are the objective's new state and metrics."""
    trained, frozen = optim.split_frozen(state.params, learner.frozen)
    objective_state, metrics = aux
    with jax.named_scope("optimizer"):
        extra = {}
        if any(group.ball_c == LEARNED for group in learner.objective.groups):
            extra["c"] = learned.scalar_values(state.params["model"]["scalars"])["c"]
        updates, opt_state = learner.optimizer.update(gradient, state.opt_state, trained, **extra)
        updated = optax.apply_updates(trained, updates)
        if "scalars" in updated.get("model", {}):  # Learned scalars that are not frozen.
            scalars = updated["model"]["scalars"]
            scalars = learned.within_bounds(scalars, learner.scalar_bounds)
            updated = {**updated, "model": {**updated["model"], "scalars": scalars}}
        averages = _update_averages(learner, state, updated.get("model", {}))
    norms = {
        "loss": loss,
        "gradient_norm": optax.tree.norm(gradient),
        "update_norm": optax.tree.norm(updates),
    }
    finite = jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
    if learner.step.skips_nonfinite:
        # The devices select the values, so that the host need not wait for each step.
        lasting = learner.objective.lasting_state
        updated = _select(finite, updated, trained)
        opt_state = _select(finite, opt_state, state.opt_state)
        objective_state = _select(finite, objective_state, state.objective_state, lasting)
        averages = _select(finite, averages, (state.teacher, state.average))
    skipped = state.skipped + jnp.where(finite, 0, 1)
    metrics |= {
        **norms,
        # The optimiser does not count dropped updates, so neither does its schedule.
        "learning_rate": jnp.asarray(learner.schedule(state.step - state.skipped)),
        "finite": finite,
        "skipped": skipped,
    }
    if "scalars" in state.params["model"]:
        scalars = learned.named_scalars(state.params["model"]["scalars"])
        metrics |= jax.tree.map(jnp.float32, scalars)
    teacher, average = averages
    state = state._replace(
        step=state.step + 1,
        params=optim.merge(updated, frozen),
        opt_state=opt_state,
        objective_state=objective_state,
        skipped=skipped,
        teacher=teacher,
        average=average,
    )
    return state, metrics


def _select(
    finite: Bool[Array, ""], new: PyTree, old: PyTree, lasting: Sequence[str] = ()
) -> PyTree:
    """Selects the new tree if the step is finite, or the old tree; `lasting` entries stay new."""

    def select_leaf(path: tuple[Any, ...], new: Array, old: Array) -> Array:
        names = {getattr(key, "key", None) for key in path}
        return new if names & {*lasting} else jnp.where(finite, new, old)

    return jax.tree_util.tree_map_with_path(select_leaf, new, old)


def _update_averages(learner: Learner, state: TrainState, trained: PyTree) -> tuple[PyTree, PyTree]:
    """Moves the teacher and the moving average towards the updated model."""
    teacher, average = state.teacher, state.average
    if teacher is not None and (decay := learner.objective.teacher_decay) is not None:
        teacher = optax.incremental_update(trained, teacher, 1 - decay)
    if average is not None:
        # The decay warms up as in timm's ModelEmaV3, so that a random head is soon forgotten.
        updates = state.step - state.skipped
        step_size = jnp.maximum(1 - learner.step.ema_decay, (1 + updates) ** (-2 / 3))
        average = optax.incremental_update(trained, average, step_size)
    return teacher, average


def jit_train_step(
    learner: Learner, state: TrainState, *, head_only: bool = False
) -> jax.stages.Wrapped:
    """Builds and jits the train step for states with the same shardings as `state`."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(
        make_train_step(learner, head_only=head_only),
        donate_argnums=0,
        out_shardings=(shardings, parallel.replicated(learner.mesh)),
        compiler_options=parallel.compiler_options(learner.mesh),
    )


def shard_batch(mesh: Mesh, batch: Batch) -> Batch:
    """Puts a batch on the devices: inputs and flips sharded, labels and ids replicated."""
    inputs, flips = parallel.shard(mesh, (batch.inputs, batch.flips))
    labels, ids = parallel.place((batch.labels, batch.ids), parallel.replicated(mesh))
    return Batch(inputs, labels, ids, flips)
