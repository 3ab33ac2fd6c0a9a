"""Pictures of embeddings: the Poincaré disk, and images on a grid."""

import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Complex, Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import Circle
from PIL import Image, ImageOps

from hypjax.analysis.arcs import geodesics
from hypjax.analysis.hit_grid import Images, save

# Okabe and Ito's colours, which colour-blind readers can tell apart, and markers for print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
OTHER = "#999999"
_DPI = 160
_INCHES = 5.0  # Side of one disk.
_SHORT = 20  # Characters of a name of which three stand side by side in the legend.
_CELLS = 11  # Thumbnails across the disk.
_GRID_STEP = 1.0  # Hyperbolic distance of the lines of the grid.
_GRID_LINES = 4  # To each side of the origin.


class Panel(NamedTuple):
    """The points of one disk.

    Attributes:
        title: What they are.
        places: Their places, inside the unit circle.
        labels: Group of each.
        captions: What the images show, in words.
        read: Reads the image that a point stands for, by its index.
    """

    title: str
    places: Complex[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    captions: Sequence[str]
    read: Images


class Colours(NamedTuple):
    """How groups are drawn.

    Attributes:
        of: Colour of each group.
        shown: The groups that the legend names.
        markers: Number of each one's marker.
        rest: What the legend calls the others.
    """

    of: np.ndarray
    shown: Int[np.ndarray, " shown"]
    markers: Sequence[int]
    rest: str


class Proxies(NamedTuple):
    """Proxies, and the edges of their tree.

    Attributes:
        places: Their places.
        parents: Index of each one's parent; -1 if it has none.
    """

    places: Complex[np.ndarray, " p"]
    parents: Int[np.ndarray, " p"]


def draw_disks(
    panels: Sequence[Panel],
    names: Sequence[str],
    legend: str,
    output: pathlib.Path,
    *,
    proxies: Proxies | None = None,
    thumbnails: bool = False,
    note: str = "",
) -> None:
    """Draws points in Poincaré disks beside each other, on a grid of geodesics.

    Args:
        panels: The points; their groups are those of `names`.
        names: Name of each group, see `colours`.
        legend: What the groups are.
        output: File to write; its suffix selects the format.
        proxies: Proxies, drawn in each disk.
        thumbnails: Whether to draw images in place of points, as many as do not overlap.
        note: A line above the disks.

    Raises:
        UserError: The file cannot be written, or an image cannot be read.
    """
    figure = Figure(figsize=(_INCHES * len(panels), _INCHES + 1.1), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    chosen = colours(sum(np.bincount(panel.labels, minlength=len(names)) for panel in panels))
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        empty_disk(axes)
        axes.set_title(panel.title, fontsize=12, parse_math=False)
        scatter_groups(axes, panel.places, panel.labels, chosen, names)
        if proxies is not None:
            _draw_proxies(axes, proxies)
        if thumbnails:
            _draw_thumbnails(axes, panel, chosen)
    place_legend(figure, row[0], legend)
    if note:
        figure.suptitle(note, fontsize=9, color="0.3", parse_math=False)
    save(figure, output)


def colours(counts: Int[np.ndarray, " groups"]) -> Colours:
    """Chooses the colours of groups with so many points.

    The seven largest have colours and markers of their own, and the others are grey. Where these
    are most of the points, as of many equal classes, hues follow the order of the groups instead.
    """
    shown = np.argsort(-counts, kind="stable")[: len(COLOURS)]
    shown, groups = shown[counts[shown] > 0], len(counts)
    if 2 * counts[shown].sum() >= counts.sum():
        of = np.full(groups, OTHER, dtype="<U7")
        of[shown] = COLOURS[: len(shown)]
        return Colours(of, shown, range(len(shown)), f"{groups - len(shown)} others")
    of = np.array([to_hex(hue) for hue in matplotlib.colormaps["turbo"](np.linspace(0, 1, groups))])
    shown = np.linspace(0, groups - 1, len(COLOURS)).round().astype(int)
    return Colours(of, shown, [0] * len(shown), f"{groups - len(shown)} between these, in order")


def grid_lines() -> Complex[np.ndarray, "lines points"]:
    """Geodesics orthogonal to the axes, at distances 1, 2, 3, ... from the origin."""
    feet = np.tanh(np.arange(-_GRID_LINES, _GRID_LINES + 1)[:, None] * _GRID_STEP / 2)
    axis = 1j * np.tanh(np.linspace(-6, 6, 129))
    # The isometry that takes 0 to a foot takes the imaginary axis to the geodesic through it.
    lines = (axis + feet) / (1 + feet * axis)
    return np.concatenate([lines, lines * 1j])


def empty_disk(axes: Axes) -> None:
    """Draws the unit circle and a grid of geodesics."""
    axes.set(aspect="equal", xlim=(-1.02, 1.02), ylim=(-1.02, 1.02))
    axes.axis("off")
    axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor="black", linewidth=1))
    lines = grid_lines()
    style = {"color": "0.88", "linewidths": 0.6, "zorder": 0}
    axes.add_collection(LineCollection(list(np.stack([lines.real, lines.imag], -1)), **style))


def scatter_groups(
    axes: Axes,
    places: Complex[np.ndarray, " n"],
    labels: Int[np.ndarray, " n"],
    chosen: Colours,
    names: Sequence[str],
) -> None:
    """Draws points in the colours of their groups."""
    size = float(np.clip(12000 / max(len(places), 1), 4, 24))
    for marker, group in zip(chosen.markers, chosen.shown, strict=True):
        own = places[labels == group]
        style = {"color": chosen.of[group], "s": size, "linewidths": 0, "zorder": 2}
        axes.scatter(own.real, own.imag, label=names[group], marker=_MARKERS[marker], **style)
    if len(names) > len(chosen.shown):
        rest = ~np.isin(labels, chosen.shown)
        style = {"s": size, "linewidths": 0, "zorder": 1.5}
        axes.scatter(places[rest].real, places[rest].imag, c=chosen.of[labels[rest]], **style)
        axes.scatter([], [], color=OTHER, label=chosen.rest, **style)


def place_legend(figure: Figure, axes: Axes, title: str) -> None:
    """Draws the legend of a disk's groups below the disks."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [label if len(label) < 30 else f"{label[:28]}…" for label in labels]
    with matplotlib.rc_context({"text.parse_math": False}):
        legend = figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=3 if max(map(len, labels), default=0) < _SHORT else 2,
            fontsize=9,
            columnspacing=1,
            handletextpad=0.3,
            frameon=False,
            title=title,
        )
    for handle in legend.legend_handles:
        handle.set_sizes([36])


def _draw_proxies(axes: Axes, proxies: Proxies) -> None:
    if not len(proxies.places):
        return
    child = np.flatnonzero(proxies.parents >= 0)
    arcs = geodesics(proxies.places[child], proxies.places[proxies.parents[child]])
    lines = list(np.stack([arcs.real, arcs.imag], axis=-1))
    axes.add_collection(LineCollection(lines, color="0.25", linewidths=0.8, zorder=3))
    style = {"facecolor": "white", "edgecolor": "black", "linewidths": 0.9, "zorder": 4}
    axes.scatter(proxies.places.real, proxies.places.imag, s=22, label="proxy", **style)


def _draw_thumbnails(axes: Axes, panel: Panel, chosen: Colours) -> None:
    """Draws in each cell of a grid the image nearest to its centre, framed in its colour."""
    width = 2 / _CELLS
    cells = np.floor((panel.places.real + 1) / width) + 1j * np.floor(
        (panel.places.imag + 1) / width
    )
    pixels = round(_INCHES * 0.8 * _DPI * width / 2)
    for cell in np.unique(cells):
        centre = (cell.real + 0.5) * width - 1 + 1j * ((cell.imag + 0.5) * width - 1)
        if abs(centre) > 1 - width / 4:  # It would lie outside.
            continue
        inside = np.flatnonzero(cells == cell)
        index = int(inside[np.argmin(np.abs(panel.places[inside] - centre))])
        picture = panel.read(index)
        picture.thumbnail((2 * pixels, 2 * pixels))
        zoom = 0.86 * pixels / max(picture.size) * 72 / _DPI
        frame = {"edgecolor": chosen.of[panel.labels[index]], "linewidth": 1.5}
        box = AnnotationBbox(
            OffsetImage(picture, zoom=zoom, cmap="gray"),
            (centre.real, centre.imag),
            pad=0.1,
            bboxprops=frame,
        )
        box.set_zorder(5)
        axes.add_artist(box)


def draw_image_grid(panel: Panel, output: pathlib.Path, pixels: int = 64) -> None:
    """Draws images on a square grid, near their places in the disk.

    Images are assigned to cells so that the sum of squared distances is least.

    Args:
        panel: The images.
        output: File to write; its suffix selects the format.
        pixels: Side of a cell.

    Raises:
        UserError: The file cannot be written, or an image cannot be read.
    """
    side = math.isqrt(len(panel.places) - 1) + 1
    rows, columns = snap_to_grid(panel.places, side)
    canvas = Image.new("RGB", (side * pixels, side * pixels), "white")
    for i, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        picture = ImageOps.contain(panel.read(i), (pixels - 2, pixels - 2))
        margin = (pixels - picture.width) // 2, (pixels - picture.height) // 2
        canvas.paste(picture, (column * pixels + margin[0], row * pixels + margin[1]))
    inches = side * pixels / _DPI
    figure = Figure(figsize=(inches, inches), dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(canvas, interpolation="nearest")
    axes.axis("off")
    save(figure, output)


def snap_to_grid(
    places: Complex[np.ndarray, " n"], side: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Assigns places to cells of a square grid, by least squares (Jonker and Volgenant).

    Args:
        places: Places in the plane, at most side².
        side: Cells in a row.

    Returns:
        Row, from the top, and column of each place.
    """
    from scipy.optimize import linear_sum_assignment

    # Ranks spread the places evenly in each direction.
    across, down = (np.argsort(np.argsort(x)) for x in (places.real, -places.imag))
    unit = side / max(len(places), 1)
    rows, columns = np.divmod(np.arange(side * side), side)
    cost = (across[:, None] * unit - columns) ** 2 + (down[:, None] * unit - rows) ** 2
    cells = linear_sum_assignment(cost)[1]
    return cells // side, cells % side
