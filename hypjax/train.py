"""Training from top to bottom: opens the run, builds it, begins or restores, loops, finishes."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from hypjax.config import for_files, read_config, validate
from hypjax.config.custom import choose_custom_objective, choose_encoder
from hypjax.config.rules import refuse
from hypjax.errors import at_the_call
from hypjax.inference.run import Run
from hypjax.monitoring.monitor import Monitor, Trace
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import Telemetry, require_wandb
from hypjax.objectives import Objective
from hypjax.parallel import processes
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.files import REPORT
from hypjax.runs.images import register_dataset
from hypjax.runs.workdir import Workdir, has_checkpoint, require_provenance
from hypjax.system import console
from hypjax.system.caches import keep_compiled_programs
from hypjax.training.input import open_input
from hypjax.training.loop import Loop
from hypjax.training.results import collect_results, print_results, write_times
from hypjax.training.setup import TrainingRun, build, provenance, shared_provenance, watch_of
from hypjax.training.states import build_with_weights, restore_or_start, score_untrained


@at_the_call
def train_and_evaluate(
    config: ConfigDict | str,
    workdir: str | pathlib.Path,
    *,
    dataset: Any = None,
    encoder: nn.Module | None = None,
    objective: Objective | Callable[..., Any] | None = None,
    profile: tuple[int, int] | None = None,
    launched: float | None = None,
    report: Callable[[Run], bool] | None = None,
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
    config = read_config(config) if isinstance(config, str) else config
    config = config.copy_and_resolve_references()
    if dataset is not None:
        with config.ignore_type():
            config.data.update(register_dataset(dataset, skip_corrupt=config.data.skip_corrupt))
    if objective is not None:
        choose_custom_objective(config, objective)
    if encoder is not None:
        choose_encoder(config, encoder)
    validate(config)
    if config.train.total_steps == 0:
        refuse("train.total_steps", 0, "at least 1; --mode=evaluate evaluates without training")
    warnings = console.collect_warnings()
    stopwatch.turn_to("prepare")  # By now JAX has its devices.
    folder = Workdir(workdir, config)
    name = pathlib.Path(folder.location).name
    run = Run(folder.fitted_config(), name=name, workdir=str(folder.path))
    if (results := folder.results) is None:
        require_wandb(config.run.wandb_project)
        return _train(run, folder, profile, report, warnings, stopwatch)
    if folder.has_moved:  # Checks that the images are the same, and saves where they are now.
        with folder.locked(shared_provenance(run), run.config, run.objective.score_space):
            pass
    processes.from_first(lambda: require_provenance(folder.path, provenance(config)))
    print(f"{folder.location} holds this run's results already:")
    print_results(results, run.config)
    # An interrupt may have prevented the report.
    is_reported = (folder.path / REPORT).exists() or not has_checkpoint(folder.path)
    if report is not None and not is_reported and report(run):
        print(f"the report is {folder.path / REPORT}")
    return results


def _train(
    run: Run,
    folder: Workdir,
    profile: tuple[int, int] | None,
    report: Callable[[Run], bool] | None,
    warnings: list[str],
    stopwatch: Stopwatch,
) -> dict[str, Any]:
    """Begins or restores a run in its folder, trains and evaluates it, and saves the results."""
    # Reads weights before the folder exists: a wrong name leaves nothing behind.
    pretrained = None
    if processes.from_first(lambda: has_checkpoint(folder.path)):
        run = build(run)
    else:
        run, pretrained = build_with_weights(run)
    total_steps, splits = run.config.train.total_steps, run.splits
    trace = Trace(folder.path / "profile", profile if processes.is_first() else None, total_steps)
    run_provenance = shared_provenance(run)
    with folder.locked(run_provenance, run.config, run.objective.score_space) as checkpoints:
        console.say(f"the run's folder is {folder.location}")
        state, measured = restore_or_start(run, checkpoints, pretrained)
        del pretrained  # Frees the memory of the weights.
        steps = range(int(state.step), total_steps)
        measured = measured or score_untrained(run, state, stopwatch)
        source = open_input(run, steps, state.params["model"])
        monitor = _observe(run, steps, folder, checkpoints, trace, stopwatch)
        loop = Loop(run, source, checkpoints, monitor)
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
            console.say("evaluating the trained model")
            with stopwatch.part("evaluation"):
                results = collect_results(run, checkpoints, state, measured)
            monitor.write(last_step := int(state.step), {"test": results["final"]})
        try:
            print_results(results, run.config)
        finally:  # Printing fails if the pipe's reader has ended.
            with stopwatch.part("saving"):
                folder.require_last_state(checkpoints, last_step)
            write_times(folder.path, stopwatch, steps=last_step - steps.start)
            folder.write_results(results, warnings)
        has_report = report is not None and report(run)
    print(f"results.json, metrics.jsonl and the models are in {folder.location}")
    if has_report:
        print(f"the report is {folder.location}/{REPORT}")
    return results


def _observe(
    run: TrainingRun,
    steps: range,
    folder: Workdir,
    checkpoints: Checkpoints,
    trace: Trace,
    stopwatch: Stopwatch,
) -> Monitor:
    """Opens the monitor of a run's remaining steps, and the files of its measurements."""
    project = run.config.run.wandb_project
    telemetry = Telemetry(folder.path, steps.start, project, for_files(run.config))
    watch, name_of_image = watch_of(run.config), run.splits.train.name
    scalars = run.learner.scalars
    return Monitor(watch, scalars, steps, telemetry, checkpoints, name_of_image, trace, stopwatch)
