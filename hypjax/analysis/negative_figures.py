"""Figures of the negatives of anchors: their weights, and the hardest ones (HypMix)."""

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from hypjax.analysis.hit_grid import Picture, draw_rows, save
from hypjax.analysis.negatives_result import CARRIED, Anchor, Weighed, only_here

_LEAST = 1e-8  # Weights below are not drawn: they would stretch the axis over what matters.


def draw_curves(runs: Sequence[Weighed], output: pathlib.Path) -> None:
    """Draws mean weight, and cumulative weight, against the rank of the negative (Figure 3).

    Args:
        runs: The runs, one curve each.
        output: File to write; its suffix selects the format.

    Raises:
        UserError: The file cannot be written.
    """
    save(_curves(runs), output)


def _curves(runs: Sequence[Weighed]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    weight, cumulative = figure.subplots(1, 2)
    for run in runs:
        ranks = np.arange(1, len(run.curve) + 1)
        weight.plot(ranks, np.where(run.curve >= _LEAST, run.curve, np.nan), label=run.run)
        cumulative.plot(ranks, run.cumulative, label=run.run)
    cumulative.axhline(CARRIED, color="grey", linestyle="dashed", linewidth=1)
    weight.set(ylabel="mean weight p(x⁻)", yscale="log")
    cumulative.set(ylabel="cumulative weight", ylim=(0, 1.02), yticks=[0, 0.25, 0.5, 0.75, CARRIED])
    for axis in (weight, cumulative):
        axis.set(xlabel="rank of the negative, hardest first", xscale="log")
        axis.grid(alpha=0.3)
    for name in weight.legend().get_texts():
        name.set_parse_math(False)  # Names of folders may hold dollar signs.
    return figure


def draw_hardest(
    anchors: Sequence[Anchor],
    runs: Sequence[Weighed],
    output: pathlib.Path,
    read_anchor: Callable[[int], Image.Image],
    read_item: Callable[[int], Image.Image],
) -> list[pathlib.Path]:
    """Draws each anchor's hardest negatives, one row per run (Figure 1).

    Frames mark the negatives that no other run has among its own.

    Args:
        anchors: The anchors.
        runs: The runs.
        output: File to write; its suffix selects the format. It holds 20 rows or fewer, and further
            pages have names that end in -2, -3 and so on.
        read_anchor: From the index of an anchor to its pixels.
        read_item: From the index of an image that is searched to its pixels.

    Returns:
        The files written.

    Raises:
        UserError: A file cannot be written.
    """
    rows = []
    for place, anchor in enumerate(anchors):
        for i, run in enumerate(runs):
            title = run.run if i else f"{anchor.label}\n{run.run}"
            row = [Picture((read_anchor, anchor.index), title, "black")]
            found, only = run.hardest[place], only_here(runs, i, place)
            columns = zip(found.items, found.classes, found.weights, only, strict=True)
            for item, name, weight, alone in columns:
                colour = "tab:orange" if alone else "none"
                row.append(Picture((read_item, item), f"{name}\np {weight:#.3g}", colour))
            rows.append(row)
    return draw_rows(rows, output, lambda image: image[0](image[1]), together=len(runs))
