"""A finished run's results: collects and prints them, and writes the run's times."""

import pathlib
from typing import Any

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.geometry.learned import named_scalars
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.parallel import processes
from hypjax.runs import published, tables
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.files import TIMES
from hypjax.system import console, machine
from hypjax.system.files import write_json
from hypjax.training.setup import TrainingRun
from hypjax.training.states import Measured
from hypjax.training.step import TrainState, evaluated_model
from hypjax.types import Recalls

_ADVICE = "docs/own-images.md says what to try"


def collect_results(
    checkpoints: Checkpoints,
    state: TrainState,
    measured: Measured,
    run: TrainingRun,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Scores the last model and the best model on validation images, for results.json."""
    splits = run.splits

    def score(params: PyTree) -> Recalls:
        projections = run.projections(params)
        trained = run.trained(parallel.place(params, parallel.replicated(run.mesh)))
        processes.from_first(lambda: trained.save_projections(folder, projections))
        return run.test_scores(params)

    model = evaluated_model(run.learner, state)
    results = {"untrained": measured.untrained["test"], "final": score(model)}
    results |= tables.noted(splits.notes, splits.repeats)
    models = {"final": model}
    if splits.validation:
        held_out = {"untrained": measured.untrained["validation"], "final": measured.validation}
        checkpoints.wait()
        if checkpoints.best[0] == int(state.step):
            models["best"] = model
            results["best"], held_out["best"] = results["final"], held_out["final"]
        elif (best := checkpoints.restore_best(model=model)) is not None:
            model = models["best"] = best.trees[0]
            results["best"], held_out["best"] = score(model), run.validation_scores(model)
        if "best" in results:
            results["best_step"] = checkpoints.best[0]
            if results["best_step"] in measured.best_steps[1:]:
                results["tied_steps"] = [*measured.best_steps]
        results["validation"] = held_out
    if "scalars" in model:
        learned = {name: named_scalars(facts["scalars"]) for name, facts in models.items()}
        first = {name: measured.untrained[name] for name in learned["final"]}
        results["learned"] = {"untrained": first, **learned}
    return results


def print_results(results: dict[str, Any], config: ConfigDict) -> None:
    """Prints a finished run's scores, next to published results of the same method."""
    tested = {name: results[name] for name in ("untrained", "final", "best") if name in results}
    print("Scores on the test images:")
    print(tables.format_results(tested))
    if "validation" in results:
        print("Scores on the images held out for validation:")
        print(tables.format_results(results["validation"]))
    if "best_step" in results:
        print(f"best: {tables.format_best_step(results)}")
    tables.print_notes(results)
    _warn_unless_improved(results, config)
    if lines := published.compare(results, config):
        print(lines)


def _warn_unless_improved(results: dict[str, Any], config: ConfigDict) -> None:
    """Warns if the trained head scores no better than the untrained head, or below the features."""
    kind = "validation" if "validation" in results else "test"
    scores = results.get("validation", results)
    before = scores["untrained"]["head"]
    name = tables.selection_metric(before)
    if config.model.weights is not None or config.model.head_init == "pca":
        raw = scores["untrained"].get("encoder", {}).get(name, 0.0)
        if (trained := scores.get("best", scores["final"])["head"][name]) < raw:
            evidence = f"{name} on the {kind} images is {raw:.4f}, and {trained:.4f} with the head"
            problem = "the encoder's features before training score higher than the trained head"
            console.warn(f"{problem}: {evidence} ({_ADVICE})")
    after = max(scores[state]["head"][name] for state in ("final", "best") if state in scores)
    if after <= before[name] < 1 and config.train.total_steps > 1:
        change = f"was {before[name]:.4f} before, and is {scores['final']['head'][name]:.4f} after"
        evidence = f"{name} of the head on the {kind} images {change}"
        console.warn(f"training did not help: {evidence} ({_ADVICE})")


def write_times(folder: pathlib.Path, stopwatch: Stopwatch, steps: int) -> None:
    """Writes times.json, in the first process, and prints the launch's time by part."""
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
