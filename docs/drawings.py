"""Draws the system: what happens to an image or a text on its way to a loss or a search.

Writes system.svg:
    python docs/drawings.py docs/system.svg
"""

import pathlib
import sys
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, BOX_HEIGHT, GAP, MARGIN = 536, 62, 20, 20


class Box(NamedTuple):
    """A stage: its name, what it does, and the files of `hypjax/` that do it."""

    name: str
    does: str
    files: tuple[str, ...]
    colour: str = "#eef1fb"


TOWERS = Box("towers", "encoder and head: features", ("models/embedder.py", "training/towers.py"))
SHARED = (
    Box("images or texts", "a folder, a table, records, arrays, captions", ("data/opening.py",)),
    Box("table", "one row per image: name, class, split, bytes", ("data/dataset.py",)),
    Box("plan", "rows and crops: a function of seed and step", ("data/plans.py", "data/views.py")),
    Box("batch", "pixels or tokens, read and cropped", ("data/pipeline.py", "types.py")),
    TOWERS,
    Box(
        "points",
        "the space embeds features, with its curvature",
        ("geometry/spaces.py",),
        "#fdf3dc",
    ),
)
TRAINED = (
    Box("loss", "distances of the space", ("objectives/", "training/step.py"), "#fbe9e7"),
    Box("update", "of weights and curvature", ("training/optim.py",), "#fbe9e7"),
)
SEARCHED = (
    Box("gallery", "points with names", ("galleries/embeddings.py",), "#e6f4ea"),
    Box("search", "exact nearest points", ("retrieval/neighbors.py",), "#e6f4ea"),
)


def system() -> str:
    """The drawing, as SVG."""
    parts, full, half = [], WIDTH - 2 * MARGIN, (WIDTH - 3 * MARGIN) / 2
    step = BOX_HEIGHT + GAP
    for row, box in enumerate(SHARED):
        parts += draw(box, MARGIN, MARGIN + row * step, full)
        if row:
            parts.append(arrow(WIDTH / 2, MARGIN + row * step - GAP))
    for column, boxes in enumerate((TRAINED, SEARCHED)):
        left = MARGIN + column * (half + MARGIN)
        for row, box in enumerate(boxes, len(SHARED)):
            parts += draw(box, left, MARGIN + row * step, half)
            parts.append(arrow(left + half / 2, MARGIN + row * step - GAP))
    height = MARGIN + (len(SHARED) + len(TRAINED)) * step - GAP + MARGIN
    parts.append(feedback(SHARED.index(TOWERS), len(SHARED) + 1))
    title = "From images or texts to points, and from points to a loss or a search"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    fonts = 'font-family="system-ui, sans-serif" font-size="13"'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>'
    lines = [f"{head} {fonts}>", f"<title>{title}</title>", ground, *parts, "</svg>"]
    return "\n".join(lines) + "\n"


def draw(box: Box, left: float, top: float, width: float) -> list[str]:
    """A box: its name, in bold, with what it does, and its files below."""
    frame = f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{BOX_HEIGHT}" rx="6"'
    does, files = escape(box.does), ", ".join(box.files)
    name = f'<tspan font-weight="bold">{box.name}</tspan>'
    x = left + 12
    return [
        f'{frame} fill="{box.colour}" stroke="#5c6bc0"/>',
        f'<text x="{x:g}" y="{top + 25:g}">{name} {does}</text>',
        f'<text x="{x:g}" y="{top + 47:g}" font-family="monospace" font-size="12" '
        f'fill="#444444">{files}</text>',
    ]


def arrow(x: float, top: float) -> str:
    """An arrow down, across a gap."""
    tip = top + GAP - 2
    line = f"M{x:g} {top + 2:g}V{tip:g}"
    return f'<path d="{line}m-5 -6l5 6l5 -6" fill="none" stroke="#5c6bc0" stroke-width="1.5"/>'


def feedback(to_row: int, from_row: int) -> str:
    """A dashed arrow at the left, from the update back to the towers."""
    start, end = (MARGIN + row * (BOX_HEIGHT + GAP) + BOX_HEIGHT / 2 for row in (from_row, to_row))
    line = f"M{MARGIN} {start:g}H6V{end:g}H{MARGIN - 2}m-6 -5l6 5l-6 5"
    return f'<path d="{line}" fill="none" stroke="#5c6bc0" stroke-dasharray="4 3"/>'


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(system())
