"""Prints tables of finished runs.

python -m hypjax.compare runs/a runs/b: these runs.
python -m hypjax.compare --config=configs/cub.py --field=objective.c --value=0.1 --value=0.3: runs
that differ in one field, in their default folders.

--output=sweep.png draws them, too; runs in named folders against the field of --x.
"""

import pathlib
from collections.abc import Sequence

from hypjax import command
from hypjax.errors import UserError

CHOICES = None  # Any folders.

EXAMPLE = "python -m hypjax.compare runs/glyphs-hyp"
FLAGS = command.Flags()
_CONFIG = FLAGS.string(
    "config",
    None,
    "Configuration file of the runs, optionally with a variant after a colon. "
    "--config.FIELD=VALUE sets one of its fields in all of them.",
)
_FIELD = FLAGS.string("field", None, "Field in which the runs differ, such as objective.c.")
_VALUES = FLAGS.strings("value", [], "Value of the field in one run; repeat the flag.")
_OUTPUT = FLAGS.string(
    "output",
    None,
    "Figure to draw, such as sweep.png: the recall against the field, one line for each "
    "combination of other fields in which the runs differ.",
)
_CHECK = FLAGS.boolean("check", False, "Only check --config, --field, --value and --output.")
_X = FLAGS.string("x", None, "Field on the horizontal axis of the figure of named runs.")


def main(overrides: list[str], runs: Sequence[str]) -> None:
    """Prints the tables of the named runs, or of those with different values of a field."""
    output = command.figure(_OUTPUT)
    if runs:
        if _CONFIG.value or overrides:
            raise UserError("name either the folders of runs or --config, not both")
        if _X.value or _OUTPUT.value:
            command.require(_X, _OUTPUT)
    else:
        command.require(_CONFIG, _FIELD, _VALUES)
        if _X.value:
            raise UserError("--x is for the folders of runs; with --config, --field is drawn")
    from hypjax.analysis import sweep
    from hypjax.runs.files import RESULTS, read_results
    from hypjax.system import console

    if runs:
        folders, field = {run: pathlib.Path(run).expanduser() for run in runs}, None
    else:
        field = _FIELD.value
        folders = sweep.default_folders(_CONFIG.value, overrides, field, _VALUES.value)
    if _CHECK.value:
        return
    results = {name: read_results(folder / RESULTS) for name, folder in folders.items()}
    if runs and (unfinished := [run for run, found in results.items() if found is None]):
        raise UserError(f"no finished run in {unfinished[0]}: it has no results.json")
    finished = {name: found for name, found in results.items() if found}
    if runs:
        sweep.require_one_dataset(folders)
    if output and not finished:
        raise UserError(
            f"there is nothing to draw: no run with these values of {field} is finished"
        )
    validation, test = sweep.common_scores(finished)
    if output:
        sweep.draw_runs(folders, validation, test, _X.value or field, output)
        console.say(f"wrote {output}")
    if finished:
        sweep.print_tables(validation, test, field)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
