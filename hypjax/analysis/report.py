"""Writes reports of trained runs."""

import collections
import itertools
import operator
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hypjax.analysis.disk import Panel, draw_disks
from hypjax.analysis.hit_grid import Images
from hypjax.analysis.report_data import Inspected, Log, Opened, Search, inspect, read_log
from hypjax.analysis.report_page import Run, Shown, data_url, number, render, thumbnail
from hypjax.config import default_config, identity
from hypjax.errors import Interrupted, UserError
from hypjax.geometry import layout
from hypjax.inference.model_card import describe
from hypjax.runs.files import REPORT
from hypjax.runs.published import compare
from hypjax.system import console
from hypjax.system.files import write_text
from hypjax.training.setup import Setup

_CLASSES = 20  # Classes with the lowest recall that are listed.
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
        queries: Queries to show; up to half of them are successes.
        k: Nearest images to show of each query.
        opened: What the runs still hold, if they have just ended.

    Raises:
        UserError: A folder holds no trained model, the images have changed, an image cannot be
            read, or the file cannot be written.
    """
    console.say("writing the report")
    runs, images = [], {}
    logs = {name: read_log(workdir) for name, workdir in workdirs.items()}
    for name, log in logs.items():
        console.say(f"embedding the test images with {name}")
        found = inspect(workdirs[name], k, opened)
        images.setdefault(found.images, {})[name] = found
        runs.append(_run(name, log, found))
    page = render(runs, [_group(group, queries) for group in images.values()])
    try:
        write_text(output, page)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror})") from error


def _run(name: str, log: Log, found: Inspected) -> Run:
    """What the page shows of a run, but for its searches."""
    defaults, fields = identity(default_config(log.config.objective.name)), identity(log.config)
    results = log.results or {}
    states = ("best", "final", "untrained")
    notes = results.get("notes", []) if results else ["the run is not finished"]
    return Run(
        name=name,
        facts={"model": describe(log.config), **found.counts},
        fields=fields,
        changed=[field for field, value in fields.items() if value != defaults.get(field)],
        scores={state: results[state] for state in states if state in results},
        interval=found.interval,
        published="" if notes else compare(results, log.config),
        notes=notes,
        warnings=log.warnings,
        lines=log.lines,
        times=log.times,
        disk=_disk(name, found),
    )


def _group(runs: Mapping[str, Inspected], queries: int) -> dict[str, Any]:
    """What the page shows of the searches of runs that have the same test images."""
    first = next(iter(runs.values()))
    answers = [{search.query: search for search in run.searches} for run in runs.values()]
    searches = [
        (_shown(first, query), [_hits(first, answer[query]) for answer in answers])
        for query in _chosen(list(runs.values()), queries)
    ]
    by_name = [sorted(run.classes, key=operator.attrgetter("name")) for run in runs.values()]
    classes = zip(*by_name, strict=True)
    failures = [(name, run.failures, len(run.searches)) for name, run in runs.items()]
    return {
        "names": list(runs),
        "failures": failures,
        "searches": searches,
        "classes": sorted(classes, key=lambda row: sum(own.recall for own in row))[:_CLASSES],
        "class_count": len(first.classes),
    }


def _chosen(runs: Sequence[Inspected], queries: int) -> list[int]:
    """Failures of each run in turn, then successes of all, half of the queries if there are any."""
    wrong = {search.query for run in runs for search in run.searches[: run.failures]}
    failures = _in_turn([_failures(run) for run in runs])
    successes = _in_turn([[s.query for s in run.searches[run.failures :]] for run in runs])
    successes = [query for query in successes if query not in wrong]
    failures = failures[: max(queries - len(successes), queries - queries // 2)]
    return failures + successes[: queries - len(failures)]


def _in_turn(queries: Sequence[Sequence[int]]) -> list[int]:
    rows = itertools.zip_longest(*queries)
    return list(dict.fromkeys(query for row in rows for query in row if query is not None))


def _failures(run: Inspected) -> list[int]:
    """The failures of a run, pairs of classes in turn; of two images that find each other, one."""
    images, classes, ranked = set(), collections.Counter(), []
    for search in run.searches[: run.failures]:
        names = run.query_name(search.query), run.hit_name(search.hits[0])
        if frozenset(names) not in images:
            images.add(frozenset(names))
            pair = frozenset(class_name for class_name, _ in names)
            ranked.append((classes[pair], search.query))
            classes[pair] += 1
    return [query for _, query in sorted(ranked, key=operator.itemgetter(0))]


def _shown(found: Inspected, query: int) -> Shown:
    return Shown(thumbnail(found.query(query)), found.query_name(query)[0])


def _hits(found: Inspected, search: Search) -> list[Shown]:
    return [
        Shown(thumbnail(found.hit(i)), found.hit_name(i)[0], right, f"{distance:.3f}")
        for i, distance, right in zip(search.hits, search.distances, search.right, strict=True)
    ]


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
        "image": data_url(content, "png"),
        "grouping": title,
        "rank": ranks[0],
        "plain_rank": ranks[1],
        "delta": number(found.delta),
        "curvature": number(found.curvature),
    }


def write_own_report(folder: pathlib.Path, location: str, setup: Setup) -> bool:
    """Writes the report of a finished run; a failure is a warning, as the results are saved.

    Args:
        folder: The run's folder.
        location: Its path or URL, which names the run.
        setup: The run.

    Returns:
        Whether there is a report. A run of several processes has none: one process cannot embed
        images while the others wait.

    Raises:
        Interrupted: An interrupt arrived.
    """
    if jax.process_count() > 1:
        return False
    try:
        name, output = pathlib.Path(location).name, folder / REPORT
        opened = Opened(setup.splits, setup.evaluator.images.encodings)
        write_report({name: folder}, output, queries=50, k=6, opened=opened)
    except UserError as error:
        console.warn(f"there is no report: {error}")
        return False
    except KeyboardInterrupt as interrupt:
        command = f"python -m hypjax.report --workdir={location}"
        raise Interrupted(f"the results are saved; {command} writes the report") from interrupt
    return True
