"""A run's results: collected, printed, and its times written."""

import pathlib
from typing import Any

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.data.parts import Task
from hypjax.geometry.learned import named_values
from hypjax.inference.embedding import scored_spaces
from hypjax.inference.matches import write_matches
from hypjax.inference.postprocess import Projections, model_fingerprint, save_projections
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.parallel import processes
from hypjax.runs import published
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.files import TIMES
from hypjax.runs.tables import format_results, noted, print_notes, selecting, title
from hypjax.system import console, machine
from hypjax.system.files import write_json
from hypjax.training.setup import Setup
from hypjax.training.states import Measured
from hypjax.training.step import TrainState, evaluated_model


def collect_results(
    checkpoints: Checkpoints,
    state: TrainState,
    measured: Measured,
    setup: Setup,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Scores the last model and the best one, and collects what results.json holds.

    The best model is chosen on the validation classes alone; without them there is none.
    """
    evaluator, splits = setup.evaluator, setup.splits

    def fit(params: PyTree) -> Projections:
        projections = evaluator.fit(params, splits.train)
        if projections:
            whole = parallel.place(params, parallel.replicated(setup.learner.mesh))
            processes.from_first(lambda: save_projections(folder, setup.config, whole, projections))
        return projections

    model = evaluated_model(setup.learner, state)
    fitted = fit(model)
    final = evaluator.test_scores(model, splits, fitted)
    results = {"untrained": measured.untrained["test"], "final": final, **noted(splits.notes)}
    learned = {}  # Numbers by the state of the model.
    if "space" in model:
        last = named_values(model["space"])
        learned = {"untrained": {name: measured.untrained[name] for name in last}, "final": last}
    if splits.validation:
        held_out = {"untrained": measured.untrained["validation"], "final": measured.validation}
        checkpoints.wait()
        if checkpoints.best[0] == int(state.step):
            results["best"], held_out["best"] = results["final"], held_out["final"]
        elif (best := checkpoints.restore_best(model=model)) is not None:
            model = best.trees[0]
            fitted = fit(model)
            results["best"] = evaluator.test_scores(model, splits, fitted)
            held_out["best"] = evaluator.scores(model, Task(splits.validation), fitted)
        if "best" in results:
            results["best_step"] = checkpoints.best[0]
            if learned:
                learned["best"] = named_values(model["space"])
        results["validation"] = held_out
    if learned:
        results["learned"] = learned
    _keep_matches(folder, setup, model, fitted)
    return results


def _keep_matches(
    folder: pathlib.Path, setup: Setup, params: PyTree, projections: Projections
) -> None:
    """Measures the distance of a model's matches, and writes it in the first process."""
    found = setup.evaluator.matches(params, setup.splits, projections)
    whole = parallel.place(params, parallel.replicated(setup.learner.mesh))
    named = {}
    for part, space in scored_spaces(setup.config, setup.learner.objective, whole).items():
        if part in found:
            own = model_fingerprint(setup.config, part, space, whole)
            own = projections[part].fingerprint(own) if part in projections else own
            named[own] = found[part]
    processes.from_first(lambda: write_matches(folder, named))


def print_results(results: dict[str, Any], config: ConfigDict) -> None:
    """Prints a finished run's scores, and what was published of the same method."""
    shown = [name for name in ("untrained", "final", "best") if name in results]
    tested = {name: results[name] for name in shown}
    print(f"{title(tested)}:")
    print(format_results(tested))
    if "validation" in results:
        print("Recall on the training classes held out for validation:")
        print(format_results(results["validation"]))
    if "best_step" in results:
        before = "" if results["best_step"] else ", the model before training"
        print(f"best: step {results['best_step']}{before}, chosen on the validation classes")
    print_notes(results)
    _warn_unless_improved(results, config)
    published.show(results, config)


def _warn_unless_improved(results: dict[str, Any], config: ConfigDict) -> None:
    before = results["untrained"]["head"]
    name = selecting(before)
    if config.model.weights is not None or config.model.head_init == "pca":
        _warn_if_features_are_better(results, config, name)
    after = max(results[state]["head"][name] for state in ("final", "best") if state in results)
    if after <= before[name] < 1 and config.train.total_steps > 1:
        final = results["final"]["head"][name]
        console.warn(
            f"training did not help: {name} of the head is {final:.4f} on the test classes, and "
            f"was {before[name]:.4f} before training (docs/own-images.md says what to try)"
        )


def _warn_if_features_are_better(results: dict[str, Any], config: ConfigDict, name: str) -> None:
    """Compares on the validation classes if there are any, else on the test classes."""
    kind, scores = "validation", results.get("validation")
    if scores is None:
        kind, scores = "test", results
    raw = scores["untrained"].get("encoder", {}).get(name, 0.0)
    after = scores.get("best", scores["final"])["head"][name]
    if after < raw:
        console.warn(
            f"the features before training find more than the head: {name} on the {kind} classes "
            f"is {raw:.4f}, and {after:.4f} with the head (docs/own-images.md says what to try)"
        )


def write_times(folder: pathlib.Path, stopwatch: Stopwatch, steps: int) -> None:
    """Writes times.json, in the first process, and says where the time of this launch went."""
    if not processes.is_first():
        return
    times = {
        "steps": steps,
        "seconds": {name: round(value, 3) for name, value in stopwatch.seconds().items()},
        "programs": stopwatch.programs,
        **machine.memory_peaks(),
    }
    with console.tolerating(str(folder / TIMES)):
        write_json(folder / TIMES, times)
    console.say(stopwatch.describe())
