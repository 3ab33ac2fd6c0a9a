"""Tables of finished runs, and figures of their scores against a field of their configurations."""

import itertools
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from hypjax.analysis.disk import COLOURS, MARKERS
from hypjax.analysis.hit_grid import save
from hypjax.config import default_workdir, flatten, load_config, read_config
from hypjax.errors import UserError, nearest
from hypjax.geometry.registry import unused_fields
from hypjax.runs import tables
from hypjax.runs.files import RESULTS, read_results
from hypjax.runs.workdir import require_identity, saved_config, saved_fingerprint
from hypjax.types import Recalls

_LINE = 30  # Characters of labels that fit below an axis.
_LOG_SPAN = 5  # Numbers that span a larger factor are drawn on a logarithmic axis.
# Fields that have no effect on a model or its recalls.
_LABELS = frozenset({"name", "variant", "eval.ks", "eval.metrics"})

Folders = Mapping[str, pathlib.Path]  # Of runs, by name or value.


class Run(NamedTuple):
    """A finished run, with the scores that all runs have of its best model, or else its last."""

    name: str
    folder: pathlib.Path
    config: ConfigDict
    validation: Recalls | None  # On the validation images, if there are any.
    test: Recalls

    def fields(self) -> dict[str, Any]:
        """The fields that its scores depend on, by dotted name."""
        unused = {f"objective.{name}" for name in unused_fields(self.config.objective)} | _LABELS
        fields = flatten(self.config).items()
        return {n: v for n, v in fields if n not in unused and not n.startswith("run.")}


Curve = dict[Any, list[Run]]  # Runs by their value of the swept field, in ascending order.


def default_folders(file: str, overrides: Sequence[str], field: str, values: list[str]) -> Folders:
    """The default folders of the runs with each value of a field."""
    folders = {}
    for value in values:
        config = load_config(file, [*overrides, f"{field}={value}"])
        folders[value] = pathlib.Path(default_workdir(config, read_config(file)))
        require_identity(folders[value], config)
    return folders


def require_finished(folders: Folders) -> None:
    """Raises an error if a run is not finished, or the runs were trained on different images."""
    for name, folder in folders.items():
        if read_results(folder / RESULTS) is None:
            raise UserError(f"no finished run in {name}: it has no results.json")
    for left, right in itertools.pairwise(folders):
        if saved_fingerprint(folders[left]) != saved_fingerprint(folders[right]):
            raise UserError(f"{left} and {right} have different images")


def read_runs(folders: Folders) -> list[Run]:
    """Reads the runs that are finished."""
    results = {n: x for n, folder in folders.items() if (x := read_results(folder / RESULTS))}
    held_out = {n: scores["validation"] for n, scores in results.items() if "validation" in scores}
    validation, test = _common(held_out), _common(results)
    return [
        Run(name, folders[name], saved_config(folders[name]), validation.get(name), test[name])
        for name in results
    ]


def _common(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Recalls]:
    """Scores of each run's best model, or else its last, by the metrics that all runs have."""
    scores = {name: of_run.get("best") or of_run["final"] for name, of_run in results.items()}
    parts = [values for recalls in scores.values() for values in recalls.values()]
    common = [name for name in parts[0] if all(name in part for part in parts)] if parts else []
    if parts and not any("/" in name or name.startswith("recall@") for name in common):
        raise UserError("these runs have no recall in common; evaluate them with the same eval.ks")
    return {
        run: {part: {name: values[name] for name in common} for part, values in recalls.items()}
        for run, recalls in scores.items()
    }


def print_tables(runs: Sequence[Run], field: str | None) -> None:
    """Prints recalls on validation images, to choose by, and on test images; averages seeds."""
    title, seeds = f"{field}, " if field else "", field == "seed"
    validation = {run.name: run.validation for run in runs if run.validation}
    test = {run.name: run.test for run in runs}
    if validation:
        print(f"{title}scores on the validation images:")
        print(tables.format_results(validation | (_spread(validation) if seeds else {})))
        same_classes = len(validation) == len(test) and not title.startswith("data.")
        if len(validation) > 1 and same_classes and not seeds:
            print(_choice(validation))
    report_only = " (to report, not to choose by)" if validation and not seeds else ""
    print(f"{title}scores on the test images{report_only}:")
    print(tables.format_results(test | (_spread(test) if seeds else {})))
    if field:
        print("folders:")
        print(tables.aligned([[run.name, str(run.folder)] for run in runs]))


def _choice(validation: Mapping[str, Recalls]) -> str:
    metric = tables.selecting(next(iter(validation.values()))["head"])
    scores = {name: recalls["head"][metric] for name, recalls in validation.items()}
    best = [name for name, score in scores.items() if score == max(scores.values())]
    verdict = f"{', '.join(best)}, by {metric} of the head on the validation images"
    if len(best) == 1:
        return f"best: {verdict}"
    return f"tie: {verdict}; take the default or the simplest of them"


def _spread(runs: Mapping[str, Recalls]) -> dict[str, Recalls]:
    """Mean and sample standard deviation of the scores over runs; {} for a single run."""
    statistic_of = {"mean": statistics.mean, "std": statistics.stdev} if len(runs) > 1 else {}
    return {
        name: {
            part: {k: statistic([run[part][k] for run in runs.values()]) for k in values}
            for part, values in next(iter(runs.values())).items()
        }
        for name, statistic in statistic_of.items()
    }


def draw(runs: Sequence[Run], field: str, output: pathlib.Path) -> None:
    """Draws the recalls of heads, at the smallest K, against a field of the runs.

    Runs that differ only in the seed are one point, their mean, with a bar from the lowest to the
    highest. Each combination of the other fields in which runs differ is a line.
    """
    drawn = curves(runs, field)
    values = sorted({value for curve in drawn.values() for value in curve}, key=_order)
    if len(texts := {*map(_text, values)}) < 2:
        raise UserError(f"a figure needs several values of {field}, not {[*texts] or 'none'}")
    # Values may hold dollar signs, and the legend may be wider than the panels.
    with matplotlib.rc_context({"text.parse_math": False, "savefig.bbox": "tight"}):
        save(_figure(drawn, values, field, tables.selecting(runs[0].test["head"])), output)


def curves(runs: Sequence[Run], field: str) -> dict[str, Curve]:
    """The lines by labels such as 'objective.space=sphere', the fields in which runs differ."""
    fields = [run.fields() for run in runs]
    for run, of_run in zip(runs, fields, strict=True):
        if field not in of_run:
            raise UserError(f"{field} does not affect {run.name}'s scores{nearest(field, of_run)}")
    names = dict.fromkeys(name for of_run in fields for name in of_run)
    values = {name: {of_run[name] for of_run in fields if name in of_run} for name in names}
    differing = [n for n in values if len(values[n]) > 1 and n not in (field, "seed")]

    def order(pair: tuple[Run, Mapping[str, Any]]) -> list[Any]:
        return [_order(pair[1].get(name)) for name in (*differing, field)]

    lines: dict[str, Curve] = {}
    for run, of_run in sorted(zip(runs, fields, strict=True), key=order):
        label = ", ".join(f"{name}={_text(of_run[name])}" for name in differing if name in of_run)
        lines.setdefault(label, {}).setdefault(of_run[field], []).append(run)
    return lines


def _order(value: Any) -> tuple[int, Any]:
    """Sorts numbers before other values."""
    return (0, value) if type(value) in (int, float) else (1, str(value))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _figure(drawn: Mapping[str, Curve], values: Sequence[Any], field: str, score: str) -> Figure:
    panels = {"test images (to report)": "test"}
    points = [of_value for curve in drawn.values() for of_value in curve.values()]
    if any(run.validation for run in itertools.chain(*points)):
        panels = {"validation images (to choose by)": "validation", **panels}
    height = 4 + 0.25 * math.ceil(len(drawn) / len(panels))  # The legend has a column per panel.
    figure = Figure(figsize=(4.8 * len(panels), height), dpi=150, layout="constrained")
    [axes] = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, part) in zip(axes, panels.items(), strict=True):
        positions = _horizontal(axis, values)
        # Yellow is too light for lines. Six colours and seven markers tell 42 lines apart.
        styles = zip(itertools.cycle(COLOURS[:-1]), itertools.cycle(MARKERS), strict=False)
        for (label, curve), (colour, marker) in zip(drawn.items(), styles, strict=False):
            rows = []
            for value, of_value in curve.items():
                recalls = [getattr(run, part) for run in of_value if getattr(run, part)]
                if scores := [recall["head"][score] for recall in recalls]:
                    mean = statistics.mean(scores)
                    rows.append((positions[value], mean, mean - min(scores), max(scores) - mean))
            x, mean, *bars = np.array(rows).reshape(-1, 4).T
            style = {"elinewidth": 1, "color": colour, "marker": marker, "label": label}
            axis.errorbar(x, mean, yerr=bars, clip_on=False, **style)
        low, high = axis.get_ylim()
        axis.set(title=title, xlabel=field, ylim=(max(low, 0), min(high, 1)))
    axes[0].set_ylabel(f"{score} of the head")
    if len(drawn) > 1:
        lines = axes[-1].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(panels), frameon=False)
    return figure


def _horizontal(axis: Axes, values: Sequence[Any]) -> dict[Any, float]:
    """Sets up the horizontal axis; returns the position of each value."""
    numbers = _order(values[-1])[0] == 0  # Other values are last.
    positions = dict(zip(values, values if numbers else range(len(values)), strict=True))
    if numbers and values[0] > 0 and values[-1] > _LOG_SPAN * values[0]:
        axis.set_xscale("log")
    labels = [_text(value) for value in values]
    rotation = 90 if len("".join(labels)) > _LINE else 0
    axis.set_xticks(list(positions.values()), labels, rotation=rotation)
    axis.set_xticks([], minor=True)
    axis.grid(color="0.9")
    axis.set_axisbelow(True)
    return positions
