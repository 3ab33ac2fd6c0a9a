"""Pictures of a search's hits."""

import pathlib
import textwrap
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from hypjax.errors import UserError
from hypjax.reports.hits import Hits

_COLOURS = {"right": "tab:green", "wrong": "tab:red", "": "none"}
_INCHES = 1.4  # Side of one image.
_LINE_INCHES = 0.12  # Height of a line of a title.
_LINE = 22  # Characters of a line.
_ROWS = 20  # Queries of a page.


def draw(
    found: Sequence[Hits], output: pathlib.Path, read: Callable[[str], Image.Image]
) -> list[pathlib.Path]:
    """Draws one row per query: the query, then its hits in green (right) or red (wrong) frames.

    Args:
        found: Hits of each query, equally many.
        output: File to write; its suffix selects the format. After 20 queries, the next page is
            drawn, to a file whose name ends in -2, and so on.
        read: From the path of an image to its pixels.

    Returns:
        The files written.

    Raises:
        UserError: A file cannot be written.
    """
    pages = [found[start : start + _ROWS] for start in range(0, len(found), _ROWS)]
    names = [f"{output.stem}-{number}" for number in range(2, len(pages) + 1)]
    files = [output, *(output.with_stem(name) for name in names)]
    for file, page in zip(files, pages, strict=True):
        try:
            with matplotlib.rc_context({"text.parse_math": False}):  # Paths may hold dollar signs.
                _grid(page, read).savefig(file)
        except OSError as error:
            raise UserError(f"cannot write to {file} ({error.strerror or error})") from error
        except ValueError as error:
            raise UserError(f"cannot draw {file}: {error}") from error
    return files


def _grid(found: Sequence[Hits], read: Callable[[str], Image.Image]) -> Figure:
    columns = 1 + len(found[0].paths)
    titles = [
        [
            _wrapped(f"query {hits.label}"),
            *(_wrapped(f"{d:.3f} {x}") for d, x in zip(hits.distances, hits.labels, strict=True)),
        ]
        for hits in found
    ]
    lines = [max(title.count("\n") + 1 for title in row) for row in titles]
    heights = [_INCHES + 0.2 + _LINE_INCHES * count for count in lines]
    figure = Figure(figsize=(_INCHES * columns, sum(heights)), layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), columns, squeeze=False, height_ratios=heights)
    for row, hits, title in zip(axes, found, titles, strict=True):
        _show(row[0], hits.query, title[0], "black", read)
        for i, axis in enumerate(row[1:]):
            _show(axis, hits.paths[i], title[i + 1], _COLOURS[hits.mark(i)], read)
    return figure


def _wrapped(title: str) -> str:
    return textwrap.fill(title.strip(), _LINE)


def _show(
    axis: Axes, path: str, title: str, colour: str, read: Callable[[str], Image.Image]
) -> None:
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=7)
    for side in axis.spines.values():
        side.set(color=colour, linewidth=3)
    try:
        thumbnail = read(path)
        thumbnail.thumbnail((256, 256))
        axis.imshow(thumbnail)
    except Exception:  # Moved or damaged since; the ranking is still worth showing.
        axis.text(0.5, 0.5, "not found", ha="center", va="center", transform=axis.transAxes)
