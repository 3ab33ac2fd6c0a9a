"""Reports of trained runs: what a report shows of each, and writing it."""

import collections
import contextlib
import itertools
import json
import operator
import pathlib
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from hypjax.analysis.disk import Panel, draw_disks, read_rgb
from hypjax.analysis.hit_grid import ImageReader
from hypjax.analysis.report_page import Run, Shown, data_url, number, render, thumbnail
from hypjax.analysis.run_embeddings import head_points, searched
from hypjax.config import default_config, identity
from hypjax.data.dataset import Dataset
from hypjax.data.groupings import Grouping, groupings
from hypjax.data.parts import Splits
from hypjax.data.splits import open_splits
from hypjax.errors import Interrupted, UserError
from hypjax.geometry import Space, layout
from hypjax.geometry.hyperbolicity import curvature_from_delta, relative_delta
from hypjax.inference.features import Encodings
from hypjax.inference.push import describe
from hypjax.inference.weights import restore_best
from hypjax.objectives import create_objective
from hypjax.retrieval import bootstrap_interval, nearest_neighbors
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import METRICS, REPORT, RESULTS, TIMES, is_number, read_results
from hypjax.runs.published import compare
from hypjax.runs.workdir import Workdir, read_warnings, saved_config
from hypjax.system import console
from hypjax.system.files import write_text
from hypjax.training.setup import Setup

_CLASSES = 20  # Classes with the lowest recall that are listed.
_POINTS = 5000  # Images in the disk.
_SAMPLES, _TRIALS = 500, 20  # Points and draws for δ.


class Log(NamedTuple):
    """What a run wrote while it was trained.

    Attributes:
        config: Its configuration.
        results: Its results; None until it is finished.
        lines: Lines of metrics.jsonl.
        times: times.json; empty if there is none.
        warnings: Warnings that it gave.
    """

    config: ConfigDict
    results: dict[str, Any] | None
    lines: list[dict[str, Any]]
    times: dict[str, Any]
    warnings: list[str]


class Search(NamedTuple):
    """The nearest images of a test image.

    Attributes:
        query: Index of the test image.
        hits: Indices of the nearest among the searched images.
        distances: Their distances.
        right: Which of them show the query's class.
    """

    query: int
    hits: list[int]
    distances: list[float]
    right: list[bool]


class ClassRecall(NamedTuple):
    """How often images of a class find one of their class first.

    Attributes:
        name: The class.
        queries: Number of its test images with others of their class.
        recall: Fraction of them whose nearest image is of the class.
        confused: The class that is found most often instead; '' if none is.
        times: How often it is.
    """

    name: str
    queries: int
    recall: float
    confused: str
    times: int


class ReportData(NamedTuple):
    """The embeddings of a run's test images, and what searches among them find.

    Attributes:
        images: What runs of the same images have in common.
        counts: Numbers of images and classes, in words, by part of the dataset.
        points: Points of the test images.
        space: Their space.
        grouping: Name of the grouping for colours, and the groups.
        searches: Of queries that have images of their class: the failures, nearest wrong image
            first, then the successes, farthest first.
        failures: Number of failures.
        interval: Recall@1 with the ends of its 95% interval over queries; None without classes.
        classes: By recall, the lowest first.
        delta: Relative δ of the head's features; NaN for fewer than four images.
        curvature: The c that suits it; NaN if there is none.
        test: The test images.
        items: The searched images.
    """

    images: Hashable
    counts: dict[str, str]
    points: Float[np.ndarray, "n d"]
    space: Space
    grouping: tuple[str, Grouping]
    searches: list[Search]
    failures: int
    interval: tuple[float, float, float] | None
    classes: list[ClassRecall]
    delta: float
    curvature: float
    test: Dataset
    items: Dataset


def read_log(workdir: str | pathlib.Path) -> Log:
    """Reads what a run wrote while it was trained.

    Raises:
        UserError: The folder holds no run.
    """
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


class Opened(NamedTuple):
    """What a run that has just ended still holds.

    Attributes:
        splits: Its images.
        encodings: What it has kept of its frozen encoder's embeddings.
    """

    splits: Splits
    encodings: Encodings | None


def report_data(
    workdir: str | pathlib.Path, k: int = 8, opened: Opened | None = None
) -> ReportData:
    """Embeds the test images with a run's best model, or its last, and searches with each.

    Points are those of the head in the objective's `score_space`, without the projections of
    `eval.pca`.

    Args:
        workdir: Folder or URL of the run.
        k: Number of neighbours of each query.
        opened: What the run still holds, if it has just ended.

    Raises:
        UserError: The folder holds no trained model, the images have changed, or an image cannot be
            read.
    """
    with reading(workdir) as folder:
        config = saved_config(folder)
        model, params = restore_best(folder)
        run = Workdir(folder, config, compared=())
    splits, encodings = opened or (open_splits(config), None)
    run.require({"images": splits.fingerprint})
    space = create_objective(config).score_space
    embed = head_points(config, model, params, space, encodings)
    test, items = splits.test, searched(splits)
    points = embed(test)
    gallery = points if splits.gallery is None else embed(items)
    k = min(k, len(items) - (splits.gallery is None))
    distances, found = nearest_neighbors(
        points, gallery, k=k, space=space, exclude_self=splits.gallery is None
    )
    right = items.labels[found] == test.labels[:, None]
    # Queries with another image of their class, if there are several classes.
    counts = np.bincount(items.labels, minlength=int(test.labels.max()) + 1)
    answerable = (test.num_classes > 1) & (counts[test.labels] > (splits.gallery is None))
    wrong = np.flatnonzero(answerable & ~right[:, 0])
    correct = np.flatnonzero(answerable & right[:, 0])
    wrong = wrong[np.argsort(distances[wrong, 0], kind="stable")]
    correct = correct[np.argsort(-distances[correct, 0], kind="stable")]
    searches = [
        Search(i, found[i].tolist(), distances[i].tolist(), right[i].tolist())
        for i in np.concatenate([wrong, correct]).tolist()
    ]
    first = right[answerable, 0].astype(np.float64)
    delta, curvature = _delta(np.asarray(space.features(points)))
    grouped = groupings(config.data.name, test)
    name = list(grouped)[min(1, len(grouped) - 1)]
    parts = {"training": splits.train, "validation": splits.validation, "test": test}
    parts["searched"] = splits.gallery
    return ReportData(
        images=(splits.fingerprint, test.positions.tobytes(), items.positions.tobytes()),
        counts={f"{part} images": each.describe() for part, each in parts.items() if each},
        points=points,
        space=space,
        grouping=(name, grouped[name]),
        searches=searches,
        failures=len(wrong),
        interval=(float(first.mean()), *bootstrap_interval(first)) if len(first) else None,
        classes=_classes(test, items, found[:, 0], right[:, 0], answerable),
        delta=delta,
        curvature=curvature,
        test=test,
        items=items,
    )


def _classes(
    test: Dataset,
    items: Dataset,
    first: Int[np.ndarray, " n"],
    right: Bool[np.ndarray, " n"],
    answerable: Bool[np.ndarray, " n"],
) -> list[ClassRecall]:
    classes = []
    for label in np.unique(test.labels[answerable]):
        own = np.flatnonzero(answerable & (test.labels == label))
        wrong = items.labels[first[own[~right[own]]]]
        confused, times = "", 0
        if len(wrong):
            others, counts = np.unique(wrong, return_counts=True)
            most = int(others[counts.argmax()])
            place = int(first[own[~right[own]]][np.flatnonzero(wrong == most)[0]])
            confused, times = items.class_name(place), int(counts.max())
        name = test.class_name(int(own[0]))
        classes.append(ClassRecall(name, len(own), float(right[own].mean()), confused, times))
    return sorted(classes, key=lambda each: (each.recall, -each.queries, each.name))


def _delta(features: Float[np.ndarray, "n d"]) -> tuple[float, float]:
    try:
        trials = dict(num_samples=_SAMPLES, num_trials=_TRIALS, key=jax.random.key(0))
        delta = float(np.mean(relative_delta(features, **trials)))
        return delta, curvature_from_delta(delta)
    except UserError:  # Too few points, or all are equal.
        return float("nan"), float("nan")


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
        found = report_data(workdirs[name], k, opened)
        images.setdefault(found.images, {})[name] = found
        runs.append(_run(name, log, found))
    page = render(runs, [_group(group, queries) for group in images.values()])
    try:
        write_text(output, page)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror})") from error


def _run(name: str, log: Log, found: ReportData) -> Run:
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


def _group(runs: Mapping[str, ReportData], queries: int) -> dict[str, Any]:
    """What the page shows of the searches of runs that have the same test images."""
    first = next(iter(runs.values()))
    answers = [{search.query: search for search in run.searches} for run in runs.values()]

    def hits_of(search: Search) -> list[Shown]:
        found = zip(search.hits, search.right, search.distances, strict=True)
        return [_shown(first.items, i, right, f"{distance:.3f}") for i, right, distance in found]

    searches = [
        (_shown(first.test, query), [hits_of(answer[query]) for answer in answers])
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
    for search in run.searches[: run.failures]:
        both = (run.test, search.query), (run.items, search.hits[0])
        pair = frozenset(each.class_name(i) for each, i in both)
        mirrored = frozenset((each.class_name(i), each.name(i)) for each, i in both)
        if mirrored not in images:
            images.add(mirrored)
            ranked.append((classes[pair], search.query))
            classes[pair] += 1
    return [query for _, query in sorted(ranked, key=operator.itemgetter(0))]


def _shown(images: Dataset, i: int, right: bool = True, distance: str = "") -> Shown:
    return Shown(thumbnail(read_rgb(images)(i)), images.class_name(i), right, distance)


def _disk(name: str, found: ReportData) -> dict[str, Any]:
    """The disk of a run, as the page shows it."""
    chosen = np.sort(np.random.default_rng(0).permutation(len(found.points))[:_POINTS])
    points, (title, grouping) = found.points[chosen], found.grouping
    places = layout.lay_out(points, found.space)
    ranks = layout.faithfulness(points, places, found.space)
    shown = f"{name}: {len(points):,} test images"
    panel = Panel(shown, places, grouping.labels[chosen], [], ImageReader(read_rgb(found.test)))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "disk.png"
        draw_disks([panel], grouping.names, title, file)
        content = file.read_bytes()
    return {
        "image": data_url(content, "png"),
        "grouping": title,
        "rank": f"{ranks[0]:.3f}" if ranks else "",
        "plain_rank": f"{ranks[1]:.3f}" if ranks else "",
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
