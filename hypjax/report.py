"""Writes a report of trained runs: one HTML page that opens from the disk."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from absl import flags

from hypjax import command
from hypjax.errors import UserError

if TYPE_CHECKING:  # They import JAX or NumPy.
    from hypjax.inference.inspected import Inspected, Log
    from hypjax.reports.report_page import ShownSearch

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
    "Queries of each run to show with their nearest images; up to half are successes.",
    lower_bound=0,
    flag_values=FLAGS,
)
_HITS = flags.DEFINE_integer(
    "k", 6, "Nearest images to show of each query.", lower_bound=1, flag_values=FLAGS
)
_CLASSES = 30  # Classes with the lowest recall that are listed.
_POINTS = 5000  # Images in the disk.


def main(overrides: list[str]) -> None:
    """Embeds the test images of each run, and writes the page."""
    command.require(_WORKDIRS)
    command.refuse_overrides(overrides)
    names, output = command.run_names(_WORKDIRS), pathlib.Path(_OUTPUT.value).expanduser()
    if output.suffix != ".html":
        raise UserError(f"--output is {output}; its name must end in .html")
    if not output.parent.is_dir():
        raise UserError(f"--output is {output}, but the folder {output.parent} does not exist")
    from hypjax.config import identity
    from hypjax.inference.inspected import inspect, read_log
    from hypjax.reports.report_page import render
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs
    from hypjax.system.files import write_text

    keep_compiled_programs()
    logs = {name: read_log(path) for name, path in zip(names, _WORKDIRS.value, strict=True)}
    runs = []
    for (name, log), workdir in zip(logs.items(), _WORKDIRS.value, strict=True):
        console.say(f"embedding the test images with {name}")
        runs.append(_run(name, log, inspect(workdir, _HITS.value)))
    page = render(
        runs,
        {name: identity(log.config) for name, log in logs.items()},
        {name: log.lines for name, log in logs.items()},
        {name: log.times for name, log in logs.items()},
    )
    try:
        write_text(output, page)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror})") from error
    print(f"wrote {output}")


def _run(name: str, log: Log, found: Inspected) -> dict[str, Any]:
    """What the page shows of a run."""
    from hypjax.config import default_config, identity
    from hypjax.reports.model_card import describe
    from hypjax.reports.published import compare
    from hypjax.reports.report_page import number
    from hypjax.reports.tables import format_results

    defaults = identity(default_config(log.config.objective.name))
    fields = [(f, v) for f, v in identity(log.config).items() if v != defaults.get(f)]
    results, notes = log.results or {}, (log.results or {}).get("notes", [])
    states = {state: results[state] for state in ("untrained", "final", "best") if state in results}
    text = [format_results(states)] if states else ["The run is not finished."]
    if states and not notes:
        text += [compare(results, log.config)]
    searches = [_shown(found, search) for search in _chosen(found)]
    return {
        "name": name,
        "description": describe(log.config),
        "fields": fields,
        "notes": notes,
        "results": "\n".join(filter(None, text)),
        "interval": found.interval and "{:.3f} ({:.3f} to {:.3f})".format(*found.interval),
        **_disk(name, found),
        "delta": number(found.delta),
        "curvature": number(found.curvature),
        "searches": searches,
        "failures": found.failures,
        "answerable": len(found.searches),
        "classes": found.classes[:_CLASSES],
        "class_count": len(found.classes),
    }


def _chosen(found: Inspected) -> list[Any]:
    """The failures first, then, in what remains of the page but at least half, successes."""
    failures = found.searches[: found.failures]
    successes = found.searches[found.failures :]
    kept = max(_QUERIES.value - len(successes), _QUERIES.value - _QUERIES.value // 2)
    failures = failures[:kept]
    return failures + successes[: _QUERIES.value - len(failures)]


def _shown(found: Inspected, search: Any) -> ShownSearch:
    from hypjax.reports.report_page import Shown, ShownSearch, thumbnail

    query = Shown(thumbnail(found.query(search.query)), found.query_name(search.query)[0])
    hits = [
        Shown(thumbnail(found.hit(i)), found.hit_name(i)[0], right, f"{distance:.3f}")
        for i, distance, right in zip(search.hits, search.distances, search.right, strict=True)
    ]
    return ShownSearch(query, hits, not search.right[0])


def _disk(name: str, found: Inspected) -> dict[str, Any]:
    """The disk of a run, as the page shows it."""
    import tempfile

    import numpy as np

    from hypjax.geometry import layout
    from hypjax.reports.disk import Panel, draw_disks
    from hypjax.reports.report_page import data_url

    chosen = np.sort(np.random.default_rng(0).permutation(len(found.points))[:_POINTS])
    points, (title, grouping) = found.points[chosen], found.grouping
    places = layout.lay_out(points, found.space)
    plain = layout.principal_components(np.asarray(found.space.features(points)))
    ranks = ["", ""]
    if len(points) > 2:
        both = places, layout.to_disk(1e-6 * plain)
        ranks = [f"{layout.rank_correlation(points, each, found.space):.3f}" for each in both]
    shown = f"{name}: {len(points):,} test images"
    panel = Panel(shown, places, grouping.labels[chosen], [], found.query)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "disk.png"
        draw_disks([panel], grouping.names, title, file)
        content = file.read_bytes()
    return {
        "disk": data_url(content, "png"),
        "grouping": title,
        "rank": ranks[0],
        "plain_rank": ranks[1],
    }


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
