"""The report of runs: one HTML page that opens from the disk."""

import base64
import datetime
import importlib.resources
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from hypjax import __version__

_SECTIONS = (
    ("configuration", "Configuration"),
    ("results", "Results"),
    ("curves", "Training"),
    ("disk", "Disk"),
    ("searches", "Searches"),
    ("classes", "Classes"),
    ("time", "Time"),
)
# Panels of the curves: their titles and the metrics that they show.
_CURVES = {
    "loss": ("loss",),
    "recall@1 (validation: of the head)": ("batch_recall@1", "validation"),
    "mean norm": ("feature_norm", "embedding_norm"),
    "share of clipped features": ("clipped_share",),
    "norm of the gradient": ("gradient_norm",),
    "images per second": ("images_per_second",),
}
_THUMBNAIL = 80  # Pixels of the longer side.
_STYLES = ("-", "--", ":", "-.")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


class Shown(NamedTuple):
    """An image of a search in the page.

    Attributes:
        image: Its pixels, as a data URL.
        label: Its class.
        right: Whether it is of the query's class.
        distance: Its distance from the query.
    """

    image: str
    label: str
    right: bool = True
    distance: str = ""


class ShownSearch(NamedTuple):
    """A query and its hits in the page."""

    query: Shown
    hits: list[Shown]
    failed: bool


def render(
    runs: Sequence[Mapping[str, Any]],
    configurations: Mapping[str, Mapping[str, Any]],
    lines: Mapping[str, Sequence[Mapping[str, Any]]],
    times: Mapping[str, Mapping[str, Any]],
) -> str:
    """Renders the page.

    Args:
        runs: What the template shows of each run.
        configurations: Fields of each run, by its name.
        lines: Lines of metrics.jsonl of each run.
        times: times.json of each run.
    """
    names = list(configurations)
    source = importlib.resources.files("hypjax.reports").joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        title=f"Report: {', '.join(names)}",
        version=__version__,
        date=datetime.date.today().isoformat(),
        sections=_SECTIONS,
        runs=runs,
        differences=_differences(configurations),
        curves=_curves(lines),
        times=_times(times),
    )


def _differences(
    configurations: Mapping[str, Mapping[str, Any]],
) -> list[tuple[str, list[Any]]]:
    fields = dict.fromkeys(f for fields in configurations.values() for f in fields)
    rows = [(f, [fields.get(f, "") for fields in configurations.values()]) for f in fields]
    return [(field, values) for field, values in rows if any(v != values[0] for v in values)]


def _times(times: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    seconds = [each.get("seconds", {}) for each in times.values()]
    parts = dict.fromkeys(part for each in seconds for part in each)
    return [(p, [f"{each[p]:.1f}" if p in each else "" for each in seconds]) for p in parts]


def thumbnail(image: Image.Image) -> str:
    """Returns a small copy of an image as a data URL."""
    small = image.copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "jpeg", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def data_url(content: bytes, kind: str) -> str:
    """Returns a file of an image type, such as png, as a data URL."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def number(value: float, digits: int = 3) -> str:
    """Returns a number with so many digits; '' if it is not finite."""
    return f"{value:.{digits}g}" if math.isfinite(value) else ""


def _curves(lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """One figure with a panel for each group of metrics that any run has."""
    known = {name for own in lines.values() for line in own for name in line}
    panels = {title: [m for m in metrics if m in known] for title, metrics in _CURVES.items()}
    panels = {title: metrics for title, metrics in panels.items() if metrics}
    if not panels:
        return []
    rows = -(-len(panels) // 3)
    figure = Figure(figsize=(12, 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 3, squeeze=False).ravel()
    for axes, (title, metrics) in zip(grid, panels.items(), strict=False):
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(color="0.9")
        for colour, (name, own) in zip(_COLOURS * len(lines), lines.items(), strict=False):
            for style, metric in zip(_STYLES, metrics, strict=False):
                points = [(line["step"], _value(line[metric])) for line in own if metric in line]
                if points:
                    label = metric if len(lines) == 1 else f"{name}: {metric}"
                    axes.plot(*np.transpose(points), style, color=colour, label=label)
        if len(metrics) > 1 or len(lines) > 1:
            with matplotlib.rc_context({"text.parse_math": False}):
                axes.legend(fontsize=8)
    for axes in grid[len(panels) :]:
        axes.axis("off")
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "hypjax"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    shown = ", ".join(panels)
    return [
        {
            "image": data_url(file.getvalue(), "svg+xml"),
            "alt": f"Curves over the steps of {', '.join(lines)}: {shown}",
            "caption": "Measured every few steps (run.log_every) and at each validation.",
        }
    ]


def _value(found: Any) -> float:
    """A metric's value; of scores, the head's first recall."""
    return float(next(iter(found["head"].values()))) if isinstance(found, Mapping) else float(found)
