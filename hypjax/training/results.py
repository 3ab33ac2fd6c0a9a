"""A finished run's results: collects and prints them, and writes the run's times."""

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtyping import PyTree

from hypjax import parallel
from hypjax.experiment.trained import TrainedModel
from hypjax.geometry.learned import named_scalars
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.parallel import processes
from hypjax.runs import tables
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.files import TIMES
from hypjax.system import console, machine
from hypjax.system.files import write_json
from hypjax.training.setup import Training
from hypjax.training.states import Measured
from hypjax.training.step import TrainState, evaluated_model
from hypjax.types import Recalls

_STATES: tuple[str, ...] = ("untrained", "final", "best")
_ADVICE = "docs/own-images.md says what to try"


def collect_results(
    training: Training, checkpoints: Checkpoints, state: TrainState, measured: Measured
) -> dict[str, Any]:
    """Scores the last and the best model for results.json, and saves their projections."""
    experiment, splits = training.experiment, training.experiment.splits
    if splits.tasks:
        console.say("evaluating the trained model")

    def test(params: PyTree) -> Recalls:
        folder, projections = pathlib.Path(experiment.workdir), experiment.projections(params)
        whole = parallel.place(params, parallel.replicated(experiment.mesh))
        trained = TrainedModel(experiment.method, whole)
        processes.from_first(lambda: trained.save_projections(folder, projections))
        return experiment.test_scores(params)

    models = {"final": evaluated_model(training.learner, state)}
    results = {"untrained": measured.untrained["test"], "final": test(models["final"])}
    results |= tables.noted(splits.notes, splits.repeats)
    if (last_step := int(state.step)) < training.schedule.total_steps:
        results["last_step"] = last_step
    if splits.validation:
        validation = {"untrained": measured.untrained["validation"], "final": measured.validation}
        checkpoints.wait()
        if checkpoints.best[0] == int(state.step):
            for by_state in (models, results, validation):
                by_state["best"] = by_state["final"]
        elif (restored := checkpoints.restore_best(model=models["final"])) is not None:
            models["best"] = restored.trees[0]
            results["best"] = test(models["best"])
            validation["best"] = experiment.validation_scores(models["best"])
        if "best" in results:
            results["best_step"] = checkpoints.best[0]
            if results["best_step"] in measured.best_steps[1:]:  # Earlier steps tie with it.
                results["tied_steps"] = [*measured.best_steps]
        results["validation"] = validation
    if "scalars" in models["final"]:
        learned = {name: named_scalars(model["scalars"]) for name, model in models.items()}
        initial = {name: measured.untrained[name] for name in learned["final"]}
        results["learned"] = {"untrained": initial, **learned}
    return results


def print_results(results: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Prints a finished run's scores, next to published results of the same method."""
    states = {name: results[name] for name in _STATES if results.get(name)}
    if states:
        print("Scores on the test images:")
        print(tables.format_results(states))
    if "validation" in results:
        print("Scores on the images held out for validation:")
        print(tables.format_results(results["validation"]))
    if "best_step" in results:
        print(f"best: {tables.format_best_step(results)}")
    if "last_step" in results:
        print(f"last: step {results['last_step']}, where train.patience ended")
    tables.print_notes(results)
    if not states:
        return
    _warn_unless_improved(results, fields)
    _warn_of_ceiling(results, fields)
    if lines := tables.beside_published(results, fields):
        print(lines)


def _warn_unless_improved(results: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Warns if the trained head scores no better than the untrained head, or below the features."""
    split = "validation" if "validation" in results else "test"
    scores = results.get("validation", results)
    metric = tables.selection_metric(scores["untrained"]["head"])
    states = [name for name in _STATES if name in scores]
    head_scores = {name: scores[name]["head"][metric] for name in states}
    if fields["model.weights"] is not None or fields["model.head_init"] == "pca":
        features = scores["untrained"].get("encoder", {}).get(metric, 0.0)
        trained = head_scores.get("best", head_scores["final"])
        if trained < features:
            change = f"is {features:.4f}, and {trained:.4f} with the head"
            problem = "the encoder's features before training score higher than the trained head"
            console.warn(f"{problem}: {metric} on the {split} images {change} ({_ADVICE})")
    before = head_scores.pop("untrained")
    if max(head_scores.values()) <= before < 1 and fields["train.total_steps"] > 1:
        change = f"was {before:.4f} before, and is {head_scores['final']:.4f} after"
        evidence = f"{metric} of the head on the {split} images {change}"
        console.warn(f"training did not help: {evidence} ({_ADVICE})")


def _warn_of_ceiling(results: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Warns if validation cannot choose, or if the test ranks the chosen model below the start."""
    if "validation" not in results or fields["train.total_steps"] == 1:
        return  # Without validation, `_warn_unless_improved` compares test scores.
    tied, chosen = results.get("tied_steps", ()), "best" if "best" in results else "final"
    validation = results["validation"][chosen]["head"]
    if tied and validation[metric := tables.selection_metric(validation)] == 1:
        problem = f"{metric} is 1 at {len(tied)} validations, which cannot choose"
        console.warn(f"{problem}; hold out more classes (--config.data.validation_classes)")
    metric = tables.selection_metric(results["untrained"]["head"])
    before, after = (results[name]["head"][metric] for name in ("untrained", chosen))
    if after < before:
        change = f"was {before:.4f} before training, and is {after:.4f} with the {chosen} model"
        console.warn(f"{metric} of the head on the test images {change} ({_ADVICE})")


def write_times(folder: pathlib.Path, stopwatch: Stopwatch, steps: int) -> None:
    """Writes times.json, in the first process, and prints the time of each part of this launch."""
    if not processes.is_first():
        return
    times = {
        "steps": steps,
        "seconds": {name: round(value, 3) for name, value in stopwatch.seconds().items()},
        **machine.memory_peaks(),
    }
    with console.tolerating(str(folder / TIMES)):
        write_json(folder / TIMES, times)
    console.say(stopwatch.describe())
