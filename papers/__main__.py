"""Prints a table from the papers, with our results beside the published ones.

launch/papers.sh, with the same arguments, first runs what the table lacks.
"""

import pathlib
from collections.abc import Sequence
from typing import Annotated

from hypjax import command
from hypjax.errors import UserError, writing


def main(
    *names: str,
    overrides: Sequence[str] = (),
    pending: bool = False,
    output: Annotated[pathlib.Path, command.ends_in(".md")] | None = None,
) -> None:
    """Prints the table, with the results of finished runs in their default folders.

    Args:
        *names: The table, such as hyp-vit-3, hypmix-1, hier-main or irt-2; then optionally rows,
            each by words of its name: "Hyp-DINO cub200" or 384-d.
        overrides: Fields to set in all runs, as FIELD=VALUE.
        pending: Instead of the table, print the command lines that run what the table lacks.
        output: Markdown file for the table; a .csv file is written beside it.

    Example:
        python -m papers hyp-vit-3 cub200
    """
    if not names:
        raise UserError("name a table, such as hyp-vit-3")
    from hypjax.system import console
    from hypjax.system.files import write_text
    from papers import tables

    rows = tables.rows_of(names[0], names[1:])
    if pending:
        for line in tables.pending(rows, overrides):
            print(line)
        return
    table = list(tables.cells(rows, overrides))
    print(tables.as_text(table))
    if output:
        with writing(output):
            write_text(output, tables.as_markdown(table))
            write_text(output.with_suffix(".csv"), tables.as_csv(table))
        console.say(f"wrote {output} and {output.with_suffix('.csv')}")


if __name__ == "__main__":
    command.run(main)
