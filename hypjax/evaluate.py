"""Evaluation of a run's models, or of a pretrained encoder, on the test classes."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hypjax.config import flatten, validate
from hypjax.errors import redacted
from hypjax.geometry.learned import named_scalars
from hypjax.geometry.registry import describe_space, space_of
from hypjax.inference.pretrained import only_encoder, released_model
from hypjax.inference.run import Run
from hypjax.inference.weights import TrainedModel
from hypjax.parallel import processes
from hypjax.runs import published
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import is_published
from hypjax.runs.images import fit_to_features
from hypjax.runs.tables import format_results, noted, print_notes, title
from hypjax.runs.workdir import (
    read_saved_config,
    require_identity,
    require_provenance,
    saved_space,
    set_fields,
)
from hypjax.system import console
from hypjax.types import Recalls

_SHAPING = ("data.", "model.", "objective.")  # Fields that must equal the run's.
_ASKED = (*_SHAPING, "eval.", "run.")  # Fields taken from the configuration, not from the run.


def evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Evaluates a run's last checkpoint and its best one on the test classes; prints the table.

    The folder may be a URL in cloud storage. Fields that shape neither the images nor the model,
    such as `eval.ks`, may differ from the run's; a run of other images is refused.

    Returns:
        {"final": {"head": {"recall@1": ...}, "encoder": {...}}, "best": ...}. The key is "step
        1000" instead of "final" if training was interrupted there; validation chooses "best".
    """
    config = config.copy_and_resolve_references()
    models: dict[str, TrainedModel] = {}
    with contextlib.ExitStack() as stack:
        # Only the first process has the folder.
        opened = processes.from_first(lambda: str(stack.enter_context(reading(workdir))))
        folder = pathlib.Path(opened)
        saved = processes.from_first(lambda: _saved_fields(folder, config)).items()
        # The run's training fields: only models with a frozen encoder share its embeddings.
        set_fields(config, {name: x for name, x in saved if not name.startswith(_ASKED)})
        validate(config)
        space = processes.from_first(lambda: describe_space(saved_space(folder)))
        run = Run(config, saved_space=space_of(space))
        names = processes.from_first(lambda: models.update(run.restore(folder)) or [*models])
    processes.require_same(run.splits.fingerprints)
    processes.from_first(lambda: require_provenance(folder, {"images": run.splits.fingerprint}))
    states = {
        name: processes.arrays_from_first(lambda name=name: models[name].params, run.shapes)
        for name in names
    }
    console.say("evaluating on the test images")
    results = {name: run.test_scores(params) for name, params in states.items()}
    learned = {name: named_scalars(x["scalars"]) for name, x in states.items() if "scalars" in x}
    return _report(f"the models in {workdir}", results, run, learned)


def _saved_fields(folder: pathlib.Path, config: ConfigDict) -> dict[str, Any]:
    """A run's fields; refuses a configuration of other images, model or objective."""
    if not is_published(folder):
        require_identity(folder, fit_to_features(config), _SHAPING)
    return flatten(read_saved_config(folder))


def score_queries(workdir: pathlib.Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Scores each test query by the head of a run's best model, or else its last one.

    Returns scores [queries] by metric, NaN for queries without a match, and classes [queries].
    """
    run = Run.saved(workdir)
    params = run.restore_best(workdir).params
    require_provenance(workdir, {"images": run.splits.fingerprint})
    return run.query_scores(params, run.splits.task)["head"], run.splits.test.labels


def evaluate_pretrained(config: ConfigDict) -> dict[str, Any]:
    """Evaluates the weights named in `model.weights` on the test classes; prints the table.

    Returns {"pretrained": {"encoder": {"recall@1": ...}}}, and "head" if the weights have one.
    """
    validate(config)
    run = Run(config, parts=["encoder"])
    params = released_model(run)
    console.say("evaluating on the test images")
    return _report(config.model.weights, {"pretrained": run.test_scores(params)}, run, {})


def pretrained_features(config: ConfigDict) -> tuple[np.ndarray, tuple[str, ...]]:
    """Features [images, dim] of the training images, by the encoder `model.weights`; and notes.

    As in Hyp-ViT's Table 1, features are not normalised, and a centre crop keeps the shorter side,
    whatever `data.resize` says. They use one scale, since features have no mean as points do.
    """
    config = config.copy_and_resolve_references()
    validate(config)
    config.data.resize = config.data.image_size
    run = Run(config, parts=["encoder"])
    params = only_encoder(run)
    train, embedder = run.splits.training_images(), dataclasses.replace(run.embedder, cached=())
    if train.vectors is not None:
        return train.vectors, run.splits.notes
    return embedder.features(params, train), run.splits.notes


def _report(
    models: str, results: Mapping[str, Recalls], run: Run, learned: Mapping[str, Any]
) -> dict[str, Any]:
    """Prints the table, and returns the results with their notes and learned scalars."""
    print(f"{title(results)}, by {redacted(models)}:")
    print(format_results(results))
    notes = noted(run.splits.notes, run.splits.repeats)
    noted_results = {**results, **notes, **({"learned": learned} if learned else {})}
    print_notes(noted_results)
    if lines := published.compare(noted_results, run.config):
        print(lines)
    return noted_results
