"""Writes a report of trained runs: one HTML page that opens from the disk."""

from hypjax import command

EXAMPLE = "python -m hypjax.report --workdir=runs/glyphs-hyp --output=report.html"
FLAGS = command.Flags(
    workdir=command.RUNS,
    output=command.string("File to write.", "report.html"),
    queries=command.natural(
        "Queries to show with their nearest images in each run; up to half are successes.", 50
    ),
    k=command.positive("Nearest images to show of each query.", 6),
)


def main() -> None:
    """Embeds the test images of each run, and writes the page."""
    FLAGS.require("workdir")
    output = FLAGS.output_file("output", ".html")
    from hypjax.analysis.report import write_report
    from hypjax.analysis.run_embeddings import open_runs

    write_report(open_runs(FLAGS.workdir), output, queries=FLAGS.queries, k=FLAGS.k)
    print(f"wrote {output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
