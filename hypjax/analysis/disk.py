"""The Poincaré disk: figures of embeddings and trees, and images on a grid."""

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

from hypjax.analysis.hit_grid import DPI, File, save, shortened, tolerant
from hypjax.analysis.run_embeddings import scored_head
from hypjax.analysis.trees import ancestors
from hypjax.data.dataset import Dataset, table_of_names
from hypjax.data.groupings import Grouping, groupings
from hypjax.errors import UserError, counted
from hypjax.experiment.experiment import Experiment
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import Space, spaces
from hypjax.geometry import layout as layouts

# Okabe and Ito's colours, which colour-blind readers can tell apart, and markers for print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_OTHER = "#999999"
_INCHES = 5.0  # Side of one disk.
_NAME_LENGTH = 30  # Characters of a group's name.
_THUMBNAILS = 12  # Across the disk, side by side.
_CELL = 64  # Pixels of a cell of the grid of images.
_GRID_LINES = 4  # To each side of the origin.

Positions = Complex[np.ndarray, " n"]  # Inside the unit circle.


class Panel(NamedTuple):
    """One disk and its images."""

    title: str
    positions: Positions | Float[np.ndarray, "n d"]  # Points of a space until laid out.
    labels: Int[np.ndarray, " n"]  # Group of each image.
    read: Callable[[int], Image.Image]  # Reads an image by its index.


class GroupStyles(NamedTuple):
    """Colours and markers of groups, and their entries in the legend."""

    colours: np.ndarray  # Colour of each group.
    named: Int[np.ndarray, " named"]  # Groups with their own entry in the legend.
    markers: Sequence[str]  # Marker of each named group.
    others_label: str  # The legend's entry for all other groups.


class Proxies(NamedTuple):
    """HIER's proxies, and the edges of their tree."""

    positions: Positions | Float[np.ndarray, "p d"]  # Points of a space until laid out.
    parents: Int[np.ndarray, " p"]  # −1 for proxies without a parent.
    image_parents: Int[np.ndarray, " n"] | None = None  # The images' parents, if only one panel.


class Drawing(NamedTuple):
    """Disks side by side, with images coloured by group."""

    panels: Sequence[Panel]
    group_names: Sequence[str]
    legend_title: str  # What a group is, such as a class.
    proxies: Proxies | None = None  # Drawn in each disk.


def draw_disks(drawing: Drawing, output: File, thumbnails: bool = False) -> None:
    """Draws images as points, and the tree of any proxies.

    `thumbnails` also draws as many small images as do not overlap.
    """
    panels, styles = drawing.panels, _group_styles(drawing)
    figure = Figure(figsize=(_INCHES * len(panels), _INCHES + 1.1), dpi=DPI, layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        axes.set(aspect="equal", xlim=(-1.02, 1.02), ylim=(-1.02, 1.02))
        axes.axis("off")
        axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor="black", linewidth=1))
        draw_lines(axes, grid_lines(), color="0.88", linewidths=0.6, zorder=0)
        axes.set_title(panel.title, fontsize=12, parse_math=False)
        _scatter_groups(axes, panel, styles, drawing.group_names)
        if drawing.proxies:
            _draw_tree(axes, panel.positions, drawing.proxies)
        if thumbnails:
            _draw_thumbnails(axes, panel, styles)
    handles, labels = row[0].get_legend_handles_labels()
    names = [shortened(label, _NAME_LENGTH) for label in labels]
    style: Any = {"legend.columnspacing": 1, "legend.handletextpad": 0.3, "text.parse_math": False}
    with matplotlib.rc_context(style):
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=2, fontsize=9, frameon=False
        )
        legend.set_title(drawing.legend_title)
    markers: Any = legend.legend_handles
    for marker in markers:
        marker.set_sizes([36])
    save(figure, output)


def _group_styles(drawing: Drawing) -> GroupStyles:
    """Chooses styles for groups from the number of images in each group.

    If the seven largest groups hold half of the images, each has a colour and a marker, and all
    others are grey. Otherwise, hues run through all groups in order.
    """
    labels = np.concatenate([panel.labels for panel in drawing.panels])
    counts = np.bincount(labels, minlength=len(drawing.group_names))
    num_groups = len(counts)
    named = np.argsort(-counts, kind="stable")[: len(COLOURS)]
    named = named[counts[named] > 0]
    if 2 * counts[named].sum() >= counts.sum():
        colours = np.full(num_groups, _OTHER, dtype="<U7")
        colours[named] = COLOURS[: len(named)]
        others = f"{num_groups - len(named)} others"
        return GroupStyles(colours, named, MARKERS[: len(named)], others)
    hues = matplotlib.colormaps["turbo"](np.linspace(0, 1, num_groups))
    named = np.linspace(0, num_groups - 1, len(COLOURS)).round().astype(int)
    others = f"{num_groups - len(named)} between these, in order"
    return GroupStyles(np.array([*map(to_hex, hues)]), named, [MARKERS[0]] * len(named), others)


def grid_lines() -> Complex[np.ndarray, "lines points"]:
    """Geodesics orthogonal to the axes of the disk, at distances 0, 1, 2, ... from the origin."""
    feet = np.tanh(np.arange(-_GRID_LINES, _GRID_LINES + 1)[:, None] / 2)
    axis = 1j * np.tanh(np.linspace(-6, 6, 129))
    # The isometry that moves 0 to a foot moves the imaginary axis to the geodesic through the foot.
    lines = (axis + feet) / (1 + feet * axis)
    return np.concatenate([lines, lines * 1j])


def draw_lines(axes: Axes, lines: Complex[np.ndarray, "lines points"], **style: Any) -> None:
    """Draws lines through points given as complex numbers."""
    axes.add_collection(LineCollection(list(np.stack([lines.real, lines.imag], -1)), **style))


def _scatter_groups(axes: Axes, panel: Panel, styles: GroupStyles, names: Sequence[str]) -> None:
    x, y, labels = panel.positions.real, panel.positions.imag, panel.labels
    size = float(np.clip(12000 / max(len(labels), 1), 4, 24))
    scatter = functools.partial(axes.scatter, s=size, linewidths=0)
    for marker, group in zip(styles.markers, styles.named, strict=True):
        of_group, colour = labels == group, styles.colours[group]
        scatter(x[of_group], y[of_group], color=colour, label=names[group], marker=marker, zorder=2)
    if len(names) > len(styles.named):
        unnamed = ~np.isin(labels, styles.named)
        scatter(x[unnamed], y[unnamed], c=styles.colours[labels[unnamed]], zorder=1.5)
        scatter([], [], color=_OTHER, label=styles.others_label)


def _draw_tree(axes: Axes, images: Positions, proxies: Proxies) -> None:
    positions = proxies.positions
    children = proxies.parents >= 0
    edges = geodesics(positions[children], positions[proxies.parents[children]])
    draw_lines(axes, edges, color="0.25", linewidths=0.8, zorder=3)
    if proxies.image_parents is not None:
        children = proxies.image_parents >= 0
        edges = geodesics(images[children], positions[proxies.image_parents[children]])
        draw_lines(axes, edges, color="0.8", linewidths=0.3, zorder=1)
    scatter = functools.partial(axes.scatter, facecolor="white", edgecolor="black", linewidths=0.9)
    scatter(positions.real, positions.imag, s=22, label="proxy", zorder=4)


def _draw_thumbnails(axes: Axes, panel: Panel, styles: GroupStyles) -> None:
    """Draws framed images in random order, skipping any that overlaps an earlier image."""
    width = 2 / _THUMBNAILS
    pixels = round(0.8 * _INCHES * DPI / _THUMBNAILS)  # The disk fills 0.8 of a panel's width.
    drawn_centres = np.zeros(0, complex)
    for index in np.random.default_rng(0).permutation(len(panel.positions)).tolist():
        centre = panel.positions[index]
        offsets = drawn_centres - centre
        if np.any((np.abs(offsets.real) < width) & (np.abs(offsets.imag) < width)):
            continue
        drawn_centres = np.append(drawn_centres, centre)
        thumbnail = panel.read(index)
        thumbnail.thumbnail((2 * pixels, 2 * pixels))
        # The frame and its padding take the rest of the cell.
        zoom = 0.86 * pixels / max(thumbnail.size) * 72 / DPI
        image, centre = OffsetImage(np.asarray(thumbnail), zoom=zoom), (centre.real, centre.imag)
        frame = {"edgecolor": styles.colours[panel.labels[index]], "linewidth": 1.5}
        axes.add_artist(AnnotationBbox(image, centre, pad=0.1, bboxprops=frame, zorder=5))


def draw_image_grid(panel: Panel, output: pathlib.Path) -> None:
    """Draws images in the cells of a square grid, near their positions in the disk."""
    side = math.isqrt(len(panel.positions) - 1) + 1
    rows, columns = snap_to_grid(panel.positions, side)
    canvas = Image.new("RGB", (side * _CELL, side * _CELL), "white")
    for i, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        image = ImageOps.pad(panel.read(i), (_CELL - 2, _CELL - 2), color="white")
        canvas.paste(image, (column * _CELL + 1, row * _CELL + 1))
    figure = Figure(figsize=(canvas.width / DPI, canvas.height / DPI), dpi=DPI)
    figure.figimage(np.asarray(canvas))
    save(figure, output)


def snap_to_grid(positions: Positions, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Assigns positions to cells of a grid, by least total squared distance.

    Returns rows [n], counted from the top, and columns [n].
    """
    from scipy.optimize import linear_sum_assignment

    # Ranks spread the positions evenly in each direction.
    x_rank, y_rank = (np.argsort(np.argsort(x)) for x in (positions.real, -positions.imag))
    unit = side / max(len(positions), 1)
    rows, columns = np.divmod(np.arange(side * side), side)
    cost = (x_rank[:, None] * unit - columns) ** 2 + (y_rank[:, None] * unit - rows) ** 2
    return np.divmod(linear_sum_assignment(cost)[1], side)


def drawing_of_gallery(
    path: pathlib.Path, limit: int, seed: int | None, colour: str | None
) -> tuple[Drawing, Space]:
    """Reads at most `limit` images of a gallery as points of its space, which is also returned."""
    gallery = Embeddings.load(path)
    title, chosen = choose(path.name, len(gallery), limit, seed)
    paths, points = gallery.ids[chosen].tolist(), gallery.vectors[chosen]
    classes = [name or "unknown" for name in gallery.labels[chosen].tolist()]
    images = table_of_names(paths, paths, classes)
    return drawing_of_images("", {title: images}, lambda _: points, colour), gallery.space


def drawing_of_run(
    run: Experiment, parts: Sequence[str], limit: int, seed: int | None, colour: str | None
) -> tuple[Drawing, Space]:
    """Embeds up to `limit` images of each split in `parts`, and HIER's proxies, in one space."""
    dataset_name = run.method.fields["data.name"]
    images_by_title = {}
    for split in parts:
        dataset = getattr(run.splits, split)
        if dataset is None:
            raise UserError(f"{dataset_name} has no {split} images; leave out --parts={split}")
        title, chosen = choose(split, len(dataset), limit, seed)
        images_by_title[title] = dataset.take(chosen)
    embed, space, proxies = scored_head(run)
    drawing = drawing_of_images(dataset_name, images_by_title, embed, colour)
    if proxies is not None:
        with_origin = np.pad(proxies, ((0, 1), (0, 0)))
        distances = np.asarray(spaces.distance_matrix(space, proxies, with_origin))
        to_proxies, radii = distances[:, :-1], distances[:, -1]
        drawing = drawing._replace(proxies=Proxies(proxies, ancestors(to_proxies, radii, radii)))
    return drawing, space


def drawing_of_images(
    dataset_name: str,
    images_by_title: Mapping[str, Dataset],
    embed: Callable[[Dataset], Float[np.ndarray, "n d"]],
    colour: str | None = None,
) -> Drawing:
    """Makes a panel of each title's images, coloured by a grouping, by default the coarsest."""
    by_panel = [groupings(dataset_name, images) for images in images_by_title.values()]
    grouping = colour or default_grouping(by_panel[0])
    if grouping not in by_panel[0]:
        names = ", ".join(by_panel[0])
        raise UserError(f"--colour={grouping} is unknown; it must be one of {names}")
    group_numbers: dict[str, int] = {}  # By name of the group; the same in all panels.
    panels = []
    for (title, images), panel_groupings in zip(images_by_title.items(), by_panel, strict=True):
        groups, group_names = panel_groupings[grouping]
        numbers = [group_numbers.setdefault(name, len(group_numbers)) for name in group_names]
        read = tolerant(functools.partial(read_rgb, images))
        panels.append(Panel(title, embed(images), np.array(numbers)[groups], read))
    return Drawing(panels, list(group_numbers), grouping)


def place_in_disk(
    drawing: Drawing, space: Space, layout: str = "mds", seed: int = 0, neighbours: int = 15
) -> tuple[Drawing, tuple[float, float] | None]:
    """Lays out all images and proxies, points of a space, together in the disk.

    `layout` is 'mds' or 'umap'. With 'umap', parents are recomputed in the disk, as in HIER: the
    nearest proxy that is closer to the disk's centre.

    Also returns two rank correlations of distances in the space: with distances in the layout, and
    with distances of two principal components; None for fewer than three points.
    """
    proxies = drawing.proxies
    points_by_panel = [panel.positions for panel in drawing.panels]
    points = np.concatenate(points_by_panel + ([proxies.positions] if proxies else []))
    if layout == "umap":
        positions = layouts.lay_out_by_umap(points, space, neighbours=neighbours, seed=seed)
    else:
        positions = layouts.lay_out(points, space, seed=seed)
    ranks = layouts.faithfulness(points, positions, space)
    panel_ends = np.cumsum([len(panel_points) for panel_points in points_by_panel])
    *placed, proxy_positions = np.split(positions, panel_ends)
    panels = [panel._replace(positions=x) for panel, x in zip(drawing.panels, placed, strict=True)]
    if proxies:
        proxies = proxies._replace(positions=proxy_positions)
    if proxies and layout == "umap":
        x, p = positions[:, None], proxy_positions
        distances = np.abs((x - p) / (1 - x.conj() * p))  # Monotonic in the hyperbolic distance.
        parents = ancestors(distances, np.abs(positions), np.abs(p))
        image_parents, proxy_parents = np.split(parents, panel_ends[-1:])
        proxies = Proxies(p, proxy_parents, image_parents if len(panels) == 1 else None)
    return drawing._replace(panels=panels, proxies=proxies), ranks


def read_rgb(images: Dataset, i: int) -> Image.Image:
    """Reads image `i` of a dataset as RGB; for features without images, draws the name instead."""
    try:
        return images.image(i, 3).convert("RGB")
    except UserError:
        if images.vectors is None:
            raise
    empty = Image.new("RGB", (80, 80), "#ddd")
    ImageDraw.Draw(empty).text((4, 4), images.name(i)[-12:], fill="#333", font_size=16)
    return empty


def default_grouping(groupings: Mapping[str, Grouping]) -> str:
    """The name of the coarsest grouping."""
    return min(groupings, key=lambda name: len(groupings[name].names))


def choose(name: str, count: int, limit: int, seed: int | None) -> tuple[str, np.ndarray]:
    """Chooses at most `limit` of `count` images: random ones, or the first if there is no seed.

    Returns a title that states both numbers, and ascending indices.
    """
    if not count:
        raise UserError("there are no images to draw")
    drawn = f"{limit:,} of " if limit < count else ""
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    return f"{name}: {drawn}{counted(count, 'image')}", np.sort(order[:limit])


def geodesics(start: Positions, end: Positions) -> Complex[np.ndarray, "n 33"]:
    """Points along geodesics of the disk, ends included."""
    start, end = start[:, None], end[:, None]
    # The isometry z ↦ (z − p)/(1 − p̄z) moves the start p to the origin, where geodesics are lines.
    moved = (end - start) / (1 - start.conj() * end) * np.linspace(0, 1, 33)
    return (moved + start) / (1 + start.conj() * moved)
