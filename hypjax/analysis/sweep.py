"""Tables of finished runs, and figures of their scores against a field of their configurations."""

import contextlib
import functools
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hypjax.analysis.disk import COLOURS, MARKERS
from hypjax.analysis.hit_grid import save
from hypjax.config import default_workdir, flatten, load_config, read_config
from hypjax.errors import UserError, nearest
from hypjax.geometry.registry import unused_fields
from hypjax.runs import tables
from hypjax.runs.files import RESULTS, read_metrics, read_object
from hypjax.runs.workdir import require_identity, saved_config, saved_fingerprint
from hypjax.types import Recalls

_LINE_LENGTH = 30  # Characters of labels that fit below an axis.
_LOG_SPAN = 5  # Numbers that span a larger factor are drawn on a logarithmic axis.
# Fields without effect on a model or its recalls.
_LABELS = frozenset({"name", "variant", "eval.ks", "eval.metrics"})
_TEMPERATURE = "objective.temperature"
# Names of losses, or their ends, whose temperature divides distances.
_OF_DISTANCES = "pairwise_cross_entropy", "captions", "proxy_nca"

Folders = Mapping[str, pathlib.Path]  # Folders of runs, by the run's name or swept value.


class FinishedRun(NamedTuple):
    """A finished run, with scores of its best or else last model in the metrics of all runs."""

    name: str
    folder: pathlib.Path
    settings: Mapping[str, Any]  # All fields of its configuration, by dotted name.
    validation: Recalls | None  # Scores on the validation images, if there are any.
    test: Recalls

    def fields(self) -> dict[str, Any]:
        """The fields that affect the scores, by dotted name."""
        return _used(self.settings)


Lines = Mapping[str, Sequence[FinishedRun]]  # Runs of a figure, by the first part of a label.
Score = Callable[[FinishedRun], float | None]  # A run's height in a panel.
Curve = dict[Any, list[FinishedRun]]  # Runs by their value of the swept field, ascending.


def _used(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in settings if name.startswith("objective.")]
    objective = {name.partition(".")[2]: settings[name] for name in names}
    unused = {f"objective.{name}" for name in unused_fields(objective)} | _LABELS
    return {n: v for n, v in settings.items() if n not in unused and not n.startswith("run.")}


def default_folders(file: str, overrides: Sequence[str], field: str, values: list[str]) -> Folders:
    """The default folders of the runs with each value of a field."""
    folders = {}
    for value in values:
        config = load_config(file, [*overrides, f"{field}={value}"])
        folders[value] = pathlib.Path(default_workdir(config, read_config(file)))
        require_identity(folders[value], flatten(config))
    return folders


def folders_like(model: str, varied: Sequence[str]) -> Folders:
    """The finished runs beside a run, itself included, that differ from it only in some fields.

    They have the same images. A field that only one of two runs uses, such as the curvature of a
    ball beside a sphere, is no difference.
    """
    folder = pathlib.Path(model).expanduser()
    require_finished({model: folder})
    settings = flatten(saved_config(folder))
    for field in varied:
        if field not in settings:
            raise UserError(f"{model} has no field {field}{nearest(field, settings)}")
    folders = {}
    for other in sorted(path.parent for path in folder.parent.glob(f"*/{RESULTS}")):
        with contextlib.suppress(UserError):  # Of another version, or damaged.
            used = _used(flatten(saved_config(other)))
            common = used.keys() & _used(settings).keys() - {*varied, "data.path"}
            same_images = saved_fingerprint(other) == saved_fingerprint(folder)
            if same_images and all(used[name] == settings[name] for name in common):
                folders[str(other)] = other
    return folders


def require_finished(folders: Folders) -> None:
    """Raises a `UserError` if a run is not finished, or the runs have different images."""
    for name, folder in folders.items():
        if (results := read_object(folder / RESULTS)) is None:
            raise UserError(f"no finished run in {name}: it has no results.json")
        if not results["final"]:
            raise UserError(f"{name} has no scores to compare: it was {results['notes'][0]}")
    for left, right in itertools.pairwise(folders):
        if saved_fingerprint(folders[left]) != saved_fingerprint(folders[right]):
            problem = f"{left} and {right} have different images"
            raise UserError(f"{problem}; compare runs on the same images")


def read_runs(folders: Folders) -> list[FinishedRun]:
    """Reads the finished runs among the folders."""
    by_folder = {name: read_object(folder / RESULTS) for name, folder in folders.items()}
    results = {name: of_run for name, of_run in by_folder.items() if of_run and of_run["final"]}
    validated = {name: x["validation"] for name, x in results.items() if "validation" in x}
    validation = _common_scores(validated)
    settings = {name: flatten(saved_config(folders[name])) for name in results}
    return [
        FinishedRun(name, folders[name], settings[name], validation.get(name), test)
        for name, test in _common_scores(results).items()
    ]


def _common_scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Recalls]:
    """Scores of each run's best model, or else its last, in the metrics that all runs have."""
    scores = {name: of_run.get("best") or of_run["final"] for name, of_run in results.items()}
    if not scores:
        return {}
    parts = [values for recalls in scores.values() for values in recalls.values()]
    common = [metric for metric in parts[0] if all(metric in values for values in parts)]
    if not any("/" in metric or metric.startswith("recall@") for metric in common):
        raise UserError("these runs have no recall in common; evaluate them with the same eval.ks")
    return {
        run: {part: {name: values[name] for name in common} for part, values in recalls.items()}
        for run, recalls in scores.items()
    }


def print_tables(runs: Sequence[FinishedRun], field: str | None) -> None:
    """Prints scores on validation images, to choose by, and on test images; averages seeds."""
    title = f"{field}, " if field else ""
    validation = {run.name: run.validation for run in runs if run.validation}
    test = {run.name: run.test for run in runs}
    comparable = len(validation) == len(test) > 1 and not (field or "").startswith("data.")
    if field == "seed":  # No seed is chosen.
        validation |= _mean_and_std(validation)
        test |= _mean_and_std(test)
    if validation:
        print(f"{title}scores on the validation images:")
        print(tables.format_results(validation))
        if comparable and field != "seed":
            print(_verdict(validation))
    report_only = " (to report, not to choose by)" if validation and field != "seed" else ""
    print(f"{title}scores on the test images{report_only}:")
    print(tables.format_results(test))
    if field:
        print("folders:")
        print(tables.aligned([[run.name, str(run.folder)] for run in runs]))


def _verdict(validation: Mapping[str, Recalls]) -> str:
    """Names the best run on the validation images, or the runs that tie."""
    metric = tables.selection_metric(next(iter(validation.values()))["head"])
    scores = {name: recalls["head"][metric] for name, recalls in validation.items()}
    best = [name for name, score in scores.items() if score == max(scores.values())]
    verdict = f"{', '.join(best)}, by {metric} of the head on the validation images"
    if len(best) == 1:
        return f"best: {verdict}"
    return f"tie: {verdict}; take the default or the simplest of them"


def _mean_and_std(runs: Mapping[str, Recalls]) -> dict[str, Recalls]:
    """Mean and sample standard deviation of the scores over runs; {} for a single run."""
    if len(runs) < 2:
        return {}
    mean, std = {}, {}
    for part, values in next(iter(runs.values())).items():
        samples = {name: [run[part][name] for run in runs.values()] for name in values}
        mean[part] = {name: statistics.mean(x) for name, x in samples.items()}
        std[part] = {name: statistics.stdev(x) for name, x in samples.items()}
    return {"mean": mean, "std": std}


def draw(lines: Lines, field: str, output: pathlib.Path, metric: str | None = None) -> None:
    """Draws the recalls of heads, at the smallest K, against a field of the runs.

    Runs that differ only in the seed share a point, their mean, with a bar from the lowest to the
    highest score. Each combination of the other fields in which runs differ has a line. A `metric`
    of training, averaged over the steps, may stand in place of the recalls.

    Losses of distances divide 2 − 2cos on the sphere, twice the cosine's distance from 1, by their
    temperature. Beside runs in other spaces it is drawn at half of it: the cosine's.
    """
    runs = [*itertools.chain(*lines.values())]
    halved = field == _TEMPERATURE and len({run.settings["objective.space"] for run in runs}) > 1
    drawn = {
        ", ".join(filter(None, (name, label))): curve
        for name, of_line in lines.items()
        for label, curve in curves(of_line, field, halved=halved).items()
    }
    values = sorted({value for curve in drawn.values() for value in curve}, key=_sort_key)
    texts = {*map(_text, values)}
    if len(texts) < 2:
        raise UserError(f"a figure needs several values of {field}, not {[*texts] or 'none'}")
    label = f"{field} (on the sphere, of the cosine)" if halved else field
    # Values may hold dollar signs, and the legend may be wider than the panels.
    with matplotlib.rc_context({"text.parse_math": False, "savefig.bbox": "tight"}):
        save(_figure(drawn, values, label, _panels(runs, metric)), output)


def mean_metrics(runs: Sequence[FinishedRun], metric: str) -> dict[str, float]:
    """A metric of training by run, averaged over the steps; runs that lack it are left out."""
    logged = {run.name: read_metrics(run.folder) for run in runs}
    values = {
        name: {line["step"]: line[metric] for line in lines if line.get(metric) is not None}
        for name, lines in logged.items()
    }
    if not any(values.values()):
        names = {name for lines in logged.values() for line in lines for name in line}
        raise UserError(f"no run logged {metric}{nearest(metric, names)}")
    means = {}
    for name, by_step in values.items():
        if by_step:  # Each line is the mean of the steps since the last one.
            steps, means_of_steps = zip(*sorted(by_step.items()), strict=True)
            weights = np.diff(steps, prepend=0)
            means[name] = float(np.average(means_of_steps, weights=weights))
    return means


def print_means(runs: Sequence[FinishedRun], metric: str) -> None:
    """Prints a metric of training by run, averaged over the steps."""
    print(f"{metric}, mean over the steps of training:")
    means = mean_metrics(runs, metric)
    print(tables.aligned([[name, f"{mean:.6g}"] for name, mean in means.items()]))


def _panels(runs: Sequence[FinishedRun], metric: str | None) -> dict[tuple[str, str], Score]:
    """What each panel shows, by its title and the label of its vertical axis."""
    if metric:
        means = mean_metrics(runs, metric)
        return {("mean over the steps of training", metric): lambda run: means.get(run.name)}
    recall = tables.selection_metric(runs[0].test["head"])
    titles = {"validation": "validation images (to choose by)", "test": "test images (to report)"}

    def score(run: FinishedRun, split: str) -> float | None:
        return (getattr(run, split) or {}).get("head", {}).get(recall)

    return {
        (title, f"{recall} of the head"): functools.partial(score, split=split)
        for split, title in titles.items()
        if any(getattr(run, split) for run in runs)
    }


def curves(runs: Sequence[FinishedRun], field: str, *, halved: bool = False) -> dict[str, Curve]:
    """Lines of a figure by label: the other fields in which runs differ, as in 'objective.c=1'.

    With `halved`, temperatures that divide the sphere's squared distances are halved.
    """
    fields = [run.fields() for run in runs]
    for run, run_fields in zip(runs, fields, strict=True):
        if field not in run_fields:
            did_you_mean = nearest(field, run_fields)
            raise UserError(f"{field} does not affect {run.name}'s scores{did_you_mean}")
    values_by_field: dict[str, set[Any]] = {}
    for name, value in itertools.chain.from_iterable(run_fields.items() for run_fields in fields):
        values_by_field.setdefault(name, set()).add(value)
    differing = [n for n, x in values_by_field.items() if len(x) > 1 and n not in (field, "seed")]

    def order(run_and_fields: tuple[FinishedRun, Mapping[str, Any]]) -> list[Any]:
        return [_sort_key(run_and_fields[1].get(name)) for name in (*differing, field)]

    lines: dict[str, Curve] = {}
    for run, run_fields in sorted(zip(runs, fields, strict=True), key=order):
        labels = [f"{name}={_text(run_fields[name])}" for name in differing if name in run_fields]
        value = run_fields[field]
        if halved and run_fields["objective.space"] == "sphere":
            value /= 2 if run_fields["objective.name"].endswith(_OF_DISTANCES) else 1
        lines.setdefault(", ".join(labels), {}).setdefault(value, []).append(run)
    return lines


def _sort_key(value: Any) -> tuple[int, Any]:
    """Sorts numbers before other values."""
    return (0, value) if type(value) in (int, float) else (1, str(value))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _figure(
    lines: Mapping[str, Curve],
    values: Sequence[Any],
    field: str,
    panels: Mapping[tuple[str, str], Score],
) -> Figure:
    height = 4 + 0.25 * math.ceil(len(lines) / len(panels))  # The legend has a column per panel.
    figure = Figure(figsize=(4.8 * len(panels), height), dpi=150, layout="constrained")
    [axes] = figure.subplots(1, len(panels), squeeze=False)
    for axis, ((title, _), score) in zip(axes, panels.items(), strict=True):
        positions = _horizontal(axis, values)
        # Yellow is too light for lines. Six colours and seven markers tell 42 lines apart.
        styles = zip(itertools.cycle(COLOURS[:-1]), itertools.cycle(MARKERS), strict=False)
        for (label, curve), (colour, marker) in zip(lines.items(), styles, strict=False):
            points = []  # Position, mean score, and distances to the lowest and highest score.
            for value, runs in curve.items():
                if scores := [one for run in runs if (one := score(run)) is not None]:
                    mean = statistics.mean(scores)
                    points.append((positions[value], mean, mean - min(scores), max(scores) - mean))
            x, means, *bars = np.array(points).reshape(-1, 4).T
            draw_line = functools.partial(axis.errorbar, elinewidth=1, clip_on=False, label=label)
            draw_line(x, means, yerr=bars, color=colour, marker=marker)
        low, high = axis.get_ylim()
        low = max(low, 0) if axis.dataLim.y0 >= 0 else low
        top = min(high, 1) if axis.dataLim.y1 <= 1 else high  # A recall's axis ends at 1.
        axis.set(title=title, xlabel=field, ylim=(low, top))
    axes[0].set_ylabel(next(iter(panels))[1])
    if len(lines) > 1:
        entries = axes[-1].get_legend_handles_labels()
        figure.legend(*entries, loc="outside lower center", ncols=len(panels), frameon=False)
    return figure


def _horizontal(axis: Axes, values: Sequence[Any]) -> dict[Any, float]:
    """Sets up the horizontal axis; returns the position of each value."""
    all_numbers = _sort_key(values[-1])[0] == 0  # Other values are sorted after numbers.
    positions = dict(zip(values, values if all_numbers else range(len(values)), strict=True))
    if all_numbers and values[0] > 0 and values[-1] > _LOG_SPAN * values[0]:
        axis.set_xscale("log")
    labels = [_text(value) for value in values]
    rotation = 90 if len("".join(labels)) > _LINE_LENGTH else 0
    axis.set_xticks(list(positions.values()), labels, rotation=rotation)
    axis.set_xticks([], minor=True)
    axis.grid(color="0.9")
    axis.set_axisbelow(True)
    return positions
