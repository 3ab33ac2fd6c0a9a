"""Prints tables of finished runs.

python -m hypjax.compare runs/a runs/b: these runs.
python -m hypjax.compare --config=configs/cub.py --field=objective.c --value=0.1 --value=0.3: runs
that differ in one field, in their default folders.

--output=sweep.png draws them, too; runs in named folders against the field of --x.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from hypjax import command
from hypjax.errors import UserError

if TYPE_CHECKING:  # It imports JAX.
    from hypjax.types import Recalls

CHOICES = None  # Any folders.

EXAMPLE = "python -m hypjax.compare runs/glyphs-hyp"
FLAGS = flags.FlagValues()
_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Configuration file of the runs, optionally with a variant after a colon. "
    "--config.FIELD=VALUE sets one of its fields in all of them.",
    flag_values=FLAGS,
)
_FIELD = flags.DEFINE_string(
    "field", None, "Field in which the runs differ, such as objective.c.", flag_values=FLAGS
)
_VALUES = flags.DEFINE_multi_string(
    "value", [], "Value of the field in one run; repeat the flag.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Figure to draw, such as sweep.png: the recall against the field, one line for each "
    "combination of other fields in which the runs differ.",
    flag_values=FLAGS,
)
_CHECK = flags.DEFINE_bool(
    "check", False, "Only check --config, --field, --value and --output.", flag_values=FLAGS
)
_X = flags.DEFINE_string(
    "x", None, "Field on the horizontal axis of the figure of named runs.", flag_values=FLAGS
)


def main(overrides: list[str], runs: Sequence[str]) -> None:
    """Prints the tables of the named runs, or of those with different values of a field."""
    output = command.figure(_OUTPUT)
    if runs:
        folders, field = _named(overrides, runs), None
    else:
        command.require(_CONFIG, _FIELD, _VALUES)
        if _X.value:
            raise UserError("--x is for the folders of runs; with --config, --field is drawn")
        folders, field = _folders(overrides), _FIELD.value
    if _CHECK.value:
        return
    results = {name: _results(folder) for name, folder in folders.items()}
    if runs and (unfinished := [run for run, found in results.items() if found is None]):
        raise UserError(f"no finished run in {unfinished[0]}: it has no results.json")
    finished = {name: found for name, found in results.items() if found}
    if runs:
        _require_one_dataset(folders)
    validation, test = _scored(finished)
    if output and not finished:
        raise UserError(
            f"there is nothing to draw: no run with these values of {field} is finished"
        )
    if output:
        _draw({name: folders[name] for name in finished}, validation, test, output)
    if finished:
        _print_tables(validation, test, field)


def _named(overrides: Sequence[str], runs: Sequence[str]) -> dict[str, pathlib.Path]:
    """The folders of the named runs."""
    if _CONFIG.value or overrides:
        raise UserError("name either the folders of runs or --config, not both")
    if _X.value or _OUTPUT.value:
        command.require(_X, _OUTPUT)
    return {run: pathlib.Path(run).expanduser() for run in runs}


def _require_one_dataset(folders: Mapping[str, pathlib.Path]) -> None:
    """Raises an error if runs were scored on images of different datasets."""
    from hypjax.runs.workdir import saved_config, saved_fingerprint

    for (one, left), (other, right) in itertools.pairwise(folders.items()):
        first, second = saved_config(left).data, saved_config(right).data
        moved = (images := saved_fingerprint(left)) and images == saved_fingerprint(right)
        if first.name != second.name or (first.path != second.path and not moved):
            raise UserError(
                f"{one} and {other} have different datasets, {first.path or first.name} and "
                f"{second.path or second.name}; compare runs on one dataset"
            )


def _scored(
    results: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Recalls], dict[str, Recalls]]:
    """Scores on the validation classes of the runs that have any, and on the test classes.

    Metrics that some runs lack, since they were evaluated with other fields, are named and dropped.

    Args:
        results: What results.json holds, for each run.
    """
    validation = {n: _scores(r["validation"]) for n, r in results.items() if r.get("validation")}
    test = {name: _scores(found) for name, found in results.items()}
    dropped: dict[str, None] = {}  # In order.
    scored = tuple(_common(runs, dropped) for runs in (validation, test))
    if dropped:
        print(f"left out, since not all runs have them: {', '.join(dropped)}")
    return scored


def _common(runs: Mapping[str, Recalls], dropped: dict[str, None]) -> dict[str, Recalls]:
    """The scores that all runs have; names of the others are added to `dropped`.

    Raises:
        UserError: They have none in common.
    """
    embeddings = [values for recalls in runs.values() for values in recalls.values()]
    names = list(dict.fromkeys(name for values in embeddings for name in values))
    common = [name for name in names if all(name in values for values in embeddings)]
    if embeddings and not any("/" in name or name.startswith("recall@") for name in common):
        raise UserError("these runs have no recall in common; evaluate them with the same eval.ks")
    dropped |= dict.fromkeys(name for name in names if name not in common)
    return {
        run: {part: {name: values[name] for name in common} for part, values in recalls.items()}
        for run, recalls in runs.items()
    }


def _print_tables(
    validation: Mapping[str, Recalls], test: Mapping[str, Recalls], field: str | None
) -> None:
    """Prints recalls on validation classes, by which runs are chosen, and then on test classes.

    Args:
        validation: Scores on the validation classes, for each run that has any.
        test: Scores on the test classes, for each run.
        field: Field in which the runs differ; None for any runs. Seeds are summarised, not chosen.
    """
    from hypjax.runs.tables import format_results, selecting
    from hypjax.runs.tables import title as test_title

    title, seeds = f"{field}, " if field else "", field == "seed"
    if validation:
        print(f"{title}recall on the validation classes:")
        print(format_results({**validation, **(_spread(validation) if seeds else {})}))
        same_classes = len(validation) == len(test) and not title.startswith("data.")
        if len(validation) > 1 and same_classes and not seeds:
            metric = selecting(_first(validation)["head"])
            best = max(validation, key=lambda name: validation[name]["head"][metric])
            print(f"best: {best}, by {metric} of the head on the validation classes")
    report_only = " (to report, not to choose by)" if validation and not seeds else ""
    print(f"{title}{test_title(test).lower()}{report_only}:")
    print(format_results({**test, **(_spread(test) if seeds else {})}))


def _draw(
    folders: Mapping[str, pathlib.Path],
    validation: Mapping[str, Recalls],
    test: Mapping[str, Recalls],
    output: pathlib.Path,
) -> None:
    """Draws the recall of the head against the field."""
    from hypjax.analysis.sweep_plot import Run, draw
    from hypjax.runs.tables import selecting
    from hypjax.runs.workdir import saved_config
    from hypjax.system import console

    metric, drawn = selecting(_first(test)["head"]), []
    for name, folder in folders.items():
        held_out = validation.get(name, {"head": {}})["head"].get(metric)
        drawn.append(Run.of(name, saved_config(folder), held_out, test[name]["head"][metric]))
    draw(drawn, _X.value or _FIELD.value, metric, output)
    console.say(f"wrote {output}")


def _first(runs: Mapping[str, Recalls]) -> Recalls:
    return next(iter(runs.values()))


def _spread(runs: Mapping[str, Recalls]) -> dict[str, Recalls]:
    """Mean and sample standard deviation over several runs."""
    if len(runs) < 2:
        return {}
    return {
        name: {
            part: {k: statistic([run[part][k] for run in runs.values()]) for k in values}
            for part, values in _first(runs).items()
        }
        for name, statistic in (("mean", statistics.mean), ("std", statistics.stdev))
    }


def _folders(overrides: Sequence[str]) -> dict[str, pathlib.Path]:
    """Default folders of the runs with each value of the field."""
    from hypjax.config import default_workdir, load_config, read_config
    from hypjax.runs.workdir import Workdir

    unchanged = read_config(_CONFIG.value)
    folders = {}
    for value in _VALUES.value:
        config = load_config(_CONFIG.value, [*overrides, f"{_FIELD.value}={value}"])
        folders[value] = pathlib.Path(default_workdir(config, unchanged))
        Workdir(folders[value], config)  # Raises an error if another run is there.
    return folders


def _results(folder: pathlib.Path) -> dict[str, Any] | None:
    """What a run's results.json holds; None if it is unfinished."""
    from hypjax.runs.files import read_results

    return read_results(folder / "results.json")


def _scores(results: Mapping[str, Recalls]) -> Recalls:
    """Scores of a run's best checkpoint or, without validation, its last."""
    return results.get("best") or results["final"]


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
