"""Evaluation of a run's models, or of a pretrained encoder, on the test classes."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree
from ml_collections import ConfigDict

from hypjax.config import validate
from hypjax.config.choices import freezes_encoder
from hypjax.data.parts import Splits
from hypjax.errors import redacted
from hypjax.geometry.learned import first_parameters, learned_numbers, named_values
from hypjax.geometry.registry import describe_space, space_of
from hypjax.inference.evaluator import Evaluator, check_depth, create_evaluator
from hypjax.inference.run import Run
from hypjax.inference.weights import pretrained_encoder, restore_best, restore_models
from hypjax.models import model_shapes
from hypjax.objectives import Objective, SavedObjective, create_objective
from hypjax.objectives.create import BUILT_IN
from hypjax.parallel import processes
from hypjax.runs import published
from hypjax.runs.cloud_copy import reading
from hypjax.runs.images import fit_to_features, open_splits
from hypjax.runs.tables import format_results, noted, print_notes, title
from hypjax.runs.workdir import require_provenance, saved_config, saved_objective
from hypjax.system import console
from hypjax.types import Recalls, View


def evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Evaluates a run's last checkpoint and its best one on the test classes; prints the table.

    Fields that shape neither the images nor the model, such as `eval.ks`, may differ from the
    run's. Only the last model of a finished run is called final.

    Args:
        config: The run's configuration.
        workdir: The run's folder, or its URL in cloud storage.

    Returns:
        {"final": {"head": {"recall@1": ...}, "encoder": {...}}, "best": ...}. The key is "step
        1000" instead of "final" if training was interrupted there; "best" is there if validation
        on held-out classes chose it.

    Raises:
        UserError: The folder holds no checkpoint, or one of another run, or the images have
            changed, so that the test classes may differ.
    """
    config = fit_to_features(config)
    validate(config)
    states, folder, trained = {}, None, config.copy_and_resolve_references()
    if processes.is_first():
        with reading(workdir) as folder:
            _, states = restore_models(config, folder)
            trained = saved_config(folder)
    run = Run.open(config, _objective(config, folder))
    splits = run.splits
    check_depth(config, splits)
    processes.require_same({"images": splits.fingerprint, **splits.further_fingerprints})
    if folder is not None:
        require_provenance(folder, {"images": splits.fingerprint})
    shapes = model_shapes(run.evaluator.images.model, View.of(config.data))
    states = {
        name: processes.arrays_from_first(lambda name=name: states[name], shapes)
        for name in processes.from_first(lambda: list(states))
    }
    # A run whose encoder was trained has more than one: their embeddings cannot be shared.
    frozen = processes.from_first(lambda: freezes_encoder(trained.optim.frozen))
    evaluator = run.evaluator if frozen else create_evaluator(config, run.objective, mesh=run.mesh)
    results = {name: _scores(evaluator, params, splits) for name, params in states.items()}
    learned = {name: named_values(own["space"]) for name, own in states.items() if "space" in own}
    with trained.unlocked():
        trained.eval = config.eval  # The scores are those that were asked for now.
    return _report(f"the models in {workdir}", results, splits.notes, trained, learned)


def _objective(config: ConfigDict, folder: pathlib.Path | None) -> Objective:
    """The objective that scores a run, whose folder only the first process reads."""
    if config.objective.name in BUILT_IN:
        return create_objective(config)
    space = processes.from_first(lambda: describe_space(saved_objective(folder, config).space))
    return SavedObjective(space_of(space))


def score_queries(
    workdir: pathlib.Path,
) -> tuple[dict[str, Float[np.ndarray, " queries"]], Int[np.ndarray, " queries"]]:
    """Scores each test query by the head of a run's best model, or else its last one.

    Returns the scores by metric, NaN for queries without a match, and the classes of the queries.
    """
    config, _, params, objective = restore_best(workdir)
    run = Run.open(config, objective)
    require_provenance(workdir, {"images": run.splits.fingerprint})
    fitted = run.evaluator.fit(params, run.splits.train)
    scores = run.evaluator.query_scores(params, run.splits.task, fitted)
    return scores["head"], run.splits.test.labels


def evaluate_pretrained(config: ConfigDict) -> dict[str, Any]:
    """Evaluates the encoder that `model.weights` names on the test classes; prints the table.

    Returns {"pretrained": {"encoder": {"recall@1": ...}}}. Raises a `UserError` if there are no
    such weights, they do not fit, or the images cannot be read.
    """
    config = fit_to_features(config)
    validate(config)
    splits = open_splits(config)
    evaluator = create_evaluator(config, create_objective(config), parts=["encoder"])
    check_depth(config, splits)
    model = evaluator.images.model
    shapes = model_shapes(model, View.of(config.data))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    if "space" in params:
        params["space"] = first_parameters(learned_numbers(config.objective))
    if model.encoder.takes_pixels:
        params["encoder"] = processes.arrays_from_first(
            lambda: pretrained_encoder(config, model.encoder), shapes["encoder"]
        )
    results = {"pretrained": _scores(evaluator, params, splits)}
    return _report(config.model.weights, results, splits.notes, config)


def _scores(evaluator: Evaluator, params: PyTree, splits: Splits) -> Recalls:
    console.say("evaluating on the test classes")
    fitted = evaluator.fit(params, splits.train)
    return evaluator.test_scores(params, splits, fitted)


def _report(
    models: str,
    results: Mapping[str, Recalls],
    notes: tuple[str, ...],
    config: ConfigDict,
    learned: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Prints the table, and returns the results with their notes and learned numbers."""
    print(f"{title(results)}, by {redacted(models)}:")
    print(format_results(results))
    noted_results = {**results, **noted(notes), **({"learned": learned} if learned else {})}
    print_notes(noted_results)
    published.show(noted_results, config)
    return noted_results
