"""Reports of trained runs: what a report shows of each, and writing it."""

import collections
import contextlib
import io
import itertools
import json
import operator
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from hypjax.analysis.disk import Drawing, Panel, default_grouping, draw_disks, read_rgb
from hypjax.analysis.hit_grid import ImageReader, data_url, thumbnail_url
from hypjax.analysis.report_page import Log, Run, Shown, render
from hypjax.analysis.run_embeddings import (
    TrainedRun,
    head_points,
    kept_encodings,
    restore_trained,
    searched,
)
from hypjax.config import default_config, identity
from hypjax.data.dataset import Dataset
from hypjax.data.groupings import groupings
from hypjax.data.splits import open_splits
from hypjax.errors import Interrupted, UserError, writing
from hypjax.geometry import Space, layout, spaces
from hypjax.geometry.hyperbolicity import curvature_from_delta, relative_delta
from hypjax.inference.features import Encodings
from hypjax.inference.model_folder import describe
from hypjax.objectives import scored_space
from hypjax.retrieval import bootstrap_interval, nearest_neighbors
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import METRICS, REPORT, RESULTS, TIMES, is_number, read_results
from hypjax.runs.published import compare
from hypjax.runs.tables import format_learned
from hypjax.runs.workdir import read_warnings, saved_config
from hypjax.system import console
from hypjax.system.files import write_text
from hypjax.training.setup import Setup

_CLASSES = 20  # Classes with the lowest recall that are listed.
_POINTS = 5000  # Images in the disk.
_SAMPLES, _TRIALS = 500, 20  # Points and draws for δ.


class Search(NamedTuple):
    """The nearest images of a test image."""

    query: int  # Index of the test image.
    hits: list[int]  # Indices among the searched images.
    distances: list[float]
    right: list[bool]  # Which hits show the query's class.


class ClassRecall(NamedTuple):
    """How often images of a class find one of their class first."""

    name: str
    queries: int  # Number of its test images with others of their class.
    recall: float
    confused: str  # The class that is found most often instead; '' if none is.
    times: int  # How often it is.


class ReportData(NamedTuple):
    """The embeddings of a run's test images, and what searches among them find."""

    run: TrainedRun
    points: Float[np.ndarray, "n d"]
    space: Space
    # Of queries that have images of their class: the failures, nearest wrong image first, then the
    # successes, farthest first.
    searches: list[Search]
    failures: int
    interval: tuple[float, float, float] | None  # Recall@1, and its 95% interval over queries.
    classes: list[ClassRecall]  # The lowest recall first.


def read_log(workdir: str | pathlib.Path) -> Log:
    """Reads what a run wrote while it was trained; raises a `UserError` if there is no run."""
    with reading(workdir) as folder:
        config, results = saved_config(folder), read_results(folder / RESULTS)
        lines = _objects(folder / METRICS, str.splitlines, _is_line)
        times = _objects(folder / TIMES, lambda text: [text], _is_time)
        warnings = read_warnings(folder)
    return Log(config, results, lines, times[0] if times else {}, warnings)


def _is_line(values: dict[str, Any]) -> bool:
    """Whether an object is a line of metrics.jsonl: a step, numbers and scores."""
    scored = [values[name] for name in ("validation", "test") if name in values]
    return (
        type(values.get("step")) is int
        and all(map(_holds_numbers, values.values()))
        and all(isinstance(each, dict) and isinstance(each.get("head"), dict) for each in scored)
    )


def _is_time(values: dict[str, Any]) -> bool:
    """Whether an object is that of times.json."""
    return isinstance(values.get("seconds"), dict) and _holds_numbers(values["seconds"])


def _holds_numbers(value: Any) -> bool:
    """Whether a value is a number, or an object of some that hold numbers."""
    if isinstance(value, dict):
        return bool(value) and all(map(_holds_numbers, value.values()))
    return is_number(value)


def _objects(
    path: pathlib.Path,
    split: Callable[[str], Sequence[str]],
    valid: Callable[[dict[str, Any]], bool],
) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file; warns of those that are damaged, and leaves them out."""
    found, texts = [], []
    with contextlib.suppress(OSError):
        texts = split(path.read_text(errors="replace"))
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(text))
    found = [each for each in found if isinstance(each, dict) and valid(each)]
    if len(found) < len(texts):
        console.warn(f"{path} is damaged; {len(texts) - len(found)} of its objects are left out")
    return found


def report_data(run: TrainedRun, k: int, encodings: Encodings | None = None) -> ReportData:
    """Embeds the test images with a run's best model, or its last, and finds k neighbours of each.

    Points are those of the head in the objective's `score_space`, without the projections of
    `eval.pca`. `encodings` are what a run that has just ended has kept.
    """
    model, params = restore_trained(run)
    space = scored_space(run.config, params)
    encodings = kept_encodings(run, model) if encodings is None else encodings
    embed = head_points(run.config, model, params, space, encodings)
    test, items = run.splits.test, searched(run.splits)
    among_themselves = run.splits.gallery is None
    points = embed(test)
    gallery = points if among_themselves else embed(items)
    k = min(k, len(items) - among_themselves)
    distances, found = nearest_neighbors(
        points, gallery, k=k, space=space, exclude_self=among_themselves
    )
    right = items.labels[found] == test.labels[:, None]
    # Queries with another image of their class, if there are several classes.
    counts = np.bincount(items.labels, minlength=int(test.labels.max()) + 1)
    answerable = (test.num_classes > 1) & (counts[test.labels] > among_themselves)
    wrong = np.flatnonzero(answerable & ~right[:, 0])
    correct = np.flatnonzero(answerable & right[:, 0])
    wrong = wrong[np.argsort(distances[wrong, 0], kind="stable")]
    correct = correct[np.argsort(-distances[correct, 0], kind="stable")]
    searches = [
        Search(i, found[i].tolist(), distances[i].tolist(), right[i].tolist())
        for i in np.concatenate([wrong, correct]).tolist()
    ]
    first = right[answerable, 0].astype(np.float64)
    return ReportData(
        run=run,
        points=points,
        space=space,
        searches=searches,
        failures=len(wrong),
        interval=(float(first.mean()), *bootstrap_interval(first)) if len(first) else None,
        classes=_classes(test, items, searches),
    )


def _classes(test: Dataset, items: Dataset, searches: Sequence[Search]) -> list[ClassRecall]:
    searches_of = collections.defaultdict(list)
    for search in searches:
        searches_of[test.labels[search.query]].append(search)
    classes = []
    for own in searches_of.values():
        wrong = [search.hits[0] for search in own if not search.right[0]]
        found = collections.Counter(map(items.class_name, wrong))
        confused, times = next(iter(found.most_common(1)), ("", 0))
        recall, name = 1 - len(wrong) / len(own), test.class_name(own[0].query)
        classes.append(ClassRecall(name, len(own), recall, confused, times))
    return sorted(classes, key=lambda each: (each.recall, -each.queries, each.name))


def _delta(found: ReportData) -> tuple[float, float]:
    """Relative δ of the head's features, and the c that suits it; NaN if there are none."""
    features = np.asarray(spaces.features(found.space, found.points))
    try:
        trials = dict(num_samples=_SAMPLES, num_trials=_TRIALS, key=jax.random.key(0))
        delta = float(np.mean(relative_delta(features, **trials)))
        return delta, curvature_from_delta(delta)
    except UserError:  # Too few points, or all are equal.
        return float("nan"), float("nan")


def write_report(
    names: Mapping[str | pathlib.Path, str],
    output: pathlib.Path,
    *,
    queries: int,
    k: int,
    setup: Setup | None = None,
) -> None:
    """Embeds the test images of runs, and writes a page about these.

    The page shows so many queries, up to half of them successes, each with its k nearest images.
    `names` holds the name of each run that the page shows, by its folder or URL; `setup` is what a
    run that has just ended still holds.
    """
    console.say("writing the report")
    runs, groups = [], {}
    logs = {workdir: read_log(workdir) for workdir in names}
    for workdir, log in logs.items():
        name = names[workdir]
        console.say(f"embedding the test images with the model of {name}")
        splits = setup.splits if setup else open_splits(log.config)
        encodings = setup.evaluator.images.encodings if setup else None
        run = TrainedRun(name, str(workdir), log.config, splits)
        found = report_data(run, k, encodings)
        positions = (each.positions.tobytes() for each in (splits.test, searched(splits)))
        groups.setdefault((splits.fingerprint, *positions), []).append(found)
        runs.append(_run(log, found))
    page = render(runs, [_group(group, queries) for group in groups.values()])
    with writing(output):
        write_text(output, page)


def _run(log: Log, found: ReportData) -> Run:
    """What the page shows of a run, but for its searches."""
    splits = found.run.splits
    parts = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    parts["searched"] = splits.gallery
    counts = {f"{part} images": each.describe() for part, each in parts.items() if each}
    defaults, fields = identity(default_config(log.config.objective.name)), identity(log.config)
    results = log.results or {}
    states = ("best", "final", "untrained")
    learned = results.get("learned")
    learned = {"learned": format_learned(learned)} if learned else {}
    notes = results.get("notes", []) if results else ["the run is not finished"]
    return Run(
        name=found.run.name,
        log=log,
        facts={"model": describe(log.config), **learned, **counts},
        fields=fields,
        changed=[field for field, value in fields.items() if value != defaults.get(field)],
        scores={state: results[state] for state in states if state in results},
        interval=found.interval,
        published=compare(results, log.config),
        notes=notes,
        disk=_disk(found),
    )


def _group(runs: Sequence[ReportData], queries: int) -> dict[str, Any]:
    """What the page shows of the searches of runs that have the same test images."""
    splits = runs[0].run.splits
    answers = [{search.query: search for search in run.searches} for run in runs]

    def hits_of(search: Search) -> list[Shown]:
        found = zip(search.hits, search.right, search.distances, strict=True)
        items = searched(splits)
        return [_shown(items, i, right, f"{distance:.3f}") for i, right, distance in found]

    searches = [
        (_shown(splits.test, query), [hits_of(answer[query]) for answer in answers])
        for query in _chosen(runs, queries)
    ]
    by_name = [sorted(run.classes, key=operator.attrgetter("name")) for run in runs]
    classes = zip(*by_name, strict=True)
    return {
        "names": [run.run.name for run in runs],
        "failures": [(run.run.name, run.failures, len(run.searches)) for run in runs],
        "searches": searches,
        "classes": sorted(classes, key=lambda row: sum(own.recall for own in row))[:_CLASSES],
        "class_count": len(runs[0].classes),
    }


def _chosen(runs: Sequence[ReportData], queries: int) -> list[int]:
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


def _failures(run: ReportData) -> list[int]:
    """The failures of a run, pairs of classes in turn; of two images that find each other, one."""
    images, classes, ranked = set(), collections.Counter(), []
    test, items = run.run.splits.test, searched(run.run.splits)
    for search in run.searches[: run.failures]:
        both = (test, search.query), (items, search.hits[0])
        pair = frozenset(each.class_name(i) for each, i in both)
        mirrored = frozenset((each.class_name(i), each.name(i)) for each, i in both)
        if mirrored not in images:
            images.add(mirrored)
            ranked.append((classes[pair], search.query))
            classes[pair] += 1
    return [query for _, query in sorted(ranked, key=operator.itemgetter(0))]


def _shown(images: Dataset, i: int, right: bool = True, distance: str = "") -> Shown:
    url = thumbnail_url(read_rgb(images)(i), side=80, quality=82)
    return Shown(url, images.class_name(i), right, distance)


def _disk(found: ReportData) -> dict[str, str]:
    """The disk of a run, as the page shows it."""
    run, images = found.run, found.run.splits.test
    chosen = np.sort(np.random.default_rng(0).permutation(len(images))[:_POINTS])
    grouped = groupings(run.config.data.name, images)
    grouping = grouped[title := default_grouping(grouped)]
    points = found.points[chosen]
    places = layout.lay_out(points, found.space)
    ranks = layout.faithfulness(points, places, found.space)
    shown = f"{run.name}: {len(points):,} test images"
    panel = Panel(shown, places, grouping.labels[chosen], [], ImageReader(read_rgb(images)))
    file = io.BytesIO()
    draw_disks(Drawing([panel], grouping.names, title), file)
    delta, curvature = (f"{x:.3g}" if np.isfinite(x) else "" for x in _delta(found))
    return {
        "image": data_url(file.getvalue(), "png"),
        "grouping": title,
        "rank": f"{ranks[0]:.3f}" if ranks else "",
        "plain_rank": f"{ranks[1]:.3f}" if ranks else "",
        "delta": delta,
        "curvature": curvature,
    }


def write_own_report(folder: pathlib.Path, location: str, setup: Setup) -> bool:
    """Writes the report of a finished run; a failure is a warning, as the results are saved.

    `location` is the path or URL of the folder, and names the run. Returns whether there is a
    report: a run of several processes has none, since one cannot embed images while the others
    wait.
    """
    if jax.process_count() > 1:
        return False
    try:
        name, output = pathlib.Path(location).name, folder / REPORT
        write_report({folder: name}, output, queries=50, k=6, setup=setup)
    except UserError as error:
        console.warn(f"there is no report: {error}")
        return False
    except KeyboardInterrupt as interrupt:
        command = f"python -m hypjax.report --workdir={location}"
        raise Interrupted(f"the results are saved; {command} writes the report") from interrupt
    return True
