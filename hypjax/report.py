"""Writes a report of trained runs: one HTML page that needs no server."""

import pathlib
from typing import Annotated

from hypjax import command


def main(
    *,
    overrides: list[str],
    workdir: list[str],
    output: Annotated[pathlib.Path, command.ends_in(".html")] = pathlib.Path("report.html"),
    queries: command.Natural = 50,
    k: command.Positive = 6,
) -> None:
    """Embeds the test images of each run, and writes the page.

    Args:
        overrides: Where the images are if they have moved, as data.path=photos.
        workdir: Folder or URL of a trained run; repeat the flag to compare runs of one dataset.
        output: File to write.
        queries: Number of queries to show with their nearest images; up to half are successes.
        k: Number of nearest images to show for each query.

    Example:
        python -m hypjax.report --workdir=runs/glyphs-hyp --output=report.html
    """
    from hypjax.analysis.report import write_report
    from hypjax.analysis.run_embeddings import open_runs

    write_report(open_runs(workdir, overrides), output, queries=queries, k=k)
    print(f"wrote {output}")


if __name__ == "__main__":
    command.run(main)
