"""Figures of sweeps: the score of several runs against one field of their configurations."""

import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from hypjax.analysis.hit_grid import save
from hypjax.config import flatten
from hypjax.errors import UserError, nearest
from hypjax.objectives import unused_fields

# Colours that colour-blind readers can tell apart (Okabe and Ito, 2008), without the yellow, which
# is too light for lines. With one marker fewer, the first 42 lines all look different.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINE = 30  # Characters of labels that fit below an axis.
_GAP = 1 / 12  # Part of a linear axis that must lie between values for all to be labelled.
_LOG_SPAN = 5  # Numbers that span a larger factor are drawn on a logarithmic axis.
# Fields that have no effect on a model or its recalls.
_LABELS = frozenset({"name", "variant", "eval.ks", "eval.metrics"})


class Run(NamedTuple):
    """A finished run, as a figure shows it.

    Attributes:
        name: Its name in messages.
        fields: The fields that its scores depend on, by dotted name.
        unused: Further fields, which have no effect on them.
        validation: Its score on the validation classes; None if there are none.
        test: Its score on the test classes.
    """

    name: str
    fields: Mapping[str, Any]
    unused: frozenset[str]
    validation: float | None
    test: float

    @classmethod
    def of(cls, name: str, config: ConfigDict, validation: float | None, test: float) -> Self:
        """The run with a configuration.

        Args:
            name: Its name in messages.
            config: The configuration, already validated.
            validation: Its score on the validation classes; None if there are none.
            test: Its score on the test classes.
        """
        fields = flatten(config)
        unused = {f"objective.{field}" for field in unused_fields(config.objective)}
        unused |= {field for field in fields if field in _LABELS or field.startswith("run.")}
        used = {field: value for field, value in fields.items() if field not in unused}
        return cls(name, used, frozenset(unused), validation, test)


Curve = dict[Any, list[Run]]  # Runs by their value of the swept field, in ascending order.


def draw(runs: Sequence[Run], field: str, score: str, output: pathlib.Path) -> None:
    """Draws scores against a field: on the validation classes, if there are any, and in tests.

    Runs that differ only in the seed are one point, their mean, with a bar from the lowest to the
    highest. Each combination of the other fields in which runs differ is a line.

    Args:
        runs: The runs, at least one.
        field: Dotted name of the field on the horizontal axis: logarithmic for positive numbers
            that span more than a factor of 5; categories for values that are no numbers.
        score: Name of the scores.
        output: File to write; its suffix selects the format.

    Raises:
        UserError: A run lacks the field, all runs have the same value of it, or the file cannot be
            written.
    """
    drawn = curves(runs, field)
    values = {_text(run.fields[field]) for run in runs}
    if len(values) < 2:
        raise UserError(
            f"a figure needs runs with several values of {field}, but all have {values.pop()}"
        )
    # Values may hold dollar signs, and the legend may be wider than the panels.
    with matplotlib.rc_context({"text.parse_math": False, "savefig.bbox": "tight"}):
        save(_figure(drawn, field, score), output)


def curves(runs: Sequence[Run], field: str) -> dict[str, Curve]:
    """Groups runs by the fields, other than the seed, in which they differ.

    Args:
        runs: The runs.
        field: The swept field, which does not count.

    Returns:
        The lines by their labels, such as 'objective.space=sphere'.

    Raises:
        UserError: A run lacks the swept field.
    """
    for run in runs:
        if field in run.unused:
            raise UserError(
                f"the scores of {run.name} do not depend on {field}; leave that run out"
            )
        if field not in run.fields:
            raise UserError(f"{run.name} has no field {field}{nearest(field, run.fields)}")
    differing = [name for name in _differing(runs) if name not in (field, "seed")]

    def order(run: Run) -> list[Any]:
        return [_order(run.fields.get(name)) for name in (*differing, field)]

    found: dict[str, Curve] = {}
    for run in sorted(runs, key=order):
        own = [name for name in differing if name in run.fields]
        label = ", ".join(f"{name}={_text(run.fields[name])}" for name in own)
        found.setdefault(label, {}).setdefault(run.fields[field], []).append(run)
    return found


def _differing(runs: Sequence[Run]) -> list[str]:
    """Fields with several values, among the runs that have them."""
    values: dict[str, set[Any]] = {}
    for run in runs:
        for field, value in run.fields.items():
            values.setdefault(field, set()).add(value)
    return [field for field, found in values.items() if len(found) > 1]


def _order(value: Any) -> tuple[int, Any]:
    """Sorts numbers before other values."""
    return (0, value) if _is_number(value) else (1, str(value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _figure(drawn: Mapping[str, Curve], field: str, score: str) -> Figure:
    panels: dict[str, Callable[[Run], float | None]] = {
        "validation classes (to choose by)": lambda run: run.validation,
        "test classes (to report)": lambda run: run.test,
    }
    everything = [run for curve in drawn.values() for found in curve.values() for run in found]
    if all(run.validation is None for run in everything):
        del panels["validation classes (to choose by)"]
    height = 4 + 0.25 * math.ceil(len(drawn) / len(panels))  # The legend has a column per panel.
    figure = Figure(figsize=(4.8 * len(panels), height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    [axes] = figure.subplots(1, len(panels), squeeze=False)
    values = sorted({run.fields[field] for run in everything}, key=_order)
    for axis, (title, score_of) in zip(axes, panels.items(), strict=True):
        place = _horizontal(axis, values)
        for curve, style in zip(drawn.values(), _styles(), strict=False):
            _line(axis, curve, place, score_of, style)
        axis.set(title=title, xlabel=field)
    axes[0].set_ylabel(f"{score} of the head")
    _legend(figure, axes[-1], drawn)
    return figure


def _styles() -> Iterator[dict[str, str]]:
    pairs = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    return ({"color": colour, "marker": marker} for colour, marker in pairs)


def _horizontal(axis: Axes, values: Sequence[Any]) -> dict[Any, float]:
    """Sets up the horizontal axis, and returns where on it each value is."""
    numbers = all(map(_is_number, values))
    places = dict(zip(values, values if numbers else range(len(values)), strict=True))
    if numbers and values[0] > 0 and values[-1] > _LOG_SPAN * values[0]:
        axis.set_xscale("log")
    steps = [right - left for left, right in itertools.pairwise(places.values())]
    linear = numbers and axis.get_xscale() == "linear"
    if not linear or min(steps) >= _GAP * sum(steps):
        labels = [_text(value) for value in values]
        rotation = 90 if len("".join(labels)) > _LINE else 0
        axis.set_xticks(list(places.values()), labels, rotation=rotation)
        axis.set_xticks([], minor=True)
    axis.grid(color="0.9")
    axis.set_axisbelow(True)
    return places


def _line(
    axis: Axes,
    curve: Curve,
    places: Mapping[Any, float],
    score_of: Callable[[Run], float | None],
    style: Mapping[str, str],
) -> None:
    """Draws the means of a line's points, with bars from the lowest to the highest score."""
    scores = {
        places[value]: [score for run in runs if (score := score_of(run)) is not None]
        for value, runs in curve.items()
    }
    scores = {place: found for place, found in scores.items() if found}
    means = [statistics.mean(found) for found in scores.values()]
    below = [mean - min(found) for mean, found in zip(means, scores.values(), strict=True)]
    above = [max(found) - mean for mean, found in zip(means, scores.values(), strict=True)]
    axis.errorbar(list(scores), means, yerr=[below, above], elinewidth=1, **style)


def _legend(figure: Figure, axis: Axes, drawn: Mapping[str, Curve]) -> None:
    """Names the lines below the panels, if there are several, and says what the bars are."""
    seeds = any(len(runs) > 1 for curve in drawn.values() for runs in curve.values())
    lines = list(zip(axis.containers, drawn, strict=True)) if len(drawn) > 1 else []
    if lines or seeds:
        figure.legend(
            [line for (line, *_), _ in lines],  # Without their bars.
            [label for _, label in lines],
            title="mean, and lowest to highest, over seeds" if seeds else None,
            loc="outside lower center",
            ncols=len(figure.axes),
            frameon=False,
        )
