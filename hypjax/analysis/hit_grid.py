"""Images in figures: rows of pictures, such as a search's hits."""

import io
import itertools
import os
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from hypjax.data.pixels import read_image
from hypjax.errors import on_one_line, writing
from hypjax.inference.hits import Hits
from hypjax.system import console
from hypjax.system.files import replacing

_FRAMES = {"right": "tab:green", "wrong": "tab:red", "": "none"}  # Colours.
_INCHES = 1.4  # Side of one image.
_LINE_INCHES = 0.12  # Height of a line of a title.
_LINE = 22  # Characters of a line.
_ROWS = 20  # Rows of a page.
DPI = 160

File = pathlib.Path | io.BytesIO


class Picture(NamedTuple):
    """An image with its title, whose lines are wrapped, and its frame."""

    image: Any  # What the image is read from, such as its path; None for a title alone.
    title: str
    colour: str  # Of the frame, or "none".


def tolerant(read: Callable[[Any], Image.Image]) -> Callable[[Any], Image.Image]:
    """Makes a reader that replaces unreadable images by grey squares, and warns once."""
    warned = False

    def read_or_grey(image: Any) -> Image.Image:
        nonlocal warned
        try:
            return read(image)
        except Exception as error:  # Moved or damaged since; the rest is still worth showing.
            if not warned:
                console.warn(f"grey squares stand for images that were moved or damaged ({error})")
            warned = True
            grey = Image.new("RGB", (64, 64), "#ccc")
            ImageDraw.Draw(grey).text((32, 32), "missing", fill="#333", anchor="mm")
            return grey

    return read_or_grey


def draw(searches: Sequence[Hits], output: pathlib.Path) -> list[pathlib.Path]:
    """Draws one row per query: the query, then its hits in green (right) or red (wrong) frames."""
    rows = []
    for hits in searches:
        marks = map(hits.mark, range(len(hits.paths)))
        columns = zip(hits.paths, hits.labels, hits.distances, marks, strict=True)
        row = hit_row(hits.query, hits.label, columns)
        if not ("://" in hits.query or os.path.exists(hits.query)):  # Words.
            row[0] = Picture(None, on_one_line(hits.query), "black")
        rows.append(row)
    return draw_rows(rows, output, lambda path: read_image(path, 3))


def hit_row(image: Any, label: str, hits: Iterable[tuple[Any, str, float, str]]) -> list[Picture]:
    """Makes pictures of a query and its hits, each an image, label, distance and mark."""
    row = [Picture(image, f"query {on_one_line(label)}", "black")]
    for hit, name, distance, mark in hits:
        row.append(Picture(hit, f"{distance:.3f} {on_one_line(name)}", _FRAMES[mark]))
    return row


def draw_rows(
    rows: Sequence[Sequence[Picture]], output: pathlib.Path, read: Callable[[Any], Image.Image]
) -> list[pathlib.Path]:
    """Draws rows of pictures, 20 to a file; further files end in -2, -3, ..."""
    read = tolerant(read)
    files: list[pathlib.Path] = []
    for start in range(0, len(rows), _ROWS):
        with matplotlib.rc_context({"text.parse_math": False}):  # Paths may hold dollar signs.
            figure = _grid(rows[start : start + _ROWS], read)
        files.append(output.with_stem(f"{output.stem}-{len(files) + 1}") if files else output)
        save(figure, files[-1])
    return files


def save(figure: Figure, file: File) -> None:
    """Writes a figure to a file atomically; the file's suffix selects the format."""
    if isinstance(file, io.BytesIO):
        figure.savefig(file)
    else:
        with writing(file), replacing(file) as temporary:
            figure.savefig(temporary, format=file.suffix[1:])


def shortened(name: str, length: int) -> str:
    """Cuts a name to `length` characters."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _wrapped(picture: Picture) -> str:
    return "\n".join(textwrap.fill(line, _LINE) for line in picture.title.strip().split("\n"))


def _grid(rows: Sequence[Sequence[Picture]], read: Callable[[Any], Image.Image]) -> Figure:
    lines = [max(_wrapped(picture).count("\n") + 1 for picture in row) for row in rows]
    heights = [_INCHES + 0.2 + _LINE_INCHES * count for count in lines]
    width = max(map(len, rows))
    figure = Figure(figsize=(_INCHES * width, sum(heights)), layout="tight")
    axes = figure.subplots(len(rows), width, squeeze=False, height_ratios=heights)
    pairs = (itertools.zip_longest(*row) for row in zip(axes, rows, strict=True))
    for axis, picture in itertools.chain(*pairs):
        if picture is None:
            axis.set_axis_off()
            continue
        axis.set(xticks=[], yticks=[])
        for side in axis.spines.values():
            side.set(color=picture.colour, linewidth=3)
        if picture.image is None:
            axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            axis.text(0.5, 0.5, _wrapped(picture), fontsize=7, ha="center", va="center")
            continue
        axis.set_title(_wrapped(picture), fontsize=7)
        thumbnail = read(picture.image)
        thumbnail.thumbnail((256, 256))
        axis.imshow(thumbnail)
    return figure
