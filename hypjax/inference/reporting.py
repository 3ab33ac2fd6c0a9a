"""Writes reports of trained runs."""

import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from hypjax.config import default_config, identity
from hypjax.errors import UserError
from hypjax.geometry import layout
from hypjax.inference.inspected import Inspected, Log, Opened, Search, inspect, read_log
from hypjax.reports.disk import Panel, draw_disks
from hypjax.reports.hit_grid import Images
from hypjax.reports.model_card import describe
from hypjax.reports.published import compare
from hypjax.reports.report_page import Shown, ShownSearch, data_url, number, render, thumbnail
from hypjax.reports.tables import format_results
from hypjax.system import console
from hypjax.system.files import write_text

_CLASSES = 30  # Classes with the lowest recall that are listed.
_POINTS = 5000  # Images in the disk.


def write_report(
    workdirs: Mapping[str, str | pathlib.Path],
    output: pathlib.Path,
    *,
    queries: int,
    k: int,
    opened: Opened | None = None,
) -> None:
    """Embeds the test images of runs, and writes a page about these.

    Args:
        workdirs: Folder or URL of each run, by the name that the page shows.
        output: File to write.
        queries: Queries of each run to show; up to half of them are successes.
        k: Nearest images to show of each query.
        opened: What the runs still hold, if they have just ended.

    Raises:
        UserError: A folder holds no trained model, the images have changed, an image cannot be
            read, or the file cannot be written.
    """
    console.say("writing the report")
    logs = {name: read_log(workdir) for name, workdir in workdirs.items()}
    runs = []
    for name, log in logs.items():
        console.say(f"embedding the test images with {name}")
        runs.append(_run(name, log, inspect(workdirs[name], k, opened), queries))
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


def _run(name: str, log: Log, found: Inspected, queries: int) -> dict[str, Any]:
    """What the page shows of a run."""
    defaults = identity(default_config(log.config.objective.name))
    fields = [(f, v) for f, v in identity(log.config).items() if v != defaults.get(f)]
    results, notes = log.results or {}, (log.results or {}).get("notes", [])
    states = {state: results[state] for state in ("untrained", "final", "best") if state in results}
    text = [format_results(states)] if states else ["The run is not finished."]
    if states and not notes:
        text += [compare(results, log.config)]
    searches = [_shown(found, search) for search in _chosen(found, queries)]
    return {
        "name": name,
        "description": describe(log.config),
        "fields": fields,
        "notes": notes,
        "warnings": log.warnings,
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


def _chosen(found: Inspected, queries: int) -> list[Search]:
    """Failures and then successes, which get half of the places if there are as many."""
    failures = found.searches[: found.failures]
    successes = found.searches[found.failures :]
    kept = max(queries - len(successes), queries - queries // 2)
    failures = failures[:kept]
    return failures + successes[: queries - len(failures)]


def _shown(found: Inspected, search: Search) -> ShownSearch:
    query = Shown(thumbnail(found.query(search.query)), found.query_name(search.query)[0])
    hits = [
        Shown(thumbnail(found.hit(i)), found.hit_name(i)[0], right, f"{distance:.3f}")
        for i, distance, right in zip(search.hits, search.distances, search.right, strict=True)
    ]
    return ShownSearch(query, hits, not search.right[0])


def _disk(name: str, found: Inspected) -> dict[str, Any]:
    """The disk of a run, as the page shows it."""
    chosen = np.sort(np.random.default_rng(0).permutation(len(found.points))[:_POINTS])
    points, (title, grouping) = found.points[chosen], found.grouping
    places = layout.lay_out(points, found.space)
    plain = layout.principal_components(np.asarray(found.space.features(points)))
    ranks = ["", ""]
    if len(points) > 2:
        both = places, layout.to_disk(1e-6 * plain)
        ranks = [f"{layout.rank_correlation(points, each, found.space):.3f}" for each in both]
    shown = f"{name}: {len(points):,} test images"
    panel = Panel(shown, places, grouping.labels[chosen], [], Images(found.query))
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
