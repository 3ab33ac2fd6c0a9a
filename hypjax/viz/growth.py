"""How time and memory grow, drawn."""

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 4.2, 3.6  # Inches of a curve.


def draw(curves: Sequence[dict[str, Any]], output: pathlib.Path) -> None:
    """Draws each curve on logarithmic scales: time on the left axis, memory on the right one.

    Args:
        curves: Each with its work, what it grows with (of), sizes, seconds, memory and exponents.
        output: File to write; its ending says in which format.
    """
    figure = Figure(figsize=(_WIDTH * len(curves), _HEIGHT), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        axes.set(xscale="log", xlabel=curve["of"], title=curve["work"])
        _line(axes, curve, "seconds", 1, "seconds", "tab:blue", "o-")
        if all(curve["memory"]):
            _line(axes.twinx(), curve, "memory", 2**20, "MiB", "tab:orange", "s--")
    figure.savefig(output, dpi=120)


def _line(
    axes: Axes, curve: dict[str, Any], of: str, unit: int, label: str, colour: str, style: str
) -> None:
    exponent = curve["exponents"][of]
    words = label if exponent is None else f"{label} (exponent {exponent:.2f})"
    axes.plot(curve["sizes"], [value / unit for value in curve[of]], style, color=colour)
    axes.set_yscale("log")
    axes.set_ylabel(words, color=colour)
    axes.tick_params(axis="y", which="both", labelcolor=colour)
