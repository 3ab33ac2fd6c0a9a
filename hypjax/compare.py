"""Prints tables of finished runs.

python -m hypjax.compare runs/a runs/b: the runs in these folders.
python -m hypjax.compare --config=configs/cub.py --field=objective.c --value=0.1 --value=0.3: runs
in default folders that differ in one field.
"""

import pathlib

from hypjax import command
from hypjax.errors import UserError


def main(
    *names: str,
    overrides: list[str],
    config: str | None = None,
    field: str | None = None,
    value: list[str] | None = None,
    output: command.Figure | None = None,
    x: str | None = None,
) -> None:
    """Prints tables of the named runs, or of runs with different values of a field.

    Args:
        *names: Folders of runs.
        overrides: Fields to set in all runs, as FIELD=VALUE.
        config: Configuration of the runs; --config.FIELD=VALUE sets a field in all of them.
        field: With --config: field in which the runs differ, such as objective.c.
        value: With --config: value of the field in one run; repeat the flag.
        output: Figure to draw, such as sweep.png: the recall against the field, with a line for
            each combination of other fields in which the runs differ.
        x: With --output: field on the horizontal axis of the figure. Default: --field.

    Example:
        python -m hypjax.compare runs/glyphs-hyp
    """
    if names and (config or overrides):
        raise UserError("name either the folders of runs or --config, not both")
    axis = x or field or ""
    if output:
        command.require_one(x=axis)
    from hypjax.analysis import sweep
    from hypjax.system import console

    if names:
        folders = {name: pathlib.Path(name).expanduser() for name in names}
        sweep.require_finished(folders)
    elif config and field and value:
        folders = {**sweep.default_folders(config, overrides, field, value)}
    else:
        raise UserError("name folders of runs, or give --config, --field and --value (see --help)")
    runs = sweep.read_runs(folders)
    if output:
        sweep.draw(runs, axis, output)
        console.say(f"wrote {output}")
    if runs:
        sweep.print_tables(runs, None if names else field)


if __name__ == "__main__":
    command.run(main)
