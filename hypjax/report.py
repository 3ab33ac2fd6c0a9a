"""Writes a report of trained runs: one HTML page that opens from the disk."""

from absl import flags

from hypjax import command

EXAMPLE = "python -m hypjax.report --workdir=runs/glyphs-hyp --output=report.html"
FLAGS = flags.FlagValues()
_WORKDIRS = flags.DEFINE_multi_string(
    "workdir",
    [],
    "Folder of a trained run, or its URL; repeat the flag to compare runs.",
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string("output", "report.html", "File to write.", flag_values=FLAGS)
_QUERIES = flags.DEFINE_integer(
    "queries",
    50,
    "Queries to show with their nearest images in each run; up to half are successes.",
    lower_bound=0,
    flag_values=FLAGS,
)
_HITS = flags.DEFINE_integer(
    "k", 6, "Nearest images to show of each query.", lower_bound=1, flag_values=FLAGS
)


def main(overrides: list[str]) -> None:
    """Embeds the test images of each run, and writes the page."""
    command.require(_WORKDIRS)
    command.refuse_overrides(overrides)
    names, output = command.run_names(_WORKDIRS), command.output_file(_OUTPUT, ".html")
    from hypjax.analysis.report import write_report
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    workdirs = dict(zip(names, _WORKDIRS.value, strict=True))
    write_report(workdirs, output, queries=_QUERIES.value, k=_HITS.value)
    print(f"wrote {output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
