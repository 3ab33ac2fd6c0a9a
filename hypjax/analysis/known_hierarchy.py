"""How embeddings agree with a known hierarchy of classes: numbers, and tanglegrams."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hypjax.analysis.disk import OTHER, draw_lines, group_styles
from hypjax.analysis.hit_grid import DPI, save, shortened
from hypjax.analysis.run_embeddings import Points
from hypjax.analysis.trees import Distances, Heights, Tree
from hypjax.data.groupings import CLASS, Grouping
from hypjax.geometry import Space, lorentz
from hypjax.retrieval import nearest_neighbors
from hypjax.runs.tables import aligned

_ROW = 0.19  # Inches of a leaf.
_WIDTHS = (3.0, 4.2, 3.6)  # Inches of the run's tree, the leaves, and the known tree.
_INNER = 0.85  # Share of the width of the run's tree that inner nodes span.
_LINKS = (0.38, 0.62)  # Where lines begin and end between the names of the leaves.
_NAME = 26  # Characters of a name.
_SIZE = 7  # Points of its letters.

Groups = Int[np.ndarray, " images"]  # Number of each image's group, from 0 without gaps.
Levels = Mapping[str, Groups]
Groupings = Mapping[str, Grouping]
Radii = Float[np.ndarray, " groups"]


def nested_levels(groupings: Groupings) -> dict[str, Grouping]:
    """Classes, then ever coarser groupings, each of which nests the one before."""
    levels = {CLASS: groupings[CLASS]}
    for name in sorted(groupings, key=lambda name: -len(groupings[name].names)):
        fine, coarse = next(reversed(levels.values())), groupings[name]
        pairs = np.unique(np.stack([fine.labels, coarse.labels]), axis=1)
        nested = pairs.shape[1] == len(fine.names)
        if nested and 1 < len(coarse.names) < len(fine.names):
            levels[name] = coarse
    return levels


def known_tree(levels: Sequence[Groups]) -> Tree:
    """The tree with the first level's groups as leaves, and later levels' groups above them."""
    parents, first = [], 0
    for fine, coarse in itertools.pairwise([*levels, np.zeros_like(levels[0])]):
        first += fine.max() + 1
        above = np.empty(fine.max() + 1, int)
        above[fine] = first + coarse
        parents.append(above)
    return Tree(np.concatenate([*parents, [-1]]), levels[0].max() + 1)


def wrong_first_hits(points: Points, space: Space, groupings: Groupings) -> dict[str, Any]:
    """How often a wrong nearest image at least has the query's group, by exact search.

    Queries have another image of their class. Returns the numbers of queries and of wrong hits, and
    for each grouping the share of wrong hits in the query's group, and the share by chance, of
    random images of other classes.
    """
    classes = groupings[CLASS].labels
    hits = nearest_neighbors(points, points, k=1, space=space, exclude_self=True)[1][:, 0]
    of_class = np.bincount(classes)[classes]
    wrong = np.flatnonzero((of_class > 1) & (classes[hits] != classes))
    scores: dict[str, Any] = {"queries": int(np.sum(of_class > 1)), "wrong": len(wrong)}
    for name, groups in ((n, g.labels) for n, g in groupings.items() if n != CLASS):
        pairs = np.unique(classes * (groups.max() + 1) + groups, return_inverse=True)[1]
        of_both = np.bincount(pairs)[pairs]
        same = groups[hits[wrong]] == groups[wrong]
        chance = (np.bincount(groups)[groups] - of_both)[wrong] / (len(points) - of_class[wrong])
        share, by_chance = (float(np.mean(x)) if len(wrong) else np.nan for x in (same, chance))
        scores[name] = {"share": share, "chance": by_chance}
    return scores


def rank_correlations(distances: Distances, levels: Sequence[Groups]) -> dict[str, float]:
    """Spearman's correlation of distances with the number of levels at which groups differ.

    Over all pairs, and over pairs of different classes; NaN if all distances are equal.
    """
    from scipy.stats import spearmanr

    once = np.tri(len(distances), k=-1, dtype=bool)
    apart = sum((level[:, None] != level).astype(np.int8) for level in levels)[once]
    correlations = {}
    for name, chosen in (("all_pairs", slice(None)), ("different_classes", apart > 0)):
        x, y = distances[once][chosen], apart[chosen]
        constant = min(np.ptp(x), np.ptp(y)) == 0 if len(x) else True
        correlations[name] = np.nan if constant else float(spearmanr(x, y).statistic)
    return correlations


def radii(points: Points, space: Space, levels: Levels) -> dict[str, dict[str, float]]:
    """Median distances from the origin of images, of groups' centres, and of the centre of all.

    In "ball", if the space is or has one, a centre is the centroid on the hyperboloid, Einstein's
    midpoint (Law et al., "Lorentzian Distance Learning", ICML 2019). In "flat", it is the mean of
    the features, at the distance 2‖x‖, the ball's limit for c → 0. Returns medians by level.
    """
    nodes = {"image": np.arange(len(points)), **levels, "all": np.zeros(len(points), int)}
    lifted, c = _on_hyperboloid(space, points)
    with jax.enable_x64(True):
        features = np.asarray(space.features(np.asarray(points, np.float64)))

    def ball(groups: Groups) -> Radii:
        with jax.enable_x64(True):
            centres = lorentz.centroids(lifted, groups, groups.max() + 1, c)
            return np.linalg.norm(lorentz.logmap0(centres, c), axis=1)

    def flat(groups: Groups) -> Radii:
        return 2 * np.linalg.norm(_sums(features, groups), axis=1) / np.bincount(groups)

    return {
        name: {level: float(np.median(radii_in(x))) for level, x in nodes.items()}
        for name, radii_in in {**({"ball": ball} if c else {}), "flat": flat}.items()
    }


def _on_hyperboloid(space: Space, points: Points) -> tuple[Points, float]:
    """Points of a space that is, or has, a ball, on its hyperboloid; and its c, or else 0."""
    for part, x in space.geometries(points):
        ball = part.ball()
        if ball is not None and ball.c:
            c = float(ball.c)
            with jax.enable_x64(True):
                in_ball = part.to_ball(np.asarray(x, np.float64))
                return np.asarray(lorentz.from_poincare(in_ball, c)), c
    return points, 0.0


def _sums(x: Points, groups: Groups) -> Float[np.ndarray, "groups d"]:
    sums = np.zeros((groups.max() + 1, x.shape[1]))
    np.add.at(sums, groups, x)
    return sums


def agreement_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats a line per run: its wrong first hits, and rank correlations."""
    names = [*runs[0]["known_hierarchy"]["wrong_first_hits"]][2:]
    groups = ["", "", "of the right group (chance):", *[""] * (len(names) - 1)]
    rows = [[*groups, "rank correlation:", ""]]
    rows.append(["run", "wrong first hits", *names, "all pairs", "different classes"])
    for run in runs:
        known = run["known_hierarchy"]
        queries, wrong, *shares = known["wrong_first_hits"].values()
        shares = ["{share:.1%} ({chance:.1%})".format(**share) for share in shares]
        ranks = [f"{rank:.4f}" for rank in known["rank_correlation"].values()]
        rows.append([run["run"], f"{wrong} of {queries}", *shares, *ranks])
    return aligned(rows)


def radii_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats a line per run and space: the median radii."""
    rows = [["run", "space", *runs[0]["known_hierarchy"]["radii"]["flat"]]]
    for run in runs:
        for space, of_levels in run["known_hierarchy"]["radii"].items():
            rows.append([run["run"], space, *(f"{median:.3f}" for median in of_levels.values())])
    return aligned(rows)


def draw_tanglegram(
    tree: Tree, heights: Heights, levels: Groupings, groups: Groups, output: pathlib.Path
) -> None:
    """Draws a tree of classes, by heights, opposite the known one; groups colour the classes."""
    known = known_tree([level.labels for level in levels.values()])
    known_starts = known.sorted_starts(tree.starts()[: tree.leaves])
    starts = tree.sorted_starts(known_starts[: tree.leaves])
    names = list(itertools.chain(*(level.names for level in levels.values())))
    below_root = heights[-1] - heights[tree.leaves :]
    depths = np.append(np.ones(tree.leaves), below_root * (_INNER / max(below_root[0], 1e-9)))
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
        for name, y, group in zip(names, rows, groups, strict=False):
            _write(middle, x, y, name, color=hues[group], ha=align, va="center")
    lines = np.array(_LINKS) + 1j * np.stack(ends, axis=1)
    draw_lines(middle, lines, colors=hues[groups], linewidths=0.8)
    middle.set(xlim=(0, 1), ylim=(tree.leaves, 0))
    for axes in (left, middle, right):
        axes.axis("off")
    save(figure, output)


def _write(axes: Axes, x: float, y: float, name: str, **style: Any) -> None:
    axes.text(x, y, shortened(name, _NAME), fontsize=_SIZE, parse_math=False, **style)


def _draw_tree(
    axes: Axes,
    tree: Tree,
    x: np.ndarray,
    starts: np.ndarray,
    groups: Groups,
    hues: np.ndarray,
    names: Sequence[str] = (),
) -> None:
    """Draws a tree from its root at x = 0, and any names of its inner nodes but the root."""
    y = starts + tree.sizes / 2
    of_group = np.zeros((len(tree.parents), len(hues)))
    of_group[np.arange(tree.leaves), groups] = 1
    counts = tree.sums(of_group)
    pure = counts.max(axis=1) == tree.sizes
    hue = np.where(pure, hues[counts.argmax(axis=1)], OTHER)
    child = np.flatnonzero(tree.parents >= 0)
    above = tree.parents[child]
    corners = np.stack([x[above] + 1j * y[above], x[above] + 1j * y[child]], axis=1)
    edges = np.concatenate([corners, (x[child] + 1j * y[child])[:, None]], axis=1)
    draw_lines(axes, edges, colors=hue[child], linewidths=1)
    for node in range(tree.leaves, len(names)):
        middle = (x[node] + x[tree.parents[node]]) / 2
        _write(axes, middle, y[node], names[node], color=hue[node], ha="center", va="bottom")
    axes.set(xlim=(-0.01, 1.01))
