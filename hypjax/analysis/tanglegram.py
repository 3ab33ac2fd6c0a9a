"""Tanglegrams: a tree that was found and one that is known, face to face, of the same leaves."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hypjax.analysis.disk import OTHER, colours, draw_lines
from hypjax.analysis.hit_grid import save, shortened
from hypjax.analysis.trees import Tree

_DPI = 160
_ROW = 0.19  # Inches of a leaf.
_WIDTHS = (3.0, 4.2, 3.6)  # Inches of the found tree, the leaves, and the known one.
_LINKS = (0.38, 0.62)  # Where lines begin and end between the names of the leaves.
_NAME = 26  # Characters of a name.
_SIZE = 7  # Points of its letters.


class Side(NamedTuple):
    """One of two trees, as it is drawn."""

    title: str
    tree: Tree
    depths: Float[np.ndarray, " nodes"]  # How far right of the root each node is, up to 1.
    names: Sequence[str]  # Of the nodes but for the root; none of a tree that was found.


def draw_tanglegram(
    found: Side, known: Side, groups: Int[np.ndarray, " leaves"], output: pathlib.Path
) -> None:
    """Draws two trees, turned at their nodes so that the same leaves are opposite each other.

    Nodes above a single group of leaves have its colour, the others are grey.
    """
    of_known = _turned(known.tree, found.tree.starts())
    of_found = _turned(found.tree, of_known)
    leaves = found.tree.leaves
    hues = colours(np.bincount(groups)).of
    figure = Figure(figsize=(sum(_WIDTHS), _ROW * leaves + 0.5), dpi=_DPI, layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=_WIDTHS)
    _draw_side(left, found, of_found, groups, hues)
    _draw_side(right, known, of_known, groups, hues)
    right.invert_xaxis()
    ends = of_found[:leaves] + 0.5, of_known[:leaves] + 0.5
    for x, start, align in zip((0, 1), ends, ("left", "right"), strict=True):
        for name, y, group in zip(known.names, start, groups, strict=False):
            style = {"color": hues[group], "fontsize": _SIZE, "parse_math": False}
            middle.text(x, y, shortened(name, _NAME), ha=align, va="center", **style)
    lines = np.array(_LINKS) + 1j * np.stack(ends, axis=1)
    draw_lines(middle, lines, colors=hues[groups], linewidths=0.8)
    middle.set(xlim=(0, 1), ylim=(leaves, 0))
    for axes in (left, middle, right):
        axes.axis("off")
    save(figure, output)


def _turned(tree: Tree, opposite: Int[np.ndarray, " others"]) -> Int[np.ndarray, " nodes"]:
    """The tree's `starts`, with nodes in the order of the mean places of the opposite leaves."""
    places = np.zeros(len(tree.parents))
    places[: tree.leaves] = opposite[: tree.leaves]
    return tree.starts(tree.sums(places) / tree.sizes)


def _draw_side(
    axes: Axes,
    side: Side,
    starts: Int[np.ndarray, " nodes"],
    groups: Int[np.ndarray, " leaves"],
    hues: Sequence[str],
) -> None:
    tree, x, y = side.tree, side.depths, starts + side.tree.sizes / 2
    of_group = np.zeros((len(tree.parents), len(hues)))
    of_group[np.arange(tree.leaves), groups] = 1
    counts = tree.sums(of_group)
    pure = counts.max(axis=1) == tree.sizes
    hue = np.where(pure, np.asarray(hues)[counts.argmax(axis=1)], OTHER)
    child = np.flatnonzero(tree.parents >= 0)
    above = tree.parents[child]
    corners = np.stack([x[above] + 1j * y[above], x[above] + 1j * y[child]], axis=1)
    edges = np.concatenate([corners, (x[child] + 1j * y[child])[:, None]], axis=1)
    draw_lines(axes, edges, colors=hue[child], linewidths=1)
    for node in range(tree.leaves, len(side.names)):
        middle = (x[node] + x[tree.parents[node]]) / 2
        style = {"fontsize": _SIZE, "color": hue[node], "parse_math": False}
        axes.text(
            middle, y[node], shortened(side.names[node], _NAME), ha="center", va="bottom", **style
        )
    axes.set(xlim=(-0.01, 1.01))
    axes.set_title(side.title, fontsize=10, parse_math=False)
