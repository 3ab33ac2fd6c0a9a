"""Prints tables of finished runs.

python -m hypjax.compare runs/a runs/b: the runs in these folders.
python -m hypjax.compare --like=runs/a --vary=objective.c: the runs beside a run that differ from it
only in some fields.
python -m hypjax.compare --config=configs/cub.py --field=objective.c --value=0.1 --value=0.3: runs
in default folders that differ in one field.
"""

import pathlib

from hypjax import command
from hypjax.errors import UserError


def main(
    *names: str,
    overrides: list[str],
    like: list[str] | None = None,
    vary: list[str] | None = None,
    config: str | None = None,
    field: str | None = None,
    value: list[str] | None = None,
    output: command.Figure | None = None,
    x: str | None = None,
    y: str | None = None,
) -> None:
    """Prints tables of the named runs, or of runs with different values of a field.

    Args:
        *names: Folders of runs.
        overrides: Fields to set in all runs, as FIELD=VALUE.
        like: Folder of a run: compares the finished runs beside it that differ from it only in the
            fields of --vary. Repeat the flag for further lines of the figure.
        vary: With --like: field in which the runs may differ, such as objective.temperature or
            seed; repeat the flag.
        config: Configuration of the runs; --config.FIELD=VALUE sets a field in all of them.
        field: With --config: field in which the runs differ, such as objective.c.
        value: With --config: value of the field in one run; repeat the flag.
        output: Figure to draw, such as sweep.png: the recall against the field, with a line for
            each combination of other fields in which the runs differ.
        x: With --output: field on the horizontal axis of the figure. Default: --field, or the
            first --vary.
        y: Metric of training, such as gradient_covariance, to print, averaged over the steps, and
            to draw in place of the recall.

    Example:
        python -m hypjax.compare runs/glyphs-hyp
    """
    if bool(names) + bool(like) + bool(config or overrides) > 1:
        raise UserError("name either the folders of runs, --like or --config")
    if bool(like) != bool(vary):
        raise UserError("--like and --vary go together (see --help)")
    axis = x or field or (vary or [""])[0]
    if output:
        command.require_one(x=axis)
    from hypjax.analysis import sweep
    from hypjax.system import console

    lines = {name: sweep.folders_like(name, vary or []) for name in like or ()}
    if names or lines:
        folders = {name: pathlib.Path(name).expanduser() for name in names}
        folders |= {name: folder for line in lines.values() for name, folder in line.items()}
        sweep.require_finished(folders)
    elif config and field and value:
        folders = {**sweep.default_folders(config, overrides, field, value)}
    else:
        raise UserError("name folders of runs, or give --like or --config (see --help)")
    if not (runs := sweep.read_runs(folders)):
        raise UserError("none of the runs is finished and was tested")
    if output:
        chosen = {line: [run for run in runs if run.name in of] for line, of in lines.items()}
        sweep.draw(chosen if len(chosen) > 1 else {"": runs}, axis, output, y)
        console.say(f"wrote {output}")
    sweep.print_tables(runs, field if config else None)
    if y:
        sweep.print_means(runs, y)


if __name__ == "__main__":
    command.run(main)
