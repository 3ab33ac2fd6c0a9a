"""Training from top to bottom: opens the run, builds it, begins or restores, loops, finishes."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from hypjax.assemble import (
    assemble,
    assemble_method,
    assemble_training,
    choose_dataset,
    code_hashes,
)
from hypjax.config import Config, flatten, for_files, own_copy, set_fields, validate
from hypjax.config.custom import choosing
from hypjax.config.rules import refuse
from hypjax.data.dataset import Dataset
from hypjax.errors import at_the_call
from hypjax.experiment.experiment import Experiment
from hypjax.inference.pretrained import (
    copy_tokenizer,
    starting_parameters,
    warn_of_known_classes,
)
from hypjax.monitoring.monitor import Monitor, Trace
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import Telemetry, require_wandb
from hypjax.objectives import Objective
from hypjax.parallel import processes
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.files import REPORT
from hypjax.runs.workdir import Workdir, has_checkpoint, require_provenance
from hypjax.system import console
from hypjax.system.caches import keep_compiled_programs
from hypjax.training.input import open_input
from hypjax.training.loop import Loop
from hypjax.training.results import collect_results, print_results, write_times
from hypjax.training.setup import Training
from hypjax.training.states import restore_or_start, score_untrained


@at_the_call
def train_and_evaluate(
    config: Config | str,
    workdir: str | pathlib.Path,
    *,
    dataset: Any = None,
    encoder: nn.Module | None = None,
    objective: Objective | Callable[..., Any] | None = None,
    profile: tuple[int, int] | None = None,
    launched: float | None = None,
    report: Callable[[Experiment], bool] | None = None,
) -> dict[str, Any]:
    """Trains and evaluates a model.

    Resumes an interrupted run, and only prints the results of a finished one. A `dataset`,
    `encoder` or `objective` replaces the one that the configuration names. To embed and search
    later, pass a custom encoder to `hypjax.load`, too.

    Args:
        config: A configuration, or its name, such as "configs/folder.py:hyp-scratch".
        workdir: Folder of the run, or its URL.
        dataset: (images, labels), where images are arrays or Pillow images; pairs of a path or an
            image and its label; a Hugging Face `datasets.Dataset`; or {"train": ..., "test": ...}
            of these. Without splits, classes are held out as for a folder.
        encoder: An `Encoder`, or a Flax module that maps normalised pixels [images, height, width,
            channels] to [images, dim]. The configuration's head follows the encoder.
        objective: An `Objective`, or a function as for `hypjax.register_objective`.
        profile: First and last step to trace.
        launched: Start of the times in times.json, in seconds as `time.monotonic`; by default now.
        report: Function that writes a page about the finished run, and returns whether it did, such
            as `hypjax.analysis.report.write_own_report`.

    Returns:
        The contents of results.json: {"untrained": {"head": {"recall@1": ...}, ...}, "final": ...}
        on the test classes. With validation classes, also "best", "best_step", "tied_steps"
        (if several steps have the best validation score) and "validation".

    Raises:
        UserError: Configuration or folder cannot be used, a loss is not finite, or saving failed.
        Interrupted: An interrupt arrived, and the state is saved.
    """
    stopwatch = Stopwatch(launched)
    keep_compiled_programs()
    config = own_copy(config)
    images = None if dataset is None else choose_dataset(config, dataset)
    with choosing(config, encoder=encoder, objective=objective):
        validate(config)
        fields = flatten(config)
        if fields["train.total_steps"] == 0:
            refuse("train.total_steps", 0, "at least 1; --mode=evaluate evaluates without training")
        warnings = console.collect_warnings()
        stopwatch.turn_to("prepare")  # By now JAX has its devices.
        folder = Workdir(workdir, fields)
        set_fields(config, folder.fitted)
        if (results := folder.results) is None:
            require_wandb(fields["run.wandb_project"])
            return _train(config, images, folder, profile, report, warnings, stopwatch)
        return _show_results(config, images, folder, results, report)


def _show_results(
    config: Config,
    images: Dataset | None,
    folder: Workdir,
    results: dict[str, Any],
    report: Callable[[Experiment], bool] | None,
) -> dict[str, Any]:
    """Prints the results of a finished run; writes the report if an interrupt prevented it."""
    path = folder.path
    run = functools.partial(
        assemble, config, images, name=folder.name, workdir=str(path), folder=path
    )
    if folder.has_moved:  # Checks that the images are the same, and saves where they are now.
        moved = run()
        space = moved.method.objective.score_space
        with folder.locked(shared_provenance(moved), moved.method.fields, space):
            pass
    known = code_hashes(config)
    if images is not None:
        known["images"] = str(images.records_fingerprint)
    processes.from_first(lambda: require_provenance(folder.path, known))
    print(f"{folder.location} holds this run's results already:")
    print_results(results, flatten(config))
    # An interrupt may have prevented the report.
    is_reported = (folder.path / REPORT).exists() or not has_checkpoint(folder.path)
    if report is not None and results["final"] and not is_reported and report(run()):
        print(f"the report is {folder.path / REPORT}")
    return results


def _train(
    config: Config,
    images: Dataset | None,
    folder: Workdir,
    profile: tuple[int, int] | None,
    report: Callable[[Experiment], bool] | None,
    warnings: list[str],
    stopwatch: Stopwatch,
) -> dict[str, Any]:
    """Begins or restores a run in its folder, trains and evaluates it, and saves the results."""
    # Reads weights before the folder exists: a wrong name leaves nothing behind. And before images,
    # which may take minutes to prepare.
    method, path = assemble_method(config), folder.path
    read_weights = functools.cache(functools.partial(starting_parameters, method))
    begins = not processes.from_first(lambda: has_checkpoint(path))
    if begins:
        read_weights()
    training = assemble_training(config, images, method=method, name=folder.name, workdir=str(path))
    experiment, schedule = training.experiment, training.schedule
    method, splits = experiment.method, experiment.splits
    if begins:
        processes.from_first(lambda: warn_of_known_classes(method, splits.fingerprint))
    trace = Trace(path / "profile", profile if processes.is_first() else None, schedule.total_steps)
    facts, space = shared_provenance(experiment), method.objective.score_space
    with folder.locked(facts, method.fields, space, training.learner.mesh) as checkpoints:
        console.say(f"the run's folder is {folder.location}")
        processes.from_first(lambda: copy_tokenizer(method, folder.path))
        state, measured = restore_or_start(training, checkpoints, read_weights)
        read_weights.cache_clear()  # Frees the memory of the weights.
        steps = range(int(state.step), schedule.total_steps)
        measured = measured or score_untrained(training, state, stopwatch)
        source = open_input(training, steps, state.params["model"])
        monitor = _observe(training, steps, folder, checkpoints, trace, stopwatch)
        loop = Loop(training, source, checkpoints, monitor)
        with contextlib.closing(source), monitor:
            if steps.start == 0:
                monitor.write(0, measured.untrained)
                if splits.validation:  # Step 0 may be the best model.
                    loop.save(state, measured)
            stopwatch.turn_to("steps")
            state, measured = loop.train(state, measured)
            stopwatch.turn_to("other")
            with stopwatch.part("saving"):
                checkpoints.wait()
                loop.save(state, measured)  # Once more, in case the save in the loop failed.
            with stopwatch.part("evaluation"):
                results = collect_results(training, checkpoints, state, measured)
            monitor.write(last_step := int(state.step), {"test": results["final"]})
        try:
            print_results(results, method.fields)
        finally:  # Printing fails if the pipe's reader has ended.
            with stopwatch.part("saving"):
                folder.require_last_state(checkpoints, last_step)
            write_times(folder.path, stopwatch, steps=last_step - steps.start)
            folder.write_results(results, warnings, experiment.embedder.engines_used)
        has_report = report is not None and report(experiment)
    print(f"results.json, metrics.jsonl and the models are in {folder.location}")
    if has_report:
        print(f"the report is {folder.location}/{REPORT}")
    return results


def _observe(
    training: Training,
    steps: range,
    folder: Workdir,
    checkpoints: Checkpoints,
    trace: Trace,
    stopwatch: Stopwatch,
) -> Monitor:
    """Opens the monitor of a run's remaining steps, and the files of its measurements."""
    experiment, scalars = training.experiment, training.learner.scalars
    fields = experiment.method.fields
    project = fields["run.wandb_project"]
    telemetry = Telemetry(folder.path, steps.start, project, for_files(fields))
    name_of_image, watch = training.images.name, training.watch
    return Monitor(watch, scalars, steps, telemetry, checkpoints, name_of_image, trace, stopwatch)


def shared_provenance(experiment: Experiment) -> Mapping[str, str]:
    """The provenance of a run; checks that it and the settings are the same in all processes."""
    facts, fields = experiment.provenance, experiment.method.fields
    local = ("run.data_dir", "run.cache", "run.workers", "run.wandb", "data.path", "data.captions")
    shared = {name: value for name, value in fields.items() if not name.startswith(local)}
    cache = fields["run.cache"]
    shared["run.cache"] = cache if cache == "device" else "none or host"
    settings = {f"config.{name}": value for name, value in shared.items()}
    processes.require_same({**facts, **experiment.splits.fingerprints, **settings})
    return facts
