"""Evaluation of a run's models, or of a pretrained encoder, on the test classes."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hypjax.assemble import assemble, assemble_method, saved_experiment
from hypjax.config import Config, flatten, own_copy, set_fields, validate
from hypjax.config.fitting import fit_to_features
from hypjax.errors import UserError, redacted
from hypjax.experiment.captions import query_classes
from hypjax.experiment.experiment import Experiment
from hypjax.experiment.trained import TrainedModel, restore, restore_best
from hypjax.geometry.learned import named_scalars
from hypjax.geometry.registry import describe_space, space_of
from hypjax.inference.pretrained import released_model
from hypjax.parallel import processes
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import is_published
from hypjax.runs.tables import (
    beside_published,
    format_results,
    noted,
    print_notes,
    selection_metric,
)
from hypjax.runs.workdir import read_saved_config, require_identity, require_provenance, saved_space
from hypjax.system import console
from hypjax.types import Recalls

_IDENTITY = ("data.", "model.", "objective.")  # Groups of fields that must equal the run's.
# Groups of fields that come from the configuration; the others come from the run.
_CONFIGURED = (*_IDENTITY, "eval.", "run.")


def evaluate(config: Config, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Evaluates a run's last and best checkpoints on the test classes, and prints the table.

    The configuration may differ from the run's in fields that shape neither the images nor the
    model, such as `eval.ks`. The folder may be a URL in cloud storage.

    Returns:
        {"final": {"head": {"recall@1": ...}, "encoder": {...}}, "best": ...}. The key is "step
        1000" instead of "final" if training was interrupted there; validation chooses "best".

    Raises:
        UserError: The folder holds no such run, or the images have changed.
    """
    config = own_copy(config)
    models: dict[str, TrainedModel] = {}  # Only in the first process, which has the folder.
    with contextlib.ExitStack() as stack:
        opened = processes.from_first(lambda: str(stack.enter_context(reading(workdir))))
        folder = pathlib.Path(opened)
        saved = processes.from_first(lambda: _saved_fields(folder, config))
        # Training fields are the run's: they say whether its models share a frozen encoder.
        set_fields(config, {k: v for k, v in saved.items() if not k.startswith(_CONFIGURED)})
        validate(config)
        space = processes.from_first(lambda: describe_space(saved_space(folder)))
        method = assemble_method(config, saved_space=space_of(space))
        names = processes.from_first(lambda: models.update(restore(folder, method)) or [*models])
        experiment = assemble(config, method=method, folder=folder)
        splits = experiment.splits
        processes.require_same(splits.fingerprints)
        processes.from_first(lambda: require_provenance(folder, experiment.image_provenance))
    if not splits.tasks:
        raise UserError(f"nothing to evaluate: the run in {workdir} was {splits.notes[0]}")
    console.say("evaluating on the test images")
    results, learned = {}, {}
    for name in names:
        read = functools.partial(getattr, models.get(name), "params")  # For the first process.
        params = processes.arrays_from_first(read, method.shapes)
        results[name] = experiment.test_scores(params)
        if "scalars" in params:
            learned[name] = named_scalars(params["scalars"])
    return _report(f"the models in {workdir}", results, experiment, learned)


def _saved_fields(folder: pathlib.Path, config: Config) -> dict[str, Any]:
    """The fields of a saved run; rejects another configuration of images, model or objective."""
    # Paths in a published model have lost their folders; its weights and images have checksums.
    compared = ("objective.",) if is_published(folder) else _IDENTITY
    require_identity(folder, flatten(fit_to_features(config)), compared)
    return flatten(read_saved_config(folder))


def score_queries(workdir: pathlib.Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Scores each test query by the head of a run's best model or, without validation, its last.

    Returns scores [queries] by metric, NaN for queries without a match, and classes [queries] of
    the metric that chooses models.
    """
    experiment = saved_experiment(workdir)
    params, splits = restore_best(workdir, experiment.method).params, experiment.splits
    require_provenance(workdir, experiment.image_provenance)
    scores = experiment.query_scores(params, splits.task)["head"]
    return scores, query_classes(splits.test, selection_metric(scores))


def evaluate_pretrained(config: Config) -> dict[str, Any]:
    """Evaluates the weights in `config.model.weights` on the test classes; prints the table.

    Returns {"pretrained": {"encoder": {"recall@1": ...}}}, with "head" if the weights have a head.
    """
    validate(config)
    method = assemble_method(config)
    params, parts = released_model(method)
    experiment = assemble(config, method=method, parts=parts)
    if not experiment.splits.tasks:
        raise UserError("nothing to evaluate: config.data.split is none, so there is no test")
    console.say("evaluating on the test images")
    scores = {"pretrained": experiment.test_scores(params)}
    return _report(str(method.start.weights), scores, experiment, {})


def pretrained_features(config: Config) -> tuple[np.ndarray, tuple[str, ...]]:
    """Embeds the training images with `config.model.weights`, as in Hyp-ViT's Table 1.

    Features are not normalised and use one scale, and the centre crop keeps the shorter side,
    whatever `data.resize` says. Returns features [images, dim], and notes on the images.
    """
    config = own_copy(config)
    validate(config)
    set_fields(config, {"data.resize": flatten(config)["data.image_size"]})
    method = assemble_method(config)
    params, _ = released_model(method, encoder_only=True)
    experiment = assemble(config, method=method)
    splits, train = experiment.splits, experiment.splits.training_images()
    if train.vectors is not None:
        return train.vectors, splits.notes
    embedder = dataclasses.replace(experiment.embedder, cached=())  # Embeds no other images.
    return embedder.features(params, train), splits.notes


def _report(
    models: str, results: Mapping[str, Recalls], experiment: Experiment, learned: Mapping[str, Any]
) -> dict[str, Any]:
    """Prints the table; returns the results with the notes and the learned scalars."""
    print(f"Scores on the test images, by {redacted(models)}:")
    print(format_results(results))
    report = {**results, **noted(experiment.splits.notes, experiment.splits.repeats)}
    if learned:
        report["learned"] = learned
    print_notes(report)
    if comparison := beside_published(report, experiment.method.fields):
        print(comparison)
    return report
