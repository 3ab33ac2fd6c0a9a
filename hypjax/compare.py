"""Prints one table of finished runs.

python -m hypjax.compare runs/a runs/b: these runs.
python -m hypjax.compare --config=configs/cub.py --field=objective.c --value=0.1 --value=0.3: runs
that differ in one field, in their default folders.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    """Prints the table of the named runs, or of those with different values of a field."""
    from hypjax.reports.tables import format_results

    if runs:
        if _CONFIG.value or overrides:
            raise UserError("name either the folders of runs or --config, not both")
        recalls = {run: _recalls(pathlib.Path(run).expanduser()) for run in runs}
        if unfinished := [run for run, recall in recalls.items() if recall is None]:
            raise UserError(f"no finished run in {unfinished[0]}: it has no results.json")
        title = "recall on the test classes"
    else:
        command.require(_CONFIG, _FIELD, _VALUES)
        recalls = {value: _recalls(folder) for value, folder in _folders(overrides).items()}
        title = f"{_FIELD.value}, recall on the test classes"
    finished = _comparable({name: recall for name, recall in recalls.items() if recall})
    if finished:
        print(f"{title}:\n{format_results(finished)}")


def _folders(overrides: Sequence[str]) -> dict[str, pathlib.Path]:
    """Default folders of the runs with each value of the field."""
    from hypjax.config import default_workdir, load_config, read_config

    unchanged = read_config(_CONFIG.value)
    folders = {}
    for value in _VALUES.value:
        config = load_config(_CONFIG.value, [*overrides, f"{_FIELD.value}={value}"])
        folders[value] = pathlib.Path(default_workdir(config, unchanged))
    return folders


def _recalls(folder: pathlib.Path) -> Recalls | None:
    """Recalls of a run's best checkpoint or, without validation, its last; None if unfinished."""
    path = folder / "results.json"
    if not path.is_file():
        return None
    results = json.loads(path.read_text())
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
