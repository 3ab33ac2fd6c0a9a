"""Training: one jitted step, and the loop around it."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from ml_collections import ConfigDict

from hypjax import optim, reporting
from hypjax.checkpoints import Checkpoints, Workdir
from hypjax.config import validate
from hypjax.data import device
from hypjax.data.dataset import Splits, open_splits
from hypjax.data.pipeline import training_batches
from hypjax.data.plans import ClassBalancedPlans, RandomCrop
from hypjax.errors import UserError
from hypjax.evaluate import Evaluator, example_images
from hypjax.interfaces import Batch
from hypjax.models import Embedder, create_embedder
from hypjax.objectives import Metrics, Objective, Spec, create_objective


class TrainState(NamedTuple):
    """All that a step changes.

    Attributes:
        step: Steps done.
        params: {"model": ..., "objective": ...}.
        opt_state: Of the optimiser, for the trained parameters.
        objective_state: What the objective carries along.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    objective_state: PyTree


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def create_state(
    config: ConfigDict,
    model: Embedder,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    spec: Spec,
) -> TrainState:
    """The state before the first step, a function of the configuration's seed."""
    model_key, objective_key = jax.random.split(jax.random.key(config.seed))
    model_params = model.init(model_key, example_images(config))["params"]
    objective_params, objective_state = objective.init(objective_key, spec)
    params = {"model": model_params, "objective": objective_params}
    trained, _ = optim.split_frozen(params, config.optim.frozen)
    return TrainState(jnp.int32(0), params, optimizer.init(trained), objective_state)


def make_train_step(
    config: ConfigDict,
    model: Embedder,
    objective: Objective,
    optimizer: optax.GradientTransformation,
) -> TrainStep:
    """The function of one step, to be jitted; it may overwrite the state it is given.

    The loss is that of the whole batch. The gradient is taken with respect to the trained
    parameters alone, and its norm is theirs.
    """
    schedule = optim.learning_rate(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        images = device.normalize(batch.images, config.data.mean, config.data.std)
        images = device.mirror(images, batch.flips)
        trained, frozen = optim.split_frozen(state.params, config.optim.frozen)

        def loss_of(trained: PyTree) -> tuple[Array, tuple[PyTree, Metrics]]:
            params = optim.merge(trained, frozen)
            outputs = model.apply({"params": params["model"]}, images)
            return objective.loss(
                params["objective"], state.objective_state, outputs, None, batch, key
            )

        (loss, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(trained)
        objective_state, metrics = aux
        updates, opt_state = optimizer.update(gradient, state.opt_state, trained)
        params = optim.merge(optax.apply_updates(trained, updates), frozen)
        metrics |= {
            "loss": loss,
            "gradient_norm": optax.tree.norm(gradient),
            "learning_rate": jnp.asarray(schedule(state.step)),
        }
        return TrainState(state.step + 1, params, opt_state, objective_state), metrics

    return train_step


def train_and_evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Trains a model from scratch and evaluates it before and after.

    A finished run is not trained again: its results are printed. An interrupted one continues
    from its last checkpoint.

    Args:
        config: The run's configuration.
        workdir: Folder for metrics.jsonl, results.json and the checkpoint.

    Returns:
        What results.json holds: {"untrained": {"head": {"recall@1": ...}, "encoder": {...}},
        "final": {...}}, measured on the test classes, and under "validation" the same, measured
        on the training classes that were held out, if any.

    Raises:
        UserError: The configuration cannot be run, or the folder is another run's.
    """
    validate(config)
    run = Workdir(pathlib.Path(workdir), config)
    if run.results is not None:
        print(f"{run.path} holds this run's results already:")
        print_results(run.results)
        return run.results
    splits = open_splits(config)
    plan = create_plans(config, splits)
    run.create()

    model, objective = create_embedder(config), create_objective(config)
    optimizer = optim.create_optimizer(config)
    evaluator = Evaluator(config, model, objective.score_space)
    state = create_state(config, model, objective, optimizer, create_spec(config, splits))
    print_model(state, splits, plan)
    untrained = evaluate_splits(evaluator, state, splits)

    with contextlib.closing(run.checkpoints()) as checkpoints:
        if checkpoints.latest_step is not None:
            state = restore(checkpoints, state)
            reporting.say(f"continuing after step {checkpoints.latest_step}")
        batches = training_batches(
            splits.train,
            plan,
            first_step=int(state.step),
            last_step=config.train.total_steps,
            side=config.data.image_size,
            channels=config.data.channels,
            workers=config.run.workers,
        )
        train_step = jax.jit(make_train_step(config, model, objective, optimizer), donate_argnums=0)
        validation = functools.partial(evaluator.recalls, dataset=splits.validation)
        state = train(config, run, checkpoints, state, train_step, batches, validation)

    final = evaluate_splits(evaluator, state, splits)
    results = {"untrained": untrained.pop("test"), "final": final.pop("test")}
    if splits.validation:
        results["validation"] = {"untrained": untrained["validation"], "final": final["validation"]}
    run.write_results(results)
    print_results(results)
    print(f"results.json, metrics.jsonl and the model are in {run.path}")
    return results


def train(
    config: ConfigDict,
    run: Workdir,
    checkpoints: Checkpoints,
    state: TrainState,
    train_step: TrainStep,
    batches: Iterator[Batch],
    validation: Callable[[PyTree], reporting.Recalls],
) -> TrainState:
    """Runs the steps that are left, and writes metrics and checkpoints meanwhile.

    Args:
        config: The run's configuration.
        run: Its folder.
        checkpoints: Its checkpoints.
        state: Where to begin; it is overwritten.
        train_step: One step, jitted.
        batches: One for each step that is left.
        validation: Scores the model's parameters on held-out classes, every `eval.every` steps.

    Returns:
        The state after the last step.
    """
    first, total = int(state.step), config.train.total_steps
    log = reporting.MetricsLog(run.path / "metrics.jsonl", first)
    progress = reporting.Progress(first, total, config.train.batch_size)
    meter = reporting.Meter(config.train.batch_size)
    for step in range(first + 1, total + 1):
        with meter.waiting():
            batch = next(batches)
        state, metrics = train_step(state, jax.device_put(batch))
        meter.add(metrics)
        if step == first + 1:
            meter.restart_clock()  # It compiles: its time tells nothing of the others'.
        last, saving = step == total, step % config.run.checkpoint_every == 0
        if last or saving or step % config.run.log_every == 0:
            values = meter.read()
            log.write(step, values)
            progress.show(values["loss"])
        progress.advance()
        if config.eval.every and step % config.eval.every == 0:
            recalls = validation(state.params["model"])
            log.write(step, {"validation": recalls})
            reporting.say(f"step {step}: validation {reporting.format_recalls(recalls)}")
            meter.restart_clock()
        if last or saving:
            save(checkpoints, state)
    progress.close()
    log.close()
    reporting.say(meter.summary())
    return state


def evaluate_splits(
    evaluator: Evaluator, state: TrainState, splits: Splits
) -> dict[str, dict[str, dict[str, float]]]:
    """Recalls on the test classes and, where there are any, on the validation classes."""
    params = state.params["model"]
    held_out = {"validation": splits.validation, "test": splits.test}
    return {name: evaluator.recalls(params, data) for name, data in held_out.items() if data}


def save(checkpoints: Checkpoints, state: TrainState) -> None:
    """Saves a state, the model apart from what only training needs."""
    rest = (state.params["objective"], state.opt_state, state.objective_state)
    checkpoints.save(int(state.step), model=state.params["model"], training=rest)


def restore(checkpoints: Checkpoints, like: TrainState) -> TrainState:
    """Restores the latest state that `save` wrote."""
    rest = (like.params["objective"], like.opt_state, like.objective_state)
    model, rest = checkpoints.restore(model=like.params["model"], training=rest)
    params = {"model": model, "objective": rest[0]}
    return TrainState(jnp.int32(checkpoints.latest_step), params, rest[1], rest[2])


def create_spec(config: ConfigDict, splits: Splits) -> Spec:
    """What the objective may need to know of the run."""
    return Spec(
        classes=splits.train.num_classes,
        samples_per_class=config.train.samples_per_class,
        encoder_dim=config.model.width,
        head_dim=config.model.head_dim,
        training_images=len(splits.train),
    )


def print_model(state: TrainState, splits: Splits, plan: ClassBalancedPlans) -> None:
    """Prints what is trained on what."""
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    parts = [
        f"{n}: {d.num_classes} classes, {len(d)} images" for n, d in splits._asdict().items() if d
    ]
    reporting.say(
        f"{parameters:,} parameters on {jax.devices()[0].device_kind}; " + "; ".join(parts)
    )
    reporting.say(f"{plan.batches_per_epoch} batches an epoch")


def create_plans(config: ConfigDict, splits: Splits) -> ClassBalancedPlans:
    """The batches of a run.

    Raises:
        UserError: A batch asks for more classes than there are.
    """
    samples = config.train.samples_per_class
    classes = config.train.batch_size // samples
    if classes > splits.train.num_classes:
        raise UserError(
            f"config.train.batch_size is {config.train.batch_size}, {classes} classes with "
            f"{samples} images each, but there are {splits.train.num_classes} training classes"
        )
    crop = RandomCrop(config.data.crop_area, config.data.crop_ratio, config.data.flip)
    return ClassBalancedPlans(
        splits.train.labels, splits.train.sizes, classes, samples, crop, config.seed
    )


def print_results(results: dict[str, Any]) -> None:
    """Prints the final table: before and after, head and encoder."""
    print("Recall on the test classes:")
    print(reporting.format_results({k: results[k] for k in ("untrained", "final")}))
    if "validation" in results:
        print("Recall on the training classes held out for validation (fewer, so easier):")
        print(reporting.format_results(results["validation"]))
