"""Writes a report of trained runs: one HTML page that opens from the disk."""

from hypjax import command

EXAMPLE = "python -m hypjax.report --workdir=runs/glyphs-hyp --output=report.html"
FLAGS = command.Flags()
_WORKDIRS = FLAGS.runs()
_OUTPUT = FLAGS.string("output", "File to write.", "report.html")
_QUERIES = FLAGS.natural(
    "queries",
    "Queries to show with their nearest images in each run; up to half are successes.",
    50,
)
_HITS = FLAGS.positive("k", "Nearest images to show of each query.", 6)


def main() -> None:
    """Embeds the test images of each run, and writes the page."""
    command.require(_WORKDIRS)
    output = command.output_file(_OUTPUT, ".html")
    from hypjax.analysis.report import write_report
    from hypjax.analysis.run_embeddings import open_runs

    write_report(open_runs(_WORKDIRS.value), output, queries=_QUERIES.value, k=_HITS.value)
    print(f"wrote {output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
