"""Figures of hierarchies: a tree in the Poincaré disk, affinities of classes, and leaf proxies."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Complex, Float, Int
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hypjax.analysis.disk import (
    colours,
    empty_disk,
    geodesics,
    place_legend,
    scatter_groups,
)
from hypjax.analysis.hit_grid import save
from hypjax.analysis.trees import Tree

_DPI = 160


def draw_disk(
    tree: Tree,
    places: Complex[np.ndarray, " nodes"],
    groups: Int[np.ndarray, " leaves"],
    names: Sequence[str],
    title: str,
    output: pathlib.Path,
) -> None:
    """Draws a tree in the Poincaré disk, with geodesics as edges.

    Args:
        tree: The tree.
        places: Place of each node, inside the unit circle.
        groups: Group of each leaf, which colours it.
        names: Name of each group.
        title: What the colours stand for.
        output: File to write; its suffix selects the format.

    Raises:
        UserError: The file cannot be written.
    """
    figure = Figure(figsize=(5, 5.9), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    empty_disk(axes)
    child = np.flatnonzero(tree.parents >= 0)
    leaf = child < tree.leaves
    for edges, style in (
        (child[leaf], {"color": "0.8", "linewidths": 0.3, "zorder": 1}),
        (child[~leaf], {"color": "0.25", "linewidths": 0.8, "zorder": 3}),
    ):
        arcs = geodesics(places[edges], places[tree.parents[edges]])
        lines = np.stack([arcs.real, arcs.imag], axis=-1)
        axes.add_collection(LineCollection(list(lines), **style))
    leaves, inner = places[: tree.leaves], places[tree.leaves : -1]
    chosen = colours(np.bincount(groups, minlength=len(names)))
    scatter_groups(axes, leaves, groups, chosen, names)
    rings = {"facecolor": "white", "edgecolor": "black", "linewidths": 0.9, "zorder": 4}
    axes.scatter(inner.real, inner.imag, s=22, label="proxy", **rings)
    axes.scatter([0], [0], s=30, color="black", marker="x", zorder=5, label="origin, the root")
    place_legend(figure, axes, title)
    axes.set_title("distance from the origin: true; angle: place in the tree", fontsize=10)
    save(figure, output)


def draw_affinity(
    affinity: Float[np.ndarray, "classes classes"],
    groups: Mapping[str, Int[np.ndarray, " classes"]],
    output: pathlib.Path,
) -> None:
    """Draws the affinity of classes, beside how many of their groups they share.

    Classes are ordered by their groups, and within these by average linkage of their affinities.

    Args:
        affinity: Affinity of each pair of classes.
        groups: Each class's group in each grouping, by name; may be empty.
        output: File to write; its suffix selects the format.

    Raises:
        UserError: The file cannot be written.
    """
    order = np.lexsort((_places(affinity), *reversed(groups.values())))
    panels = {"affinity": affinity}
    if groups:
        shared = sum(group[:, None] == group for group in groups.values())
        same = f"same {next(iter(groups))}"
        many = f"number of equal groups: {', '.join(groups)}"
        panels[many if len(groups) > 1 else same] = shared
    figure = Figure(figsize=(4.6 * len(panels), 4.6), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    apart = affinity[~np.eye(len(affinity), dtype=bool)]
    ranges = [(np.quantile(apart, 0.01), np.quantile(apart, 0.995)), (0, len(groups))]
    for axes, (title, panel), (low, high) in zip(row, panels.items(), ranges, strict=False):
        picture = axes.imshow(
            panel[np.ix_(order, order)],
            vmin=low,
            vmax=high,
            cmap="cividis",
            interpolation="nearest",
        )
        axes.set(xticks=[], yticks=[], xlabel=f"{len(affinity)} classes")
        axes.set_title(title, fontsize=11, parse_math=False)
        if panel is affinity:
            figure.colorbar(picture, ax=axes, shrink=0.85, extend="both")
        elif len(groups) > 1:
            figure.colorbar(picture, ax=axes, shrink=0.85, ticks=range(len(groups) + 1))
    save(figure, output)


def _places(affinity: Float[np.ndarray, "classes classes"]) -> Int[np.ndarray, " classes"]:
    """Places of classes in a row in which similar ones are neighbours."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(affinity) < 3:
        return np.arange(len(affinity))
    apart = squareform(affinity.max() - affinity, checks=False)
    return np.argsort(leaves_list(linkage(apart, method="average")))
