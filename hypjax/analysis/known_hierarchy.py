"""Agreement of embeddings with a known hierarchy of classes: numbers and tanglegrams."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hypjax.analysis.disk import OTHER, draw_lines, group_styles
from hypjax.analysis.hit_grid import DPI, save, shortened
from hypjax.analysis.run_embeddings import Points
from hypjax.analysis.trees import Distances, Heights, Tree
from hypjax.data.groupings import CLASS, Grouping
from hypjax.geometry import Space
from hypjax.retrieval import nearest_neighbors
from hypjax.runs.tables import aligned

_ROW = 0.19  # Inches of a leaf.
_WIDTHS = (3.0, 4.2, 3.6)  # Inches of the run's tree, the leaves, and the known tree.
_INNER_SHARE = 0.85  # Share of the width of the run's tree that inner nodes span.
_LINKS = (0.38, 0.62)  # Where lines begin and end between the names of the leaves.
_NAME_LENGTH = 26  # Characters of a name.
_FONT_SIZE = 7  # Points.

Groups = Int[np.ndarray, " images"]  # Number of each image's group, from 0 without gaps.
Levels = Mapping[str, Groups]
Groupings = Mapping[str, Grouping]


def nested_levels(groupings: Groupings) -> dict[str, Grouping]:
    """The classes, then ever coarser groupings whose groups are unions of the previous groups."""
    levels = {CLASS: groupings[CLASS]}
    for name in sorted(groupings, key=lambda name: -len(groupings[name].names)):
        fine, coarse = next(reversed(levels.values())), groupings[name]
        pairs = np.unique(np.stack([fine.labels, coarse.labels]), axis=1)
        nested = pairs.shape[1] == len(fine.names)  # Each fine group is in one coarse group.
        if nested and 1 < len(coarse.names) < len(fine.names):
            levels[name] = coarse
    return levels


def known_tree(levels: Sequence[Groups]) -> Tree:
    """The tree with the first level's groups as leaves, and later levels' groups above them."""
    parents, first_coarse = [], 0
    for fine, coarse in itertools.pairwise([*levels, np.zeros_like(levels[0])]):
        first_coarse += fine.max() + 1
        parents_of_fine = np.empty(fine.max() + 1, int)
        parents_of_fine[fine] = first_coarse + coarse
        parents.append(parents_of_fine)
    return Tree(np.concatenate([*parents, [-1]]), levels[0].max() + 1)


def wrong_first_hits(points: Points, space: Space, groupings: Groupings) -> dict[str, Any]:
    """Counts wrong nearest images, and how many of them belong to the query's group.

    Queries are the images with another image of their class.

    Returns:
        "queries" and "wrong", the numbers of queries and of wrong nearest images; for each
        grouping, the "share" of wrong images in the query's group, and the share by "chance", if
        wrong images were random images of other classes.
    """
    classes = groupings[CLASS].labels
    hits = nearest_neighbors(points, points, k=1, space=space, exclude_self=True)[1][:, 0]
    class_sizes = np.bincount(classes)[classes]
    wrong = np.flatnonzero((class_sizes > 1) & (classes[hits] != classes))
    scores: dict[str, Any] = {"queries": int(np.sum(class_sizes > 1)), "wrong": len(wrong)}
    for name, grouping in groupings.items():
        if name == CLASS:
            continue
        groups = grouping.labels
        pairs = np.unique(classes * (groups.max() + 1) + groups, return_inverse=True)[1]
        in_class_and_group = np.bincount(pairs)[pairs]
        others_in_group = np.bincount(groups)[groups] - in_class_and_group
        chance = others_in_group[wrong] / (len(points) - class_sizes[wrong])
        same_group = groups[hits[wrong]] == groups[wrong]
        scores[name] = {
            "share": float(np.mean(same_group)) if len(wrong) else np.nan,
            "chance": float(np.mean(chance)) if len(wrong) else np.nan,
        }
    return scores


def rank_correlations(distances: Distances, levels: Sequence[Groups]) -> dict[str, float]:
    """Spearman's correlation of distances with the number of levels at which groups differ.

    Over all pairs, and over pairs of different classes; NaN if all distances are equal.
    """
    from scipy.stats import spearmanr

    pairs = np.tri(len(distances), k=-1, dtype=bool)  # Each pair once.
    num_levels = sum((level[:, None] != level).astype(np.int8) for level in levels)[pairs]
    correlations = {}
    for name, chosen in (("all_pairs", slice(None)), ("different_classes", num_levels > 0)):
        x, y = distances[pairs][chosen], num_levels[chosen]
        constant = min(np.ptp(x), np.ptp(y)) == 0 if len(x) else True
        correlations[name] = np.nan if constant else float(spearmanr(x, y).statistic)
    return correlations


def agreement_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats a line per run: its wrong first hits, and rank correlations."""
    _, _, *groupings = runs[0]["known_hierarchy"]["wrong_first_hits"]  # "queries" and "wrong".
    blanks = [""] * (len(groupings) - 1)
    rows = [["", "", "of the right group (chance):", *blanks, "rank correlation:", ""]]
    rows.append(["run", "wrong first hits", *groupings, "all pairs", "different classes"])
    for run in runs:
        known = run["known_hierarchy"]
        queries, wrong, *shares = known["wrong_first_hits"].values()
        shares = ["{share:.1%} ({chance:.1%})".format(**share) for share in shares]
        ranks = [f"{rank:.4f}" for rank in known["rank_correlation"].values()]
        rows.append([run["run"], f"{wrong} of {queries}", *shares, *ranks])
    return aligned(rows)


def draw_tanglegram(
    tree: Tree, heights: Heights, levels: Groupings, groups: Groups, output: pathlib.Path
) -> None:
    """Draws a tree of classes opposite the known tree, with classes coloured by group."""
    known = known_tree([level.labels for level in levels.values()])
    known_starts = known.sorted_starts(tree.starts()[: tree.leaves])
    starts = tree.sorted_starts(known_starts[: tree.leaves])
    names = list(itertools.chain(*(level.names for level in levels.values())))
    # Inner nodes stand at the height at which they merge, the root at 0; all leaves at 1.
    below_root = heights[-1] - heights[tree.leaves :]
    depths = np.append(np.ones(tree.leaves), below_root * (_INNER_SHARE / max(below_root[0], 1e-9)))
    hues = group_styles(np.bincount(groups)).colours
    figure = Figure(figsize=(sum(_WIDTHS), _ROW * tree.leaves + 0.5), dpi=DPI, layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=_WIDTHS)
    _draw_tree(left, tree, depths, starts, groups, hues)
    left.set_title("found: average linkage, by height", fontsize=10)
    _draw_tree(right, known, known.depths / known.depths.max(), known_starts, groups, hues, names)
    right.set_title(f"known: {', '.join(levels)}", fontsize=10, parse_math=False)
    right.invert_xaxis()
    ends = starts[: tree.leaves] + 0.5, known_starts[: tree.leaves] + 0.5
    for x, rows, align in zip((0, 1), ends, ("left", "right"), strict=True):
        class_names = names[: tree.leaves]
        for name, y, group in zip(class_names, rows, groups, strict=True):
            _write(middle, x, y, name, color=hues[group], ha=align, va="center")
    lines = np.array(_LINKS) + 1j * np.stack(ends, axis=1)
    draw_lines(middle, lines, colors=hues[groups], linewidths=0.8)
    middle.set(xlim=(0, 1), ylim=(tree.leaves, 0))
    for axes in (left, middle, right):
        axes.axis("off")
    save(figure, output)


def _write(axes: Axes, x: float, y: float, name: str, **style: Any) -> None:
    axes.text(x, y, shortened(name, _NAME_LENGTH), fontsize=_FONT_SIZE, parse_math=False, **style)


def _draw_tree(
    axes: Axes,
    tree: Tree,
    x: np.ndarray,
    starts: np.ndarray,
    groups: Groups,
    hues: np.ndarray,
    names: Sequence[str] = (),
) -> None:
    """Draws a tree with its root at x = 0, and any names of inner nodes except the root's.

    `x` holds the horizontal position of each node. Nodes above several groups are grey.
    """
    y = starts + tree.sizes / 2
    one_hot = np.zeros((len(tree.parents), len(hues)))
    one_hot[np.arange(tree.leaves), groups] = 1
    counts = tree.sums(one_hot)
    pure = counts.max(axis=1) == tree.sizes
    hue = np.where(pure, hues[counts.argmax(axis=1)], OTHER)
    child = np.flatnonzero(tree.parents >= 0)
    parent = tree.parents[child]
    corners = x[parent] + 1j * y[parent], x[parent] + 1j * y[child], x[child] + 1j * y[child]
    draw_lines(axes, np.stack(corners, axis=1), colors=hue[child], linewidths=1)
    for node in range(tree.leaves, len(names)):
        middle = (x[node] + x[tree.parents[node]]) / 2
        _write(axes, middle, y[node], names[node], color=hue[node], ha="center", va="bottom")
    axes.set(xlim=(-0.01, 1.01))
