"""The Poincaré disk: embeddings and trees as figures and pages, and images on a grid."""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Complex, Float, Int
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import Circle
from PIL import Image, ImageDraw, ImageOps

from hypjax.analysis.hit_grid import DPI, File, save, shortened, thumbnail_url, tolerant
from hypjax.analysis.run_embeddings import open_runs, scored_head
from hypjax.analysis.trees import ancestors
from hypjax.data.dataset import Dataset, table_of_names
from hypjax.data.groupings import Grouping, groupings
from hypjax.errors import UserError, counted, writing
from hypjax.geometry import Space, spaces
from hypjax.geometry import layout as layouts
from hypjax.retrieval.embeddings import Embeddings
from hypjax.system.files import write_text

# Okabe and Ito's colours, which colour-blind readers can tell apart, and markers for print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
OTHER = "#999999"
_INCHES = 5.0  # Side of one disk.
_NAME = 30  # Characters of a group's name.
_THUMBNAILS = 12  # Across the disk, side by side.
_CELL = 64  # Pixels of a cell of the grid of images.
_GRID_LINES = 4  # To each side of the origin.

# Interactive page.
_LEAST = 340  # Smallest width of one disk, below which disks stand under each other.
_THUMBNAIL = 64  # Pixels of the longer side of an image under the pointer.
_PAGE_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "plus", "x")
_HOVER = """
<div style="max-width: 14rem; font: 13px sans-serif">
  <img src="@image" alt="" style="display: block; width: 96px; image-rendering: pixelated">
  @caption<br>distance from the origin: @radius{0.00}
</div>
"""

Positions = Complex[np.ndarray, " n"]  # Inside the unit circle.
Groups = Int[np.ndarray, " n"]  # Number of each point's group.


class Panel(NamedTuple):
    """The images of one disk."""

    title: str
    positions: Positions | Float[np.ndarray, "n d"]  # Points of a space until laid out.
    labels: Groups
    captions: Sequence[str]  # Of the images.
    read: Callable[[int], Image.Image] | None  # Reads an image by its index.


class Colours(NamedTuple):
    """How groups are drawn."""

    of: np.ndarray  # Colour of each group.
    shown: Int[np.ndarray, " shown"]  # Groups that the legend names.
    markers: Sequence[int]  # Marker of each shown group.
    rest: str  # Name of the other groups in the legend.


class Proxies(NamedTuple):
    """Proxies, and the edges of their tree."""

    positions: Positions | Float[np.ndarray, "p d"]  # As in `Panel`.
    parents: Int[np.ndarray, " p"]  # −1 for proxies without a parent.
    above: Int[np.ndarray, " n"] | None = None  # Parents of the points, if there is one panel.


class Drawing(NamedTuple):
    """Disks beside each other, whose points have the colours of their groups."""

    panels: Sequence[Panel]
    names: Sequence[str]  # Of the groups.
    legend: str  # What groups stand for, such as classes.
    proxies: Proxies | None = None  # Drawn in each disk.


def draw_disks(drawing: Drawing, output: File, thumbnails: bool = False) -> None:
    """Draws points, or as many thumbnails as do not overlap, and the tree of any proxies."""
    panels, chosen = drawing.panels, _colours_of(drawing)
    figure = Figure(figsize=(_INCHES * len(panels), _INCHES + 1.1), dpi=DPI, layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        axes.set(aspect="equal", xlim=(-1.02, 1.02), ylim=(-1.02, 1.02))
        axes.axis("off")
        axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor="black", linewidth=1))
        draw_lines(axes, grid_lines(), color="0.88", linewidths=0.6, zorder=0)
        axes.set_title(panel.title, fontsize=12, parse_math=False)
        _scatter_groups(axes, panel, chosen, drawing.names)
        if drawing.proxies:
            _draw_tree(axes, panel.positions, drawing.proxies)
        if thumbnails:
            _draw_thumbnails(axes, panel, chosen)
    handles, labels = row[0].get_legend_handles_labels()
    labels = [shortened(label, _NAME) for label in labels]
    style = {"fontsize": 9, "columnspacing": 1, "handletextpad": 0.3, "frameon": False}
    style |= {"loc": "outside lower center", "ncols": 2, "title": drawing.legend}
    with matplotlib.rc_context({"text.parse_math": False}):
        legend = figure.legend(handles, labels, **style)
    for handle in legend.legend_handles:
        handle.set_sizes([36])
    save(figure, output)


def _colours_of(drawing: Drawing) -> Colours:
    labels = np.concatenate([panel.labels for panel in drawing.panels])
    return colours(np.bincount(labels, minlength=len(drawing.names)))


def colours(counts: Int[np.ndarray, " groups"]) -> Colours:
    """Colours and markers for the seven largest groups, or hues for many groups of like sizes."""
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
    """Geodesics orthogonal to the axes, at distances 0, 1, 2, ... from the origin."""
    feet = np.tanh(np.arange(-_GRID_LINES, _GRID_LINES + 1)[:, None] / 2)
    axis = 1j * np.tanh(np.linspace(-6, 6, 129))
    # The isometry that takes 0 to a foot takes the imaginary axis to the geodesic through it.
    lines = (axis + feet) / (1 + feet * axis)
    return np.concatenate([lines, lines * 1j])


def draw_lines(axes: Axes, lines: Complex[np.ndarray, "lines points"], **style: Any) -> None:
    """Draws lines through points, complex numbers."""
    axes.add_collection(LineCollection(list(np.stack([lines.real, lines.imag], -1)), **style))


def _scatter_groups(axes: Axes, panel: Panel, chosen: Colours, names: Sequence[str]) -> None:
    positions, labels = panel.positions, panel.labels
    style = {"s": float(np.clip(12000 / max(len(positions), 1), 4, 24)), "linewidths": 0}
    for marker, group in zip(chosen.markers, chosen.shown, strict=True):
        of_group, colour = positions[labels == group], chosen.of[group]
        kind = {"label": names[group], "marker": MARKERS[marker], "zorder": 2}
        axes.scatter(of_group.real, of_group.imag, color=colour, **kind, **style)
    if len(names) > len(chosen.shown):
        rest = ~np.isin(labels, chosen.shown)
        others, hues = positions[rest], chosen.of[labels[rest]]
        axes.scatter(others.real, others.imag, c=hues, zorder=1.5, **style)
        axes.scatter([], [], color=OTHER, label=chosen.rest, **style)


def _draw_tree(axes: Axes, points: Positions, proxies: Proxies) -> None:
    positions, child = proxies.positions, np.flatnonzero(proxies.parents >= 0)
    edges = geodesics(positions[child], positions[proxies.parents[child]])
    draw_lines(axes, edges, color="0.25", linewidths=0.8, zorder=3)
    if proxies.above is not None:
        child = np.flatnonzero(proxies.above >= 0)
        edges = geodesics(points[child], positions[proxies.above[child]])
        draw_lines(axes, edges, color="0.8", linewidths=0.3, zorder=1)
    style = {"facecolor": "white", "edgecolor": "black", "linewidths": 0.9, "zorder": 4}
    axes.scatter(positions.real, positions.imag, s=22, label="proxy", **style)


def _draw_thumbnails(axes: Axes, panel: Panel, chosen: Colours) -> None:
    """Draws framed images, in random order, unless they overlap earlier ones."""
    width = 2 / _THUMBNAILS
    pixels = round(_INCHES * 0.8 * DPI * width / 2)
    taken = np.zeros(0, complex)
    for index in np.random.default_rng(0).permutation(len(panel.positions)).tolist():
        centre = panel.positions[index]
        apart = taken - centre
        if np.any((np.abs(apart.real) < width) & (np.abs(apart.imag) < width)):
            continue
        taken = np.append(taken, centre)
        thumbnail = panel.read(index)
        thumbnail.thumbnail((2 * pixels, 2 * pixels))
        image = OffsetImage(thumbnail, zoom=0.86 * pixels / max(thumbnail.size) * 72 / DPI)
        frame = {"edgecolor": chosen.of[panel.labels[index]], "linewidth": 1.5}
        style = {"pad": 0.1, "bboxprops": frame, "zorder": 5}
        axes.add_artist(AnnotationBbox(image, (centre.real, centre.imag), **style))


def draw_image_grid(panel: Panel, output: pathlib.Path) -> None:
    """Draws images in the cells of a square grid, near their positions in the disk."""
    side = math.isqrt(len(panel.positions) - 1) + 1
    rows, columns = snap_to_grid(panel.positions, side)
    canvas = Image.new("RGB", (side * _CELL, side * _CELL), "white")
    for i, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        image = ImageOps.pad(panel.read(i), (_CELL - 2, _CELL - 2), color="white")
        canvas.paste(image, (column * _CELL + 1, row * _CELL + 1))
    inches = side * _CELL / DPI
    figure = Figure(figsize=(inches, inches), dpi=DPI)
    figure.figimage(np.asarray(canvas))
    save(figure, output)


def snap_to_grid(positions: Positions, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n], from the top, and columns [n]: the cells of least total squared distance."""
    from scipy.optimize import linear_sum_assignment

    # Ranks spread the positions evenly in each direction.
    across, down = (np.argsort(np.argsort(x)) for x in (positions.real, -positions.imag))
    unit = side / max(len(positions), 1)
    rows, columns = np.divmod(np.arange(side * side), side)
    cost = (across[:, None] * unit - columns) ** 2 + (down[:, None] * unit - rows) ** 2
    cells = linear_sum_assignment(cost)[1]
    return cells // side, cells % side


def drawing_of_gallery(
    path: pathlib.Path, most: int, seed: int | None, colour: str | None
) -> tuple[Drawing, Space]:
    """Reads at most `most` images of a gallery, and its space."""
    gallery = Embeddings.load(path)
    title, chosen = choose(path.name, len(gallery), most, seed)
    paths, classes = gallery.ids[chosen].tolist(), gallery.labels[chosen].tolist()
    images = table_of_names(paths, paths, [name or "unknown" for name in classes])
    shown = {title: (gallery.vectors[chosen], images)}
    return drawing_of_images("", shown, colour), gallery.space


def drawing_of_run(
    workdir: str, parts: Sequence[str], most: int, seed: int | None, colour: str | None
) -> tuple[Drawing, Space]:
    """Embeds at most `most` images of each part, train or test, and HIER's proxies."""
    (run,) = open_runs([workdir])
    name, chosen_images = run.config.data.name, {}
    for part in parts:
        dataset = getattr(run.splits, part)
        if dataset is None:
            raise UserError(f"{name} has no {part} images; leave out --parts={part}")
        title, chosen = choose(part, len(dataset), most, seed)
        chosen_images[title] = dataset.take(chosen)
    _legend(groupings(name, next(iter(chosen_images.values()))), colour)
    embed, space, proxies = scored_head(run)
    shown = {title: (embed(images), images) for title, images in chosen_images.items()}
    drawing = drawing_of_images(name, shown, colour)
    if proxies is not None:
        with_origin = np.pad(proxies, ((0, 1), (0, 0)))
        distances = np.asarray(spaces.distance_matrix(space, proxies, with_origin))
        above = ancestors(distances[:, :-1], distances[:, -1], distances[:, -1])
        drawing = drawing._replace(proxies=Proxies(proxies, above))
    return drawing, space


def drawing_of_images(
    name: str, shown: Mapping[str, tuple[np.ndarray, Dataset]], colour: str | None = None
) -> Drawing:
    """A panel for each title, from points [n, d] and their images, coloured by a grouping."""
    by_panel = [groupings(name, images) for _, images in shown.values()]
    legend = _legend(by_panel[0], colour)
    numbers: dict[str, int] = {}
    panels = []
    for (title, (points, images)), of_panel in zip(shown.items(), by_panel, strict=True):
        groups, names = of_panel[legend]
        labels = np.array([numbers.setdefault(name, len(numbers)) for name in names])[groups]
        captions = [f"{images.class_name(i)}, {images.name(i)}" for i in range(len(images))]
        read = tolerant(functools.partial(read_rgb, images))
        panels.append(Panel(title, points, labels, captions, read))
    return Drawing(panels, list(numbers), legend)


def _legend(groupings: Mapping[str, Grouping], colour: str | None) -> str:
    """The grouping that colours stand for, by default the coarsest; rejects unknown names."""
    legend = colour or default_grouping(groupings)
    if legend not in groupings:
        raise UserError(f"--colour={legend} is unknown; it must be one of {', '.join(groupings)}")
    return legend


def place_in_disk(
    drawing: Drawing, space: Space, layout: str = "mds", seed: int = 0, neighbours: int = 15
) -> tuple[Drawing, tuple[float, float] | None]:
    """Lays out all images and proxies together, points of a space, by 'mds' or 'umap'.

    With 'umap', an ancestor is the nearest proxy in the disk that is closer to its centre (HIER).
    Also returns rank correlations of distances in the space with distances in the layout, and with
    distances of two principal components; None for fewer than three points.
    """
    proxies = drawing.proxies
    points = [panel.positions for panel in drawing.panels]
    everything = np.concatenate(points + ([proxies.positions] if proxies else []))
    by_umap = functools.partial(layouts.lay_out_by_umap, neighbours=neighbours)
    positions = {"mds": layouts.lay_out, "umap": by_umap}[layout](everything, space, seed=seed)
    ranks = layouts.faithfulness(everything, positions, space)
    *parts, rest = np.split(positions, np.cumsum(list(map(len, points))))
    panels = [p._replace(positions=part) for p, part in zip(drawing.panels, parts, strict=True)]
    proxies = proxies and proxies._replace(positions=rest)
    if proxies and layout == "umap":
        apart = np.abs((positions[:, None] - rest) / (1 - positions[:, None].conj() * rest))
        above = ancestors(apart, np.abs(positions), np.abs(rest))
        of_images = above[: -len(rest)] if len(panels) == 1 else None
        proxies = proxies._replace(parents=above[-len(rest) :], above=of_images)
    return drawing._replace(panels=panels, proxies=proxies), ranks


def read_rgb(images: Dataset, i: int) -> Image.Image:
    """Reads a dataset's image as RGB by its index; draws its name where only features are known."""
    try:
        return images.image(i, 3).convert("RGB")
    except UserError:
        if images.vectors is None:
            raise
    empty = Image.new("RGB", (80, 80), "#ddd")
    ImageDraw.Draw(empty).text((4, 4), images.name(i)[-12:], fill="#333", font_size=16)
    return empty


def default_grouping(groupings: Mapping[str, Grouping]) -> str:
    """The coarsest grouping of classes."""
    return min(groupings, key=lambda name: len(groupings[name].names))


def choose(name: str, count: int, most: int, seed: int | None) -> tuple[str, np.ndarray]:
    """Returns a title, and ascending indices of at most `most` images: the first without a seed."""
    if not count:
        raise UserError("there are no images to draw")
    title = f"{name}: {f'{most:,} of ' * (most < count)}{counted(count, 'image')}"
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    return title, np.sort(order[:most])


def write_disk_page(drawing: Drawing, output: pathlib.Path) -> None:
    """Writes an interactive page with the disks of `draw_disks` that needs no other file."""
    from bokeh.embed import file_html
    from bokeh.layouts import column, row
    from bokeh.models import Div
    from bokeh.resources import INLINE

    disks = [_bokeh_figure(panel, drawing) for panel in drawing.panels]
    title = f"Poincaré disk: {', '.join(panel.title for panel in drawing.panels)}"
    heading = Div(text="<h1 style='font: bold 1.3rem sans-serif'>Poincaré disk</h1>")
    panels = row(*disks, sizing_mode="stretch_both", styles={"flex-wrap": "wrap"})
    page = column(heading, panels, sizing_mode="stretch_both")
    with writing(output):
        write_text(output, file_html(page, INLINE, title))


def _bokeh_figure(panel: Panel, drawing: Drawing) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    size = {"sizing_mode": "stretch_both", "min_width": _LEAST, "match_aspect": True}
    size["min_height"] = _LEAST + 140  # Title and legend.
    tools = {"tools": "pan,wheel_zoom,box_zoom,reset,save", "active_scroll": "wheel_zoom"}
    plot = figure(title=panel.title, **size, **tools)
    plot.x_range.range_padding = plot.y_range.range_padding = 0.02
    plot.axis.visible = plot.grid.visible = False
    lines, circle = grid_lines(), np.exp(2j * np.pi * np.linspace(0, 1, 361))
    plot.multi_line(list(lines.real), list(lines.imag), line_color="#dddddd", line_width=1)
    plot.line(circle.real, circle.imag, line_color="black")
    chosen, names = _colours_of(drawing), drawing.names
    shown = [([group], names[group]) for group in chosen.shown.tolist()]
    shown.append((np.setdiff1d(np.arange(len(names)), chosen.shown), chosen.rest))
    renderers = []
    for (groups, label), marker in zip(shown, [*chosen.markers, 0], strict=True):
        members = np.flatnonzero(np.isin(panel.labels, groups))
        if not len(members):
            continue
        positions = panel.positions[members]
        columns = {
            "x": positions.real,
            "y": positions.imag,
            "radius": 2 * np.arctanh(np.abs(positions)),
            "caption": [panel.captions[i] for i in members.tolist()],
            "image": [thumbnail_url(panel.read(i), _THUMBNAIL, 75) for i in members.tolist()],
            "colour": chosen.of[panel.labels[members]],
        }
        style = {"size": 6, "color": "colour", "marker": _PAGE_MARKERS[marker], "alpha": 0.8}
        style["legend_label"] = shortened(label, _NAME)
        renderers.append(plot.scatter("x", "y", source=ColumnDataSource(columns), **style))
    if drawing.proxies:
        positions = drawing.proxies.positions
        style = {"size": 8, "fill_color": "white", "line_color": "black", "legend_label": "proxy"}
        plot.scatter(positions.real, positions.imag, **style)
    plot.add_tools(HoverTool(renderers=renderers, tooltips=_HOVER))
    plot.legend.title, plot.legend.click_policy = drawing.legend, "hide"
    plot.add_layout(plot.legend[0], "below")
    plot.legend.ncols, plot.legend.location = 2, "top_left"
    return plot


def geodesics(start: Positions, end: Positions) -> Complex[np.ndarray, "n 33"]:
    """Points of geodesics, with both ends: arcs of the disk that are orthogonal to the circle."""
    start, end = start[:, None], end[:, None]
    # The isometry z ↦ (z − p)/(1 − p̄z) takes the start p to the origin, and a geodesic to a line.
    moved = (end - start) / (1 - start.conj() * end) * np.linspace(0, 1, 33)
    return (moved + start) / (1 + start.conj() * moved)
