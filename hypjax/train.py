"""Training: the loop around the jitted step."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config import flatten, validate
from hypjax.config.groups import GROUPS
from hypjax.data.dataset import Dataset, Splits
from hypjax.data.device_cache import Layout, crop_batches, fill, plan_store, stored_sizes
from hypjax.data.device_crops import Store
from hypjax.data.pipeline import training_batches
from hypjax.data.plans import (
    ClassPlans,
    DrawnClassPlans,
    EpochClassPlans,
    Plans,
    RandomCrop,
    ShuffledPlans,
)
from hypjax.data.splits import open_splits
from hypjax.errors import Interrupted, UserError
from hypjax.evaluate import Evaluator, check_depth
from hypjax.inference.weights import pretrained_encoder
from hypjax.models import Embedder, compute_dtype, create_embedder, model_shapes
from hypjax.monitoring.monitor import Monitor
from hypjax.monitoring.stopwatch import TIMES, Stopwatch
from hypjax.monitoring.telemetry import require_wandb
from hypjax.monitoring.tracing import Trace
from hypjax.objectives import Spec, create_objective
from hypjax.parallel import processes, watchdog
from hypjax.reports import published
from hypjax.reports.tables import format_results, noted, print_notes
from hypjax.runs.cloud_copy import LocalFolder, open_folder
from hypjax.runs.shared_checkpoints import SharedCheckpoints
from hypjax.runs.workdir import Workdir
from hypjax.system import console, interrupts, memory
from hypjax.system.files import write_json
from hypjax.training import optim
from hypjax.training.step import (
    TrainState,
    TrainStep,
    create_state,
    jit_train_step,
    make_train_step,
    share_out,
)
from hypjax.types import Batch, Recalls, View, Workers


def starting_encoder(config: ConfigDict, model: Embedder) -> PyTree | None:
    """The encoder's parameters that `model.weights` names; None: it begins at random."""
    if config.model.weights is None:
        return None
    encoder = pretrained_encoder(config, model.encoder)
    console.say(f"the encoder starts from {config.model.weights}")
    return encoder


def first_encoder(config: ConfigDict, model: Embedder) -> PyTree | None:
    """`starting_encoder` of the first process, in all of them."""
    like = model_shapes(config, model)["encoder"]
    return processes.arrays_from_first(lambda: starting_encoder(config, model), like)


def shared_fields(config: ConfigDict) -> dict[str, Any]:
    """Fields in which the processes of a run may not differ, with their values."""
    own = ("run.data_dir", "run.cache", "run.workers", "run.wandb", "data.path", "run.input")
    shared = {f"config.{n}": v for n, v in flatten(config).items() if not n.startswith(own)}
    cache = config.run.cache
    return shared | {"config.run.cache": cache if cache == "device" else "none or host"}


def with_encoder(state: TrainState, encoder: PyTree | None) -> TrainState:
    """Puts an encoder's parameters, if there are any, in the place of the random ones."""
    if encoder is None:
        return state
    random = state.params["model"]["encoder"]
    encoder = jax.tree.map(lambda x, old: parallel.place(x, old.sharding), encoder, random)
    model = {**state.params["model"], "encoder": encoder}
    return state._replace(params={**state.params, "model": model})


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | pathlib.Path,
    profile: tuple[int, int] | None = None,
    launched: float | None = None,
) -> dict[str, Any]:
    """Trains a model, from pretrained weights where these are named, and evaluates it.

    A finished run is not trained again: its results are printed. An interrupted one continues
    from its last checkpoint, and ends as if it had never been interrupted.

    Args:
        config: The run's configuration.
        workdir: Folder for results, measurements and checkpoints; possibly a URL of cloud storage.
        profile: First and last step of which to write a trace; None: no trace.
        launched: Moment from which times.json counts, see `stopwatch.launch`; None: now.

    Returns:
        What results.json holds: {"untrained": {"head": {"recall@1": ...}, "encoder": {...}},
        "final": {...}}, measured on the test classes before and after. Where classes were held
        out for validation, also "best", of the checkpoint that did best on them, its step as
        "best_step", and under "validation" the same, measured on those classes.

    Raises:
        UserError: The configuration cannot be run, the folder is another run's or in use, a loss
            is not finite, or the last state could not be saved or copied to the cloud.
        Interrupted: An interrupt came, and the state is saved.
    """
    stopwatch = Stopwatch(launched)
    validate(config)
    first_process = processes.is_first()
    stopwatch.turn_to("prepare")  # JAX has started, if it had not before.
    storage = open_folder(workdir) if first_process else LocalFolder(pathlib.Path(workdir))
    run = Workdir(storage.folder, config, compared=("",) if first_process else ())
    results = processes.from_first(lambda: run.results)
    if results is not None:
        print(f"{storage.location} holds this run's results already:")
        print_results(results, config)
        if profile is not None:
            console.warn("nothing is left to be traced")
        return results
    if first_process:
        require_wandb(config)
    mesh = parallel.create_mesh(config.run.mesh)
    model, objective = create_embedder(config), create_objective(config)
    trace = Trace(
        run.path / "profile", profile if first_process else None, config.train.total_steps
    )
    splits = open_splits(config)
    check_depth(config, splits)
    plan = create_plans(config, splits)
    layout = plan_store(config, splits.train, mesh)
    circumstances = {"images": splits.fingerprint, "precision": compute_dtype(config).name}
    processes.require_same({**circumstances, **shared_fields(config)})
    # Read before the folder is claimed: a mistake in their name leaves nothing behind.
    begins = processes.from_first(lambda: not run.has_checkpoint)
    encoder = first_encoder(config, model) if begins else None
    with (
        run.claimed(circumstances) if first_process else contextlib.nullcontext(),
        storage,
        contextlib.closing(SharedCheckpoints(run.checkpoints)) as checkpoints,
        watchdog.protected_cleanup(),
    ):
        optimizer = optim.create_optimizer(config)
        evaluator = Evaluator(config, objective.score_space, mesh)
        spec = create_spec(config, model, splits)
        # In one program: as many small ones as there are operations would take longer to compile.
        state = jax.jit(lambda: create_state(config, model, objective, optimizer, spec))()
        state = processes.arrays_from_first(lambda state=state: state, state)
        state = parallel.place(state, parallel.parameter_shardings(mesh, state))
        print_model(state, mesh, splits, plan)
        restored = restore(checkpoints, state)
        if restored is None:
            warn_of_frozen(config, state)
            state = with_encoder(state, encoder or first_encoder(config, model))
            del encoder
            with stopwatch.part("evaluation"):
                recalls = Recalls(untrained=evaluate_splits(evaluator, state, splits))
        else:
            state, recalls = restored
            console.say(f"continuing after step {int(state.step)}")
        train_step = make_train_step(config, model, objective, optimizer, mesh)
        train_step = jit_train_step(train_step, mesh, state)
        first = int(state.step)
        batches, store = open_input(config, mesh, splits.train, plan, layout, first)
        train_step = functools.partial(train_step, store=store)
        monitor = Monitor(config, run.path, first, checkpoints, splits.train.name, trace, stopwatch)
        validation = splits.validation and functools.partial(
            evaluator.recalls, dataset=splits.validation
        )
        with contextlib.closing(batches), monitor:
            if first == 0:
                monitor.write(0, recalls.untrained)
            stopwatch.turn_to("steps")
            state, recalls = train(
                config, mesh, state, recalls, train_step, batches, validation, checkpoints, monitor
            )
            stopwatch.turn_to("other")
            with stopwatch.part("saving"):
                checkpoints.wait()
                save(checkpoints, state, recalls, score(config, recalls))  # Again, if that failed.
            with stopwatch.part("evaluation"):
                results = collect_results(checkpoints, state, recalls, evaluator, splits)
            monitor.write(config.train.total_steps, {"test": results["final"]})
        print_results(results, config)
        with stopwatch.part("saving"):
            checkpoints.wait()
        steps = checkpoints.steps
        if config.train.total_steps not in steps:
            saved = f"from step {steps[-1]}" if steps else "anew"
            raise UserError(
                f"the last state of this run could not be saved in {run.path}, so that it is not "
                f"finished; make room, and the same command goes on {saved}"
            )
        if first_process:
            write_times(run.path, stopwatch, steps=config.train.total_steps - first)
        processes.from_first(lambda: run.write_results(results))
    print(f"results.json, metrics.jsonl and the models are in {storage.location}")
    return results


def open_input(
    config: ConfigDict, mesh: Mesh, dataset: Dataset, plan: Plans, layout: Layout | None, first: int
) -> tuple[Generator[Batch, None, None], Store | None]:
    """The batches of the steps that are left, and what the devices cut them from themselves.

    Args:
        config: The run's configuration.
        mesh: The devices.
        dataset: The training set.
        plan: What each step wants.
        layout: Where images are to lie on the devices; None: the host crops them.
        first: Steps done.

    Raises:
        UserError: An image cannot be read.
    """
    slices = parallel.slices(config.train.batch_size, mesh, config.run.microbatch)
    rows, last = parallel.local_rows(mesh, slices.rows), config.train.total_steps
    if layout is not None:
        store = fill(layout, dataset, mesh) if first < last else None
        return crop_batches(layout, plan, range(first, last), rows), store
    batches = training_batches(
        dataset,
        plan,
        range(first, last),
        View(config.data.image_size, config.data.resize, config.data.channels),
        Workers(config.run.workers, config.run.input_timeout),
        rows,
    )
    return batches, None


def write_times(folder: pathlib.Path, stopwatch: Stopwatch, steps: int) -> None:
    """Writes and tells where this launch's time went, and how much memory it took."""
    times = {
        "steps": steps,
        "seconds": {name: round(value, 3) for name, value in stopwatch.seconds().items()},
        "programs": stopwatch.programs(),
        **memory.peaks(),
    }
    with console.tolerating(str(folder / TIMES)):
        write_json(folder / TIMES, times)
    console.say(stopwatch.describe())


class Recalls(NamedTuple):
    """Recalls measured on the way to the results; saved with each state.

    Attributes:
        untrained: On the test classes and the validation classes, before the first step.
        validation: The latest on the validation classes; None where there was none yet.
    """

    untrained: dict[str, Recalls]
    validation: Recalls | None = None


def train(
    config: ConfigDict,
    mesh: Mesh,
    state: TrainState,
    recalls: Recalls,
    train_step: TrainStep,
    batches: Iterator[Batch],
    validation: Callable[[PyTree], Recalls] | None,
    checkpoints: SharedCheckpoints,
    monitor: Monitor,
) -> tuple[TrainState, Recalls]:
    """Runs the steps that are left, under a monitor, and saves checkpoints meanwhile.

    A checkpoint is saved every `run.checkpoint_every` steps, whenever the recall on the validation
    classes is the highest so far, after the last step, and when training has to stop.

    Args:
        config: The run's configuration.
        mesh: The devices.
        state: Where to begin; it is overwritten.
        recalls: Those measured so far.
        train_step: One step, jitted.
        batches: One for each step that is left.
        validation: Scores the model's parameters on held-out classes, every `eval.every` steps and
            at the end; None: there are no such classes.
        checkpoints: The run's.
        monitor: Told of every step.

    Returns:
        The state after the last step, and the recalls.

    Raises:
        UserError: A loss is not finite, or an image cannot be read any more.
        Interrupted: An interrupt came.
    """
    first, total = int(state.step), config.train.total_steps
    agreed = processes.Agreement(mesh)
    message = "interrupted: finishing this step and saving; once more to stop at once"
    with (
        interrupts.deferred(message) as interrupted,
        memory.explained("train.batch_size, data.image_size or the model's size"),
    ):
        for step in range(first + 1, total + 1):
            try:
                with monitor.waiting(step):
                    batch = next(batches)
            except Exception:  # An image cannot be read, or an interrupt ended the workers.
                if jax.process_count() > 1:
                    raise  # The others are waiting in this step, and cannot take part in saving.
                monitor.settle()
                if step > first + 1:
                    save(checkpoints, state, recalls)
                if interrupted():
                    stop(checkpoints, step - 1, interrupted.status)
                raise
            with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
                state, metrics = train_step(state, share_out(mesh, batch))
            last, scored = step == total, None
            saving = last or _due(step, config.run.checkpoint_every)
            validating = validation and (last or _due(step, config.eval.every))
            monitor.add(step, batch.ids, metrics)
            if saving or validating or _due(step, config.run.log_every):
                monitor.report(step)
            if validating:
                with monitor.timing("evaluation"):
                    recalls = recalls._replace(validation=validation(state.params["model"]))
                monitor.validated(step, recalls.validation)
                scored, best = score(config, recalls), checkpoints.best_score
                saving |= best is None or scored > best
            status = agreed(interrupted.status)
            stopping = status and not last
            if saving or stopping:
                monitor.report(step)
                with monitor.timing("saving"):
                    save(checkpoints, state, recalls, scored)
            if stopping:
                stop(checkpoints, step, status)
    if total > first:
        console.say(monitor.summary())
    if skipped := int(state.skipped):
        console.warn(f"{skipped} of {total} updates were not finite and were skipped")
    return state, recalls


def score(config: ConfigDict, recalls: Recalls) -> float | None:
    """By which checkpoints are compared: Recall@K of the head on the validation classes."""
    if recalls.validation is None:
        return None
    return recalls.validation["head"][f"recall@{min(config.eval.ks)}"]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def stop(checkpoints: SharedCheckpoints, step: int, status: int) -> None:
    """Ends training after an interrupt, with a status.

    Raises:
        Interrupted: Always.
    """
    checkpoints.wait()
    if step in checkpoints.steps:
        raise Interrupted(f"step {step} is saved, and the same command goes on from there", status)
    raise Interrupted(f"step {step} could not be saved", status)


def evaluate_splits(evaluator: Evaluator, state: TrainState, splits: Splits) -> dict[str, Recalls]:
    """Recalls on the test classes and, where there are any, on the validation classes."""
    params = state.params["model"]
    recalls = {"test": evaluator.recalls(params, splits.test, splits.gallery)}
    if splits.validation:
        recalls["validation"] = evaluator.recalls(params, splits.validation)
    return recalls


def collect_results(
    checkpoints: SharedCheckpoints,
    state: TrainState,
    recalls: Recalls,
    evaluator: Evaluator,
    splits: Splits,
) -> dict[str, Any]:
    """Evaluates the last model and the best one, and puts all recalls together.

    The best is chosen on the validation classes alone; without them there is none.
    """

    def test_recalls(params: PyTree) -> Recalls:
        return evaluator.recalls(params, splits.test, splits.gallery)

    model = state.params["model"]
    results = {"untrained": recalls.untrained["test"], "final": test_recalls(model)}
    results |= noted(splits.notes)
    if not splits.validation:
        return results
    held_out = {"untrained": recalls.untrained["validation"], "final": recalls.validation}
    checkpoints.wait()
    best_step = checkpoints.best_step
    if best_step == int(state.step):
        results["best"], held_out["best"] = results["final"], held_out["final"]
    elif (best := checkpoints.restore_best(model=model)) is not None:
        results["best"] = test_recalls(best.trees[0])
        held_out["best"] = evaluator.recalls(best.trees[0], splits.validation)
    if "best" in results:
        results["best_step"] = checkpoints.best_step
    return results | {"validation": held_out}


def save(
    checkpoints: SharedCheckpoints, state: TrainState, recalls: Recalls, score: float | None = None
) -> None:
    """Saves a state, the model apart from what only training needs.

    Args:
        checkpoints: Where.
        state: What.
        recalls: Saved beside it.
        score: On the validation classes, if it was measured after this very step.
    """
    step = int(state.step)
    if step not in checkpoints.steps:
        rest = (state.params["objective"], state.opt_state, state.objective_state, state.skipped)
        checkpoints.save(
            step, record=recalls._asdict(), score=score, model=state.params["model"], training=rest
        )


def restore(checkpoints: SharedCheckpoints, like: TrainState) -> tuple[TrainState, Recalls] | None:
    """Restores the latest state that `save` wrote and that is not damaged; None: there is none."""
    rest = (like.params["objective"], like.opt_state, like.objective_state, like.skipped)
    restored = checkpoints.restore_latest(model=like.params["model"], training=rest)
    if restored is None:
        return None
    checkpoints.restore_best(model=like.params["model"])  # Names it if damaged, not at the end.
    model, (objective, opt_state, objective_state, skipped) = restored.trees
    params = {"model": model, "objective": objective}
    step = parallel.place(jnp.int32(restored.step), like.step.sharding)
    state = TrainState(step, params, opt_state, objective_state, skipped)
    return state, Recalls(**restored.record)


def create_spec(config: ConfigDict, model: Embedder, splits: Splits) -> Spec:
    """What the objective may need to know of the run."""
    return Spec(
        classes=splits.train.num_classes,
        samples_per_class=config.train.samples_per_class,
        encoder_dim=model.encoder.dim,
        head_dim=config.model.head_dim,
        training_images=len(splits.train),
    )


def print_model(state: TrainState, mesh: Mesh, splits: Splits, plan: Plans) -> None:
    """Prints what is trained on what."""
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    named["gallery"] = splits.gallery
    parts = [f"{n}: {d.describe()}" for n, d in named.items() if d]
    devices = mesh.devices.flat[0].device_kind
    if mesh.size > 1:
        devices = f"{mesh.size} devices ({devices})"
    console.say(f"{parameters:,} parameters on {devices}; " + "; ".join(parts))
    console.say(f"batches in an epoch: {plan.batches_per_epoch}")
    if isinstance(plan, ClassPlans):
        few = int(np.sum(np.bincount(plan.labels) < plan.samples_per_class))
        if few:
            console.say(
                f"{few} of {splits.train.num_classes} training classes have fewer than "
                f"{plan.samples_per_class} images, some of which come twice in a batch"
            )


def warn_of_frozen(config: ConfigDict, state: TrainState) -> None:
    """Warns where freezing does nothing, or keeps what is random as it is."""
    for group in config.optim.frozen:
        _, frozen = optim.split_frozen(state.params, (group,))
        stem = GROUPS[group]
        if not any(path[: len(stem)] == stem for path in flatten_dict(frozen)):
            console.warn(f"optim.frozen names {group}, of which this model has none")
        elif config.model.weights is None:
            console.warn(f"{group} stays random: it is frozen, and model.weights is None")


def create_plans(config: ConfigDict, splits: Splits) -> Plans:
    """The batches of a run.

    Raises:
        UserError: A batch asks for more classes, or images, than there are.
    """
    images, train = splits.train, config.train
    crop = RandomCrop(config.data.crop_area, config.data.crop_ratio, config.data.flip)
    sizes = stored_sizes(images.sizes, config.data.stored_side)
    common = (images.labels, sizes, train.batch_size, crop, config.seed)
    if train.sampling == "shuffled":
        if train.batch_size > len(images):
            raise UserError(
                f"config.train.batch_size is {train.batch_size}, but there are {len(images)} "
                f"training images; set --config.train.batch_size={len(images)} or less"
            )
        return ShuffledPlans(*common)
    samples = train.samples_per_class
    classes = config.train.batch_size // samples
    if classes > splits.train.num_classes:
        most = splits.train.num_classes * samples
        raise UserError(
            f"config.train.batch_size is {config.train.batch_size}, {classes} classes with "
            f"{samples} images each, but there are {splits.train.num_classes} training classes; "
            f"set --config.train.batch_size={most} or less"
        )
    kind = {"epoch_classes": EpochClassPlans, "drawn_classes": DrawnClassPlans}[train.sampling]
    return kind(*common, samples, train.repeat_images)


def print_results(results: dict[str, Any], config: ConfigDict) -> None:
    """Prints the final table: before and after, head and encoder, and what was published."""
    shown = [name for name in ("untrained", "final", "best") if name in results]
    print("Recall on the test classes:")
    print(format_results({name: results[name] for name in shown}))
    if "validation" in results:
        print("Recall on the training classes held out for validation:")
        print(format_results(results["validation"]))
    if "best" in results:
        print(f"best: step {results['best_step']}, chosen on the validation classes")
    print_notes(results)
    published.show(results, config)
