"""Reports of trained runs: one HTML page that needs no other file."""

import base64
import contextlib
import datetime
import importlib.resources
import io
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jinja2
import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from hypjax import __version__
from hypjax.analysis import disk
from hypjax.analysis.run_captions import CaptionSearches, search_captions
from hypjax.analysis.run_embeddings import searched
from hypjax.analysis.run_hits import RunSearches, Search, half_wrong, in_turn, search_test_images
from hypjax.config import identity
from hypjax.data.dataset import Dataset
from hypjax.errors import UserError, writing
from hypjax.experiment.experiment import Experiment
from hypjax.geometry import spaces
from hypjax.geometry.hyperbolicity import curvature_from_delta, relative_delta
from hypjax.inference.save import describe
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import REPORT, RESULTS, STARTS, TIMES, read_metrics, read_object
from hypjax.runs.tables import beside_published, format_best_step, format_learned
from hypjax.runs.workdir import read_if_intact
from hypjax.system import console
from hypjax.system.files import write_text

_CLASSES = 20  # Classes with the lowest recall that are listed.
_DISK_IMAGES = 5000  # Images in the disk.
_SAMPLES, _TRIALS = 500, 20  # Points and draws for δ.
_NO_CURVES = {"step", "test", "mining", "host_memory_peak"}  # Fields of metrics.jsonl.

Row = tuple[str, Sequence[Any]]  # A label, and a cell for each run.


class ShownRun(NamedTuple):
    """A run in a report: its results, its curves, and its searches."""

    name: str
    searches: RunSearches
    captions: CaptionSearches | None  # Searches by and for captions.
    results: Mapping[str, Any]  # Empty until it is finished.
    metrics: Sequence[Mapping[str, Any]]  # Lines of metrics.jsonl.
    seconds: Mapping[str, float]  # Duration of each phase of its last launch.
    warnings: Sequence[str]


def write_report(
    opened: Sequence[Experiment], output: pathlib.Path, *, queries: int = 50, k: int = 6
) -> None:
    """Writes a page about runs with the same test images; shows some queries with k hits each."""
    console.say("writing the report")
    runs = [_read_run(run, search_test_images(run, k), k) for run in opened]
    fields = _rows([identity(run.searches.run.method.fields) for run in runs])
    differing = [(name, values) for name, values in fields if any(x != values[0] for x in values)]
    recalls = zip(*(run.searches.classes for run in runs), strict=True)
    classes = sorted(recalls, key=lambda of_class: sum(of_run.recall for of_run in of_class))
    source = importlib.resources.files("hypjax.analysis").joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(source).render(
        names=[run.name for run in runs],
        version=__version__,
        date=datetime.date.today().isoformat(),
        runs=runs,
        compare=beside_published,
        about=_rows([_facts(run) for run in runs]) + differing,
        scores=_rows([_scores(run) for run in runs]),
        curves=_curves(runs),
        disks=[_disk(run.searches) for run in runs],
        searches=_searches([run.searches for run in runs], queries),
        captions=_caption_searches(runs, queries),
        caption_facts=_rows([run.captions.facts if run.captions else {} for run in runs]),
        classes_shown=classes[:_CLASSES],
        class_count=len(classes),
        times=_rows([{part: f"{s:.1f}" for part, s in run.seconds.items()} for run in runs]),
    )
    with writing(output):
        write_text(output, page)


def _read_run(run: Experiment, searches: RunSearches, k: int) -> ShownRun:
    captions = search_captions(searches, k)
    with reading(run.workdir) as folder:
        results = read_object(folder / RESULTS) or {}
        seconds = (read_object(folder / TIMES) or {}).get("seconds", {})
        warnings = read_if_intact(folder / STARTS).get("warnings", [])
        metrics = read_metrics(folder)
        return ShownRun(run.name, searches, captions, results, metrics, seconds, warnings)


def _rows(columns: Sequence[Mapping[Any, Any]]) -> list[Row]:
    """Makes a table with a row for each name and a column for each run."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _facts(run: ShownRun) -> dict[str, str]:
    splits = run.searches.run.splits
    facts = {"model": describe(run.searches.run.method)}
    if "best_step" in run.results:
        facts["best"] = format_best_step(run.results)
    if learned := run.results.get("learned"):
        facts["learned"] = format_learned(learned)
    parts = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    parts["searched"] = splits.gallery
    return facts | {f"{name} images": part.describe() for name, part in parts.items() if part}


def _scores(run: ShownRun) -> dict[str, str]:
    """Formats a run's scores, Recall@1 with its interval first."""
    scores = {}
    if run.searches.interval:
        recall_and_bounds = "{:.3f} ({:.3f} to {:.3f})".format(*run.searches.interval)
        scores["head: recall@1 (95% interval)"] = recall_and_bounds
    for state in ("best", "final", "untrained"):
        for part, values in run.results.get(state, {}).items():
            for metric, value in values.items():
                scores[f"{state}, {part}: {metric}"] = f"{value:.4f}"
    return scores


def _curves(runs: Sequence[ShownRun]) -> str:
    """A figure of all logged numbers but `_NO_CURVES` over the steps, as a data URL; '' if none."""
    logged = {name for run in runs for line in run.metrics for name in line}
    titles = sorted(logged - _NO_CURVES, key=lambda name: (name != "loss", name))
    if not titles:
        return ""
    columns = min(len(titles), 4)
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows + 0.3), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, name in zip(panels, titles, strict=False):
        for run, colour in zip(runs, itertools.cycle(disk.COLOURS), strict=False):
            lines = [line for line in run.metrics if name in line]
            steps = [line["step"] for line in lines]
            values = [line[name] for line in lines]
            if name == "validation":  # Scores by part and metric.
                values = [next(iter(scores["head"].values())) for scores in values]
            axes.plot(steps, values, ".-", color=colour, label=run.name)
        is_share = "recall" in name or name == "validation"
        axes.grid(color="0.9")
        axes.ticklabel_format(useOffset=False)
        axes.locator_params(nbins=5)
        low, high = axes.get_ylim()
        axes.set_ylim(min(0, low), min(1, high) if is_share else high)
        axes.set_title(name.replace("_", " "), fontsize=9)
    for axes in panels[len(titles) :]:
        axes.set_axis_off()
    if len(runs) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "hypjax", "text.parse_math": False}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _data_url(file.getvalue(), "svg+xml")


def _searches(runs: Sequence[RunSearches], queries: int) -> list[tuple[dict, list[list[dict]]]]:
    """Queries to show, each with the hits of every run."""
    splits = runs[0].run.splits
    gallery = searched(splits)
    by_query = [{search.query: search for search in run.searches} for run in runs]

    def hits_of(search: Search) -> list[dict[str, Any]]:
        hits = zip(search.hits, search.right, search.distances, strict=True)
        return [_thumbnail(gallery, i, right=right, distance=f"{d:.3f}") for i, right, d in hits]

    return [
        (_thumbnail(splits.test, query), [hits_of(of_run[query]) for of_run in by_query])
        for query in _choose_queries(runs, queries)
    ]


def _choose_queries(runs: Sequence[RunSearches], count: int) -> list[int]:
    """Chooses failures of each run in turn, then successes; half of each if there are enough."""

    def confused(search: Search) -> frozenset[str]:  # Pairs of confused classes take turns.
        return frozenset(search.classes)

    failures = _alternating([in_turn(run.searches[: run.failures], confused) for run in runs])
    failed, succeeded = {*failures}, _alternating([run.searches[run.failures :] for run in runs])
    successes = [query for query in succeeded if query not in failed]
    return [*itertools.chain(*half_wrong(failures, successes, count))]


def _alternating(by_run: Sequence[Sequence[Search]]) -> list[int]:
    """The distinct queries of searches: the first search of each run, then each second, ..."""
    searches = itertools.chain(*itertools.zip_longest(*by_run))
    return list(dict.fromkeys(search.query for search in searches if search))


def _caption_searches(
    runs: Sequence[ShownRun], queries: int
) -> dict[str, tuple[int, int, list[tuple[dict, list[list[dict]]]]]]:
    """For each kind of query: the first run's failures, all searches, and queries to show."""
    opened = [run.captions for run in runs if run.captions]
    if len(opened) < len(runs):
        return {}
    images, texts, shown = runs[0].searches.run.splits.test, opened[0].texts, {}

    def picture(i: int, **marks: Any) -> dict[str, Any]:
        return _thumbnail(images, i, **marks)

    def text(i: int, **marks: Any) -> dict[str, Any]:
        return {"image": "", "label": texts[i], **marks}

    of_kinds = ("captions", text, picture), ("images", picture, text)
    for kind, show, show_hit in of_kinds:
        by_run = [run.by_text if kind == "captions" else run.by_image for run in opened]
        wrong, right = ([x.query for x in by_run[0] if x.right[0] == y] for y in (False, True))
        rows = []
        for i in itertools.chain(*half_wrong(wrong, right, queries)):
            searches = [zip(*of_run[i][1:4], strict=True) for of_run in by_run]
            hits = [[show_hit(j, distance=f"{d:.3f}", right=y) for j, d, y in x] for x in searches]
            rows.append((show(i), hits))
        shown[kind] = len(wrong), len(by_run[0]), rows
    return shown


def _thumbnail(images: Dataset, i: int, **marks: Any) -> dict[str, Any]:
    image = disk.read_rgb(images, i)
    image.thumbnail((80, 80))
    image.save(file := io.BytesIO(), "jpeg", quality=82)
    return {"image": _data_url(file.getvalue(), "jpeg"), "label": images.class_name(i), **marks}


def _data_url(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _disk(searches: RunSearches) -> dict[str, str]:
    """A run's disk, its rank correlations, relative δ, and the c that δ suggests."""
    run, images = searches.run, searches.run.splits.test
    title, chosen = disk.choose(f"{run.name}, test", len(images), _DISK_IMAGES, 0)
    points, images_by_title = searches.points[chosen], {title: images.take(chosen)}
    drawing = disk.drawing_of_images(
        run.method.fields["data.name"], images_by_title, lambda _: points
    )
    drawing, ranks = disk.place_in_disk(drawing, searches.space)
    disk.draw_disks(drawing, file := io.BytesIO())
    rank, plain_rank = (f"{value:.3f}" for value in ranks) if ranks else ("", "")
    facts = {"image": _data_url(file.getvalue(), "png"), "grouping": drawing.legend_title}
    facts |= {"rank": rank, "plain_rank": plain_rank, "delta": "", "curvature": ""}
    with contextlib.suppress(UserError):  # Too few points, or all are equal.
        features = np.asarray(spaces.features(searches.space, searches.points))
        key = jax.random.key(0)
        deltas = relative_delta(features, num_samples=_SAMPLES, num_trials=_TRIALS, key=key)
        mean = float(np.mean(deltas))
        facts |= {"delta": f"{mean:.3g}", "curvature": f"{curvature_from_delta(mean):.3g}"}
    return facts


def write_own_report(run: Experiment) -> bool:
    """Writes a finished run's report into its folder; returns whether that succeeded."""
    # One process cannot embed images while the others wait.
    if jax.process_count() > 1 or not len(run.splits.test):
        return False
    try:
        write_report([run], pathlib.Path(run.workdir) / REPORT)
    except UserError as error:
        console.warn(f"there is no report: {error}")
        return False
    return True
