"""Prints tables of finished runs.

python -m hypjax.compare runs/a runs/b: these runs.
python -m hypjax.compare --config=configs/cub.py --field=objective.c --value=0.1 --value=0.3: runs
that differ in one field, in their default folders.
"""

from __future__ import annotations

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


def main(overrides: list[str], runs: Sequence[str]) -> None:
    """Prints the tables of the named runs, or of those with different values of a field."""
    if runs:
        if _CONFIG.value or overrides:
            raise UserError("name either the folders of runs or --config, not both")
        results = {run: _results(pathlib.Path(run).expanduser()) for run in runs}
        if unfinished := [run for run, found in results.items() if found is None]:
            raise UserError(f"no finished run in {unfinished[0]}: it has no results.json")
    else:
        command.require(_CONFIG, _FIELD, _VALUES)
        results = {value: _results(folder) for value, folder in _folders(overrides).items()}
    finished = {name: found for name, found in results.items() if found}
    if finished:
        _print_tables(finished, None if runs else _FIELD.value)


def _print_tables(runs: Mapping[str, Mapping[str, Any]], field: str | None) -> None:
    """Prints recalls on validation classes, by which runs are chosen, and then on test classes.

    Args:
        runs: What results.json holds, for each run.
        field: Field in which the runs differ; None for any runs. Seeds are summarised, not chosen.
    """
    from hypjax.reports.tables import format_results, selecting

    title, seeds = f"{field}, " if field else "", field == "seed"
    validation = _comparable(
        {n: _scores(r["validation"]) for n, r in runs.items() if r.get("validation")}
    )
    test = _comparable({name: _scores(found) for name, found in runs.items()})
    if validation:
        print(f"{title}recall on the validation classes:")
        print(format_results(validation | (_spread(validation) if seeds else {})))
        same_classes = len(validation) == len(runs) and not title.startswith("data.")
        if len(validation) > 1 and same_classes and not seeds:
            metric = selecting(_first(validation)["head"])
            best = max(validation, key=lambda name: validation[name]["head"][metric])
            print(f"best: {best}, by {metric} of the head on the validation classes")
    report_only = " (to report, not to choose by)" if validation and not seeds else ""
    print(f"{title}recall on the test classes{report_only}:")
    print(format_results(test | (_spread(test) if seeds else {})))


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

    unchanged = read_config(_CONFIG.value)
    folders = {}
    for value in _VALUES.value:
        config = load_config(_CONFIG.value, [*overrides, f"{_FIELD.value}={value}"])
        folders[value] = pathlib.Path(default_workdir(config, unchanged))
    return folders


def _results(folder: pathlib.Path) -> dict[str, Any] | None:
    """What a run's results.json holds; None if it is unfinished."""
    from hypjax.runs.workdir import read_results

    return read_results(folder / "results.json")


def _scores(results: Mapping[str, Recalls]) -> Recalls:
    """Scores of a run's best checkpoint or, without validation, its last."""
    return results.get("best") or results["final"]


def _comparable(runs: dict[str, Recalls]) -> dict[str, Recalls]:
    """Drops the metrics that some runs lack, since they were evaluated with other fields."""
    embeddings = [values for recalls in runs.values() for values in recalls.values()]
    if not embeddings:
        return {}
    common = [name for name in embeddings[0] if all(name in values for values in embeddings)]
    if not common:
        raise UserError("these runs have no metric in common; evaluate them with the same eval.ks")
    return {
        run: {part: {name: values[name] for name in common} for part, values in recalls.items()}
        for run, recalls in runs.items()
    }


if __name__ == "__main__":
    command.run(main, FLAGS, CHOICES)
