"""How embeddings spread, before and after training, as text, as JSON and as a figure."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hypjax.analysis.hit_grid import save

_SHARES = (0.9, 0.99)  # Of the variance, for which components are counted.
_SAME, _OTHER = "#0072B2", "#E69F00"  # Colour-blind readers can tell them apart.


class Similarities(NamedTuple):
    """Similarities of all pairs of images, 1 − distance / 2, which is the cosine on the sphere.

    Attributes:
        edges: Ends of the intervals in which pairs are counted, from the least similarity to the
            largest.
        same: Number of pairs of one class in each interval.
        other: Number of pairs of different classes.
        mean_same: Mean similarity of two images of one class.
        mean_other: Mean similarity of two images of different classes.
    """

    edges: Float[np.ndarray, " bins+1"]
    same: Int[np.ndarray, " bins"]
    other: Int[np.ndarray, " bins"]
    mean_same: float
    mean_other: float

    @property
    def shares(self) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, " bins"]]:
        """Share of the pairs in each interval, of those of one class and of different classes."""
        return self.same / self.same.sum(), self.other / self.other.sum()

    @property
    def overlap(self) -> float:
        """Common area of the two histograms: 1 if they are equal, 0 if they are apart."""
        return float(np.minimum(*self.shares).sum())


class Spread(NamedTuple):
    """How the embeddings of a model spread.

    Attributes:
        energy: Share of the variance in the first principal components, by their number from 1.
        similarities: Similarities of all pairs.
    """

    energy: Float[np.ndarray, " dim"]
    similarities: Similarities

    def components(self, share: float) -> int:
        """Least number of principal components that hold a share of the variance."""
        return int(np.searchsorted(self.energy, share * (1 - 1e-12)) + 1)


class Run(NamedTuple):
    """A run in a report.

    Attributes:
        name: Its name.
        before: The model before training.
        after: The trained model.
    """

    name: str
    before: Spread
    after: Spread


def table(runs: Sequence[Run]) -> str:
    """Returns two lines per run, before and after training."""
    width = max(len("run"), *(len(run.name) for run in runs))
    heads = [f"components for {share:.0%}" for share in _SHARES]
    heads += ["mean similarity: same class", "other classes", "overlap"]
    lines = [f"{'run':<{width}}  {'state':<9}  " + "  ".join(heads)]
    for run in runs:
        for state, spread in (("untrained", run.before), ("trained", run.after)):
            found = spread.similarities
            cells = [str(spread.components(share)) for share in _SHARES]
            numbers = (found.mean_same, found.mean_other, found.overlap)
            cells += [f"{number:.4f}" for number in numbers]
            row = [f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True)]
            lines.append(f"{run.name:<{width}}  {state:<9}  " + "  ".join(row))
    return "\n".join(lines)


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns all numbers of each run."""
    return [
        {"run": run.name, "untrained": _spread(run.before), "trained": _spread(run.after)}
        for run in runs
    ]


def _spread(spread: Spread) -> dict[str, Any]:
    found = spread.similarities
    return {
        "cumulative_energy": spread.energy.tolist(),
        "components": {f"{share:.0%}": spread.components(share) for share in _SHARES},
        "similarity": {
            "edges": found.edges.tolist(),
            "pairs_of_one_class": found.same.tolist(),
            "pairs_of_different_classes": found.other.tolist(),
            "mean_of_one_class": float(found.mean_same),
            "mean_of_different_classes": float(found.mean_other),
            "overlap": found.overlap,
        },
    }


def draw(runs: Sequence[Run], output: pathlib.Path) -> None:
    """Draws the cumulative energy of all runs, and each run's histograms of similarity.

    Args:
        runs: The runs.
        output: File to write; its suffix selects the format.

    Raises:
        UserError: The file cannot be written.
    """
    panels = 1 + len(runs)
    columns = min(panels, 3)
    rows = -(-panels // columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    energy, *others = figure.subplots(rows, columns, squeeze=False).ravel()
    _draw_energy(energy, runs)
    for axes, run in zip(others, runs, strict=False):
        _draw_similarities(axes, run)
    for axes in others[len(runs) :]:
        axes.set_axis_off()
    shown = others[0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=4, frameon=False)
    save(figure, output)


def _draw_energy(axes: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs):
        for spread, style in ((run.before, "dashed"), (run.after, "solid")):
            numbers = np.arange(1, len(spread.energy) + 1)
            label = run.name if style == "solid" else None
            axes.plot(numbers, spread.energy, color=f"C{i}", linestyle=style, label=label)
    axes.plot([], [], color="grey", linestyle="dashed", label="untrained")
    axes.set(xscale="log", ylim=(0, 1.02))
    axes.set(xlabel="principal components", ylabel="cumulative share of the variance")
    axes.grid(alpha=0.3)
    for name in axes.legend(fontsize=8).get_texts():
        name.set_parse_math(False)  # Names of folders may hold dollar signs.


def _draw_similarities(axes: Axes, run: Run) -> None:
    names = (("same class", _SAME), ("different classes", _OTHER))
    for spread, trained in ((run.before, False), (run.after, True)):
        edges = spread.similarities.edges
        for shares, (name, colour) in zip(spread.similarities.shares, names, strict=True):
            style = {"color": colour, "fill": trained, "alpha": 0.5 if trained else 1.0}
            label = name if trained else f"{name}, untrained"
            axes.stairs(shares, edges, label=label, linestyle="solid" if trained else ":", **style)
    axes.set(xlabel="similarity (1 − distance / 2)", ylabel="share of the pairs", yticks=[])
    axes.set_title(run.name, fontsize=10, parse_math=False)
