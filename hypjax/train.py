"""Training, from top to bottom: open the run, build, begin or restore, loop, finish."""

import contextlib
import functools
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from hypjax.config import read_config, validate
from hypjax.config.own import choose_encoder, choose_own_objective
from hypjax.data import given
from hypjax.errors import UserError
from hypjax.inference.weights import warn_of_known_classes
from hypjax.monitoring.health import FiniteWatch
from hypjax.monitoring.monitor import Monitor, Trace
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.monitoring.telemetry import require_wandb
from hypjax.objectives import Objective
from hypjax.parallel import processes
from hypjax.runs.files import REPORT
from hypjax.runs.workdir import Workdir
from hypjax.system import console
from hypjax.system.caches import keep_compiled_programs
from hypjax.training.input import Feed, open_input
from hypjax.training.loop import Loop
from hypjax.training.results import collect_results, print_results, write_times
from hypjax.training.setup import build, given_provenance, provenance, shared_fields
from hypjax.training.states import begin, check_paths, save, score_untrained, starting_parameters
from hypjax.training.step import jit_train_step, make_train_step


def train(
    config: ConfigDict | str,
    workdir: str | pathlib.Path,
    *,
    dataset: Any = None,
    encoder: nn.Module | None = None,
    objective: Objective | Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Trains and evaluates as `train_and_evaluate`, with data, an encoder or a loss of one's own.

    What is given takes the place of what the configuration names; all other fields apply. Called
    again with the same, it resumes. The folder is a run like any other: its model embeds and
    searches without the loss and the dataset, and, if the encoder is one of hypjax's, without any
    code; for another one see `hypjax.load`.

    Args:
        config: A configuration, as from `hypjax.config.read_config`, or the name of one, such as
            "configs/folder.py:hyp-scratch".
        workdir: Folder of the run, or its URL.
        dataset: (images, labels), arrays or images of Pillow's; pairs of a path or an image and
            its label; a `datasets.Dataset` of Hugging Face; or {"train": ..., "test": ...} of
            these. Without splits, classes are held out as for a folder.
        encoder: An `Encoder`, or a Flax module that maps normalised pixels [images, height, width,
            channels] to [images, dim]. The head of the configuration follows it.
        objective: An `Objective`, or a function of `embeddings`, `labels` and others by name, see
            `hypjax.register_objective`.

    Raises:
        UserError: The configuration cannot be run with what is given, and as
            `train_and_evaluate`.
        Interrupted: An interrupt arrived, and the state is saved.
    """
    config = (
        read_config(config) if isinstance(config, str) else config.copy_and_resolve_references()
    )
    if dataset is not None:
        with config.ignore_type():
            config.data.update(given.give(dataset))
    if objective is not None:
        choose_own_objective(config, objective)
    if encoder is not None:
        choose_encoder(config, encoder)
    keep_compiled_programs()
    return train_and_evaluate(config, workdir)


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | pathlib.Path,
    profile: tuple[int, int] | None = None,
    launched: float | None = None,
) -> dict[str, Any]:
    """Trains a model, from pretrained weights if the configuration names them, and evaluates it.

    A finished run is not trained again: its results are printed. An interrupted run resumes from
    its last checkpoint, and ends as if it had never been interrupted.

    Args:
        config: The run's configuration.
        workdir: Folder for results, measurements and checkpoints, or its URL in cloud storage.
        profile: First and last step to trace, or None for no trace.
        launched: Time from which times.json counts, see `stopwatch.launch`; by default now.

    Returns:
        What results.json holds: {"untrained": {"head": {"recall@1": ...}, "encoder": {...}},
        "final": {...}}, measured on the test classes before and after training. If classes are
        held out for validation, also "best", the scores of the checkpoint that did best on them,
        with its step as "best_step", and under "validation" the same scores on those classes.

    Raises:
        UserError: The configuration cannot be run, the folder belongs to another run or is in use,
            a loss is not finite, or the last state could not be saved or copied to the cloud.
        Interrupted: An interrupt arrived, and the state is saved.
    """
    stopwatch = Stopwatch(launched)
    config = config.copy_and_resolve_references()
    validate(config)
    if config.train.total_steps == 0:
        raise UserError(
            "config.train.total_steps is 0; add --mode=evaluate to evaluate without training, or "
            "set a number of steps"
        )
    warnings = console.collect_warnings()
    stopwatch.turn_to("prepare")  # By now JAX has its devices.
    run = Workdir(workdir, config)
    if (results := run.results) is not None:
        run.require(given_provenance(config))
        print(f"{run.location} holds this run's results already:")
        print_results(results, config)
        return results
    require_wandb(config)
    setup = build(run.filled())
    config, learner, splits = setup.config, setup.learner, setup.splits
    total = config.train.total_steps
    trace = Trace(run.path / "profile", profile if processes.is_first() else None, total)
    facts = provenance(config, splits)
    processes.require_same({**facts, **splits.further_fingerprints, **shared_fields(config)})
    # Weights are read before the folder is claimed: a wrong name leaves nothing behind.
    if not run.has_checkpoint:
        check_paths(setup)
    pretrained = None if run.has_checkpoint else starting_parameters(config, learner)
    if pretrained and processes.is_first():
        warn_of_known_classes(config, splits.fingerprint)

    with run.claimed(facts, config) as checkpoints:
        console.say(f"the run's folder is {run.location}")
        state, measured = begin(setup, checkpoints, pretrained)
        del pretrained
        measured = measured or score_untrained(setup, state, stopwatch)
        steps = range(int(state.step), total)
        source = open_input(setup, steps, config.run.workers, state.params["model"])
        watch = FiniteWatch(checkpoints, splits.train.name, config.train)
        monitor = Monitor(config, steps, run.path, watch, trace, stopwatch)
        train_step, probe_step = (
            functools.partial(
                jit_train_step(make_train_step(learner, probing=probing), learner.mesh, state),
                store=source.store,
            )
            for probing in (False, True)
        )
        loop = Loop(setup, train_step, probe_step, checkpoints, monitor)
        with contextlib.closing(Feed(source, steps, monitor)) as feed, monitor:
            if steps.start == 0:
                monitor.write(0, measured.untrained)
                if splits.validation:  # What training makes worse need not be chosen.
                    save(checkpoints, learner, state, measured, measured.selecting(loop.selecting))
            stopwatch.turn_to("steps")
            state, measured = loop.run(state, measured, feed)
            stopwatch.turn_to("other")
            with stopwatch.part("saving"):
                checkpoints.wait()
                # Once more, in case the save in the loop failed.
                save(checkpoints, learner, state, measured, measured.selecting(loop.selecting))
            console.say("evaluating the trained model")
            with stopwatch.part("evaluation"):
                results = collect_results(checkpoints, state, measured, setup, run.path)
            monitor.write(total, {"test": results["final"]})
        try:
            print_results(results, config)
        finally:  # What reads the table may be gone.
            with stopwatch.part("saving"):
                run.require_last_state(checkpoints, total)
            write_times(run.path, stopwatch, steps=len(steps))
            run.write_results(results, warnings)
        if config.run.report:
            from hypjax.analysis.report import write_own_report  # Matplotlib takes a second.

            reported = write_own_report(run.path, str(run.location), splits)
    print(f"results.json, metrics.jsonl and the models are in {run.location}")
    if config.run.report and reported:
        print(f"the report is {run.location}/{REPORT}")
    return results


class _Callable(types.ModuleType):
    """This module, which can be called: `hypjax.train` names both it and its function."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls `train`."""
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
