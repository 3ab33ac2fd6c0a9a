"""The negatives of anchors and their weights, as text and as JSON."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hypjax.errors import on_one_line

CARRIED = 0.9  # The share of the weight whose negatives are counted.
HARDEST = (1, 10, 100)  # Numbers of negatives whose share of the weight is reported.
_QUANTILES = (0.1, 0.5, 0.9)
_POINTS = 200  # Ranks of a curve in a file.
_ABREAST = 3  # Runs side by side in a table.
_NAME = 24  # Characters of a class in a table.


class Hardest(NamedTuple):
    """The hardest negatives of an anchor in one run, nearest first.

    Attributes:
        items: Their indices among the images that are searched.
        classes: Names of their classes.
        distances: Their distances from the anchor.
        weights: Their weights, which over all negatives sum to 1.
    """

    items: list[int]
    classes: list[str]
    distances: list[float]
    weights: list[float]


class Weighed(NamedTuple):
    """What a run makes of the negatives of some anchors.

    Attributes:
        run: Name of the run.
        temperature: By what its loss divides distances.
        carriers: For each anchor, the least number of negatives that carry 90% of the weight.
        curve: Mean weight of the hardest negative, of the second hardest, and so on.
        hardest: The hardest negatives of each anchor that is shown.
    """

    run: str
    temperature: float
    carriers: Int[np.ndarray, " anchors"]
    curve: Float[np.ndarray, " ranks"]
    hardest: list[Hardest]

    @property
    def cumulative(self) -> Float[np.ndarray, " ranks"]:
        """Mean weight of the hardest negatives together, up to each rank."""
        return np.minimum(np.cumsum(self.curve), 1)

    def summary(self) -> dict[str, Any]:
        """Numbers over all anchors: negatives that carry 90%, and shares of the hardest."""
        cumulative = self.cumulative
        return {
            "carriers": {"mean": float(np.mean(self.carriers))}
            | {f"{q:.0%}": float(np.quantile(self.carriers, q)) for q in _QUANTILES},
            "shares": {n: float(cumulative[min(n, len(cumulative)) - 1]) for n in HARDEST},
        }


class Anchor(NamedTuple):
    """An anchor that is shown.

    Attributes:
        index: Its index among the test images.
        name: Its name in the dataset.
        label: Name of its class.
    """

    index: int
    name: str
    label: str


def only_here(runs: Sequence[Weighed], run: int, anchor: int) -> list[bool]:
    """Which of an anchor's hardest negatives in one run no other run has among its own."""
    others = [set(other.hardest[anchor].items) for i, other in enumerate(runs) if i != run]
    items = runs[run].hardest[anchor].items
    return [bool(others) and not any(item in other for other in others) for item in items]


def summary_table(runs: Sequence[Weighed]) -> str:
    """Returns one line per run: negatives that carry 90% of the weight, shares of the hardest."""
    width = max(len(run.run) for run in runs)
    summaries = [run.summary() for run in runs]
    counted, hardest = summaries[0]["carriers"], summaries[0]["shares"]
    lines = [
        f"{'':<{width}}{'carry 90% of the weight':>{9 * len(counted)}} | share of the hardest",
        " " * width
        + "".join(f"{n:>9}" for n in counted)
        + " |"
        + "".join(f"{n:>9}" for n in hardest),
    ]
    for run, found in zip(runs, summaries, strict=True):
        counts = "".join(f"{value:>9.1f}" for value in found["carriers"].values())
        shares = "".join(f"{value:>9.4f}" for value in found["shares"].values())
        lines.append(f"{run.run:<{width}}{counts} |{shares}")
    return "\n".join(lines)


def anchor_table(anchor: Anchor, runs: Sequence[Weighed], place: int) -> str:
    """Returns an anchor's hardest negatives in each run; * marks those of one run only.

    Args:
        anchor: The anchor.
        runs: The runs.
        place: Its place among the anchors that are shown.
    """
    columns = [_column(runs, i, place) for i in range(len(runs))]
    ranks = ["", "rank", *map(str, range(1, len(columns[0]) - 1))]
    lines = [on_one_line(f"anchor {anchor.index} ({anchor.name}), {anchor.label}")]
    for first in range(0, len(runs), _ABREAST):
        rows = zip(ranks, *columns[first : first + _ABREAST], strict=True)
        lines += [" | ".join([f"{rank:>4}", *cells]).rstrip() for rank, *cells in rows]
    return "\n".join(lines)


def _column(runs: Sequence[Weighed], run: int, place: int) -> list[str]:
    """The lines of a run in an anchor's table, equally long."""
    found = runs[run].hardest[place]
    names = map(on_one_line, found.classes)
    classes = [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in names]
    width = max(map(len, ["class", *classes]))
    head = f"{'image':>8}  {'class':<{width}}{'distance':>10}{'weight':>9} "
    lines = [f"{runs[run].run[-len(head) :]:<{len(head)}}", head]
    only = only_here(runs, run, place)
    rows = zip(found.items, classes, found.distances, found.weights, only, strict=True)
    for item, label, distance, weight, alone in rows:
        mark = "*" if alone else " "
        lines.append(f"{item:>8}  {label:<{width}}{distance:>10.4f}{weight:>9.5f}{mark}")
    return lines


def as_json(anchors: Sequence[Anchor], runs: Sequence[Weighed]) -> list[dict[str, Any]]:
    """Returns all numbers of each run; of its curve, those at 200 ranks, evenly by logarithm.

    Args:
        anchors: The anchors that are shown.
        runs: The runs.
    """
    return [_run_as_json(anchors, run) for run in runs]


def _run_as_json(anchors: Sequence[Anchor], run: Weighed) -> dict[str, Any]:
    ranks = np.unique(np.geomspace(1, len(run.curve), _POINTS).round().astype(int))
    return {
        "run": run.run,
        "temperature": run.temperature,
        **run.summary(),
        "carriers_of_anchors": run.carriers.tolist(),
        "curve": {
            "rank": ranks.tolist(),
            "weight": run.curve[ranks - 1].tolist(),
            "cumulative": run.cumulative[ranks - 1].tolist(),
        },
        "hardest": [
            {**anchor._asdict(), **hardest._asdict()}
            for anchor, hardest in zip(anchors, run.hardest, strict=True)
        ],
    }
