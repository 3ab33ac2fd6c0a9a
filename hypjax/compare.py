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
FLAGS = command.Flags(
    overrides=True,
    config=command.string(
        "Configuration file of the runs, optionally with a variant after a colon. "
        "--config.FIELD=VALUE sets one of its fields in all of them."
    ),
    field=command.string("Field in which the runs differ, such as objective.c."),
    value=command.strings("Value of the field in one run; repeat the flag."),
    output=command.string(
        "Figure to draw, such as sweep.png: the recall against the field, one line for each "
        "combination of other fields in which the runs differ."
    ),
    check=command.boolean("Only check --config, --field, --value and --output."),
    x=command.string("Field on the horizontal axis of the figure. Default: --field."),
)


def main(overrides: list[str], names: Sequence[str]) -> None:
    """Prints the tables of the named runs, or of those with different values of a field."""
    output, field = FLAGS.output_file("output", *command.FIGURES), FLAGS.field
    if names and (FLAGS.config or overrides):
        raise UserError("name either the folders of runs or --config, not both")
    if not names:
        FLAGS.require("config", "field", "value")
    elif FLAGS.x or output:
        FLAGS.require("x", "output")
    from hypjax.analysis import sweep
    from hypjax.system import console

    if names:
        folders, field = {name: pathlib.Path(name).expanduser() for name in names}, None
        sweep.require_finished(folders)
    else:
        folders = sweep.default_folders(FLAGS.config, overrides, field, FLAGS.value)
    if FLAGS.check:
        return
    runs = sweep.read_runs(folders)
    if output:
        sweep.draw(runs, FLAGS.x or field, output)
        console.say(f"wrote {output}")
    if runs:
        sweep.print_tables(runs, field)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
