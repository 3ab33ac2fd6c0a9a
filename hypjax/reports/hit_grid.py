"""A picture of a search's hits."""

import pathlib
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from hypjax.errors import UserError
from hypjax.reports.hits import Hits

_COLOURS = {"right": "tab:green", "wrong": "tab:red", "": "none"}
_INCHES = 1.4  # Side of one image.


def draw(found: Sequence[Hits], output: pathlib.Path) -> None:
    """Draws one row per query: the query, then its hits in green (right) or red (wrong) frames.

    Args:
        found: Hits of each query, equally many.
        output: File to write; its suffix selects the format.

    Raises:
        UserError: It cannot be written.
    """
    try:
        with matplotlib.rc_context({"text.parse_math": False}):  # Paths may contain dollar signs.
            _grid(found).savefig(output)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"cannot draw {output}: {error}") from error


def _grid(found: Sequence[Hits]) -> Figure:
    columns = 1 + len(found[0].paths)
    figure = Figure(figsize=(_INCHES * columns, (_INCHES + 0.3) * len(found)), layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), columns, squeeze=False)
    for row, hits in zip(axes, found, strict=True):
        _show(row[0], hits.query, f"query {hits.label}".strip(), "black")
        for i, axis in enumerate(row[1:]):
            title = f"{hits.distances[i]:.3f} {hits.labels[i]}".strip()
            _show(axis, hits.paths[i], title, _COLOURS[hits.mark(i)])
    return figure


def _show(axis: Axes, path: str, title: str, colour: str) -> None:
    axis.set(xticks=[], yticks=[])
    axis.set_title(title[:20], fontsize=7)
    for side in axis.spines.values():
        side.set(color=colour, linewidth=3)
    try:
        with Image.open(path) as image:
            thumbnail = ImageOps.exif_transpose(image).convert("RGB")
        thumbnail.thumbnail((256, 256))
        axis.imshow(thumbnail)
    except Exception:  # Moved or damaged since; the ranking is still worth showing.
        axis.text(0.5, 0.5, "not found", ha="center", va="center", transform=axis.transAxes)
