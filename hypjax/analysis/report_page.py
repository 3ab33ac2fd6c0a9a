"""The report of runs: one HTML page that opens from the disk."""

import datetime
import importlib.resources
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from hypjax import __version__
from hypjax.analysis.disk import COLOURS
from hypjax.analysis.hit_grid import data_url
from hypjax.geometry.learned import reported_names

# Metrics of the curves, and what they are called.
_CURVES = {
    "loss": "Loss",
    "batch_recall@1": "Recall@1 within the batch",
    "validation": "Recall@1 of the head, validation",
    "feature_norm": "Mean norm of the features",
    "embedding_norm": "Mean norm of the embeddings",
    "clipped_share": "Share of clipped features",
    "cone_loss": "Angle outside the own cone and inside others, in radians",
    "cone_inside": "Share of images in the cone of their coarse class",
    "cone_inside_others": "Share of images in another cone, on average",
    "cone_apex_norm": "Mean norm of the apexes' features",
    "gradient_norm": "Norm of the gradient",
    "images_per_second": "Images per second",
}
_STATES = {
    "untrained": "the model before its first step",
    "final": "the model after its last step",
    "best": "the model of the step that scored highest on the validation classes",
    "head": "the embedding that is trained, compared in the space of the loss",
    "encoder": "the embedding that enters the head, compared by its cosine",
}
_METRICS = {"map": "mAP", "map@r": "MAP@R", "r_precision": "R-precision", "mrr": "MRR"}
_DASHES = ("", "6 3", "2 2", "8 3 2 3")  # Of lines that share a colour.


class Shown(NamedTuple):
    """An image of a search in the page."""

    image: str  # Its pixels, as a data URL.
    label: str  # Its class.
    right: bool = True  # Whether it is of the query's class.
    distance: str = ""  # From the query.


class Log(NamedTuple):
    """What a run wrote while it was trained."""

    config: ConfigDict
    results: dict[str, Any] | None  # None until it is finished.
    lines: list[dict[str, Any]]  # Of metrics.jsonl.
    times: dict[str, Any]  # times.json; empty if there is none.
    warnings: list[str]


class Run(NamedTuple):
    """A run in the page."""

    name: str
    log: Log
    facts: Mapping[str, str]  # What it is, in words: its model, and numbers of images.
    fields: Mapping[str, Any]  # All fields of its configuration.
    changed: Sequence[str]  # Names of those that differ from the defaults.
    scores: Mapping[str, Mapping[str, Mapping[str, float]]]  # By state, part and metric.
    interval: tuple[float, float, float] | None  # Recall@1, recomputed, and its interval.
    published: str  # Published scores, and differences from these.
    notes: Sequence[str]  # Remarks on its results.
    disk: Mapping[str, str]  # What the page shows of its disk.


class Row(NamedTuple):
    """A row of a table with one column per run."""

    label: str
    cells: Sequence[Any]
    name: str = ""  # That of the label in files and flags.


def render(runs: Sequence[Run], groups: Sequence[Mapping[str, Any]]) -> str:
    """Renders the page; each group has the searches of runs that have the same test images."""
    fields = dict.fromkeys(field for run in runs for field in run.fields)
    rows = [Row(field, [run.fields.get(field, "") for run in runs]) for field in fields]
    facts = dict.fromkeys(fact for run in runs for fact in run.facts)
    same_images = len(groups) == 1
    source = importlib.resources.files("hypjax.analysis").joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        names=[run.name for run in runs],
        version=__version__,
        date=datetime.date.today().isoformat(),
        runs=runs,
        groups=groups,
        about=[Row(fact, [run.facts.get(fact, "") for run in runs]) for fact in facts]
        + [row for row in rows if any(cell != row.cells[0] for cell in row.cells)],
        fields=[row for row in rows if any(row.label in run.changed for run in runs)],
        meanings=_STATES,
        scores=_intervals(runs, same_images) + _scores(runs, same_images),
        same_images=same_images,
        keys=[(name, *_style(i)) for i, name in enumerate(run.name for run in runs)],
        curves=_curves(runs),
        times=_times(runs),
    )


def _scores(runs: Sequence[Run], same_images: bool) -> list[Row]:
    """A row for each score; of runs with the same test images, the best of each is marked."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for i, run in enumerate(runs):
        for state, parts in run.scores.items():
            for part, scores in parts.items():
                for metric, value in scores.items():
                    found.setdefault((state, part, metric), [math.nan] * len(runs))[i] = value
    rows = []
    for (state, part, metric), values in found.items():
        *place, name = metric.split("/")
        label = f"{', '.join([state, part, *place])}: {_METRICS.get(name, name.capitalize())}"
        marked = _marked(values, [f"{value:.4f}" for value in values], same_images)
        rows.append(Row(label, marked, metric))
    return rows


def _intervals(runs: Sequence[Run], same_images: bool) -> list[Row]:
    if not any(run.interval for run in runs):
        return []
    found = [run.interval or [math.nan] * 3 for run in runs]
    texts = ["{:.3f} ({:.3f} to {:.3f})".format(*each) for each in found]
    marked = _marked([each[0] for each in found], texts, same_images)
    return [Row("head: Recall@1 now, with its 95% interval", marked)]


def _marked(values: Sequence[float], texts: Sequence[str], same_images: bool) -> list[str]:
    """Texts of numbers, of which the largest stand out if they can be compared."""
    finite = [value for value in values if math.isfinite(value)]
    best = max(finite) if same_images and len(set(finite)) > 1 else math.nan
    pairs = [(v, text if math.isfinite(v) else "") for v, text in zip(values, texts, strict=True)]
    return [Markup("<strong>{}</strong>").format(t) if v == best else t for v, t in pairs]


def _times(runs: Sequence[Run]) -> list[Row]:
    seconds = [run.log.times.get("seconds", {}) for run in runs]
    parts = dict.fromkeys(part for each in seconds for part in each)
    return [Row(p, [f"{each[p]:.1f}" if p in each else "" for each in seconds]) for p in parts]


def _style(i: int) -> tuple[str, str]:
    """Colour and dashes of a run's curves."""
    return COLOURS[i % len(COLOURS)], _DASHES[i // len(COLOURS) % len(_DASHES)]


def _curves(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The curves of all metrics that a run has, learned numbers among them."""
    learned = {
        name: f"Learned {name}" for run in runs for name in reported_names(run.log.config.objective)
    }
    titles = {**_CURVES, **learned}
    return [curve for metric in titles if (curve := _curve(runs, metric, titles[metric]))]


def _curve(runs: Sequence[Run], metric: str, title: str) -> dict[str, str] | None:
    """The curves of a metric over the steps, one per run; None if no run has it."""
    figure = Figure(figsize=(3.3, 2.2), layout="constrained")
    axes = figure.subplots()
    shown = []
    for i, run in enumerate(runs):
        found = [(each["step"], _value(each[metric])) for each in run.log.lines if metric in each]
        if found:
            colour, dashes = _style(i)
            style = (0, [*map(int, dashes.split())]) if dashes else "-"
            axes.plot(*np.transpose(found), color=colour, linestyle=style, marker=".", markersize=4)
            shown += [value for _, value in found if math.isfinite(value)]
    if not axes.lines:
        return None
    axes.set_xlabel("step")
    axes.grid(color="0.9")
    axes.ticklabel_format(useOffset=False)
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.locator_params(axis="y", nbins=5)
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    margin = 0.05 * max(high - low, abs(high)) or 1
    axes.set_ylim(low - margin if metric == "loss" else 0, high + margin)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "hypjax"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    image = data_url(file.getvalue(), "svg+xml")
    return {"image": image, "title": title, "name": metric}


def _value(found: Any) -> float:
    """A metric's value; of scores, the head's first recall."""
    return float(next(iter(found["head"].values()))) if isinstance(found, Mapping) else float(found)
