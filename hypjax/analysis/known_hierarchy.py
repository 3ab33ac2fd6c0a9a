"""How embeddings agree with a known hierarchy: groups of classes, groups of these, and so on."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from hypjax.analysis.run_embeddings import Points
from hypjax.analysis.trees import Tree, farther_in
from hypjax.data.groupings import CLASS, Grouping
from hypjax.geometry import Fused, Space, lorentz
from hypjax.retrieval import nearest_neighbors
from hypjax.runs.tables import aligned

Groups = Int[np.ndarray, " images"]  # Number of each image's group, from 0 without gaps.


def nested_levels(groupings: Mapping[str, Grouping]) -> dict[str, Grouping]:
    """The known hierarchy: the classes, then coarser and coarser groupings.

    Each grouping is one in which the one before is nested: every group lies in one larger group. Of
    the others, which are left out, none is.
    """
    found = {CLASS: groupings[CLASS]}
    for name in sorted(groupings, key=lambda name: -len(groupings[name].names)):
        fine, coarse = next(reversed(found.values())), groupings[name]
        pairs = np.unique(np.stack([fine.labels, coarse.labels]), axis=1)
        nested = pairs.shape[1] == len(fine.names)
        if nested and 1 < len(coarse.names) < len(fine.names):
            found[name] = coarse
    return found


def known_tree(levels: Sequence[Groups]) -> Tree:
    """The tree whose leaves are the groups of the first level; those of the next are above them."""
    parents, first = [], 0
    for fine, coarse in itertools.pairwise([*levels, np.zeros_like(levels[0])]):
        first += fine.max() + 1
        above = np.empty(fine.max() + 1, int)
        above[fine] = first + coarse
        parents.append(above)
    return Tree(np.concatenate([*parents, [-1]]), levels[0].max() + 1)


def measure(
    points: Points,
    space: Space,
    distances: Float[np.ndarray, "n n"],
    groupings: Mapping[str, Grouping],
) -> dict[str, Any]:
    """Compares embeddings, and their distances in float64, with what classes are grouped by.

    Returns:
        What `wrong_first_hits`, `rank_correlations` and `radii` find, and the names of the levels
        of the known hierarchy, to which the latter two refer.
    """
    levels = nested_levels(groupings)
    labels = [level.labels for level in levels.values()]
    return {
        "levels": [*levels],
        "wrong_first_hits": wrong_first_hits(points, space, groupings),
        "rank_correlation": rank_correlations(distances, labels),
        "radii": radii(points, space, {name: level.labels for name, level in levels.items()}),
    }


def wrong_first_hits(
    points: Points, space: Space, groupings: Mapping[str, Grouping]
) -> dict[str, Any]:
    """How often a nearest image of the wrong class is of the right group, by exact search.

    Queries are the images with another one of their class. By chance the hit would be a random
    image of another class.

    Returns:
        The numbers of queries and of wrong hits, and for each grouping beyond the classes the share
        of wrong hits of the query's group, and what it is by chance; NaN without any.
    """
    classes = groupings[CLASS].labels
    hits = nearest_neighbors(points, points, k=1, space=space, exclude_self=True)[1][:, 0]
    of_class = np.bincount(classes)[classes]
    wrong = np.flatnonzero((of_class > 1) & (classes[hits] != classes))
    found: dict[str, Any] = {"queries": int(np.sum(of_class > 1)), "wrong": len(wrong)}
    for name, (groups, _) in groupings.items():
        if name == CLASS:
            continue
        pairs = np.stack([classes, groups])
        place, counts = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)[1:]
        of_both = counts[place.reshape(-1)]
        same = groups[hits[wrong]] == groups[wrong]
        chance = (np.bincount(groups)[groups] - of_both)[wrong] / (len(points) - of_class[wrong])
        share, by_chance = (float(np.mean(x)) if len(wrong) else np.nan for x in (same, chance))
        found[name] = {"share": share, "chance": by_chance}
    return found


def rank_correlations(
    distances: Float[np.ndarray, "n n"], levels: Sequence[Groups]
) -> dict[str, float]:
    """Spearman's correlation of distances with those in the tree of the known hierarchy.

    The distance of two images in the tree is the number of levels at which their groups differ: 0
    in one class, 1 in one group of the first grouping, and so on. One correlation is over all
    pairs, and one over those of different classes; NaN if all distances, of either kind, are equal.
    """
    from scipy.stats import spearmanr

    once = np.tri(len(distances), k=-1, dtype=bool)
    apart = sum((level[:, None] != level).astype(np.int8) for level in levels)[once]
    embedded = distances[once]
    pairs = {"all_pairs": slice(None), "different_classes": apart > 0}
    found = {}
    for name, chosen in pairs.items():
        x, y = embedded[chosen], apart[chosen]
        constant = min(np.ptp(x), np.ptp(y)) == 0 if len(x) else True
        found[name] = np.nan if constant else float(spearmanr(x, y).statistic)
    return found


def radii(
    points: Points, space: Space, levels: Mapping[str, Groups]
) -> dict[str, dict[str, dict[str, float]]]:
    """Distances from the origin of images, of the centres of their groups, and of that of all.

    In the ball, the centre of images is their centroid on the hyperboloid, which is Einstein's
    midpoint (Law et al., "Lorentzian Distance Learning", ICML 2019); in flat space, the mean of
    their features. Flat distances are 2‖x‖, the limit of the ball's for c → 0, so that an image is
    as far from the origin in both.

    Returns:
        For "ball", if the space is one or has one, and for "flat": the median radius of each level,
        and, of its nodes with several children, the share nearer to the origin than the median of
        these; NaN without any.
    """
    nodes = {"image": np.arange(len(points)), **levels, "all": np.zeros(len(points), int)}
    found = {}
    if (lifted := _on_hyperboloid(space, points)) is not None:
        found["ball"] = {name: _radii_in_ball(*lifted, groups) for name, groups in nodes.items()}
    with jax.enable_x64(True):
        features = np.asarray(space.features(np.asarray(points, np.float64)))
    found["flat"] = {
        name: 2 * np.linalg.norm(_sums(features, groups), axis=1) / np.bincount(groups)
        for name, groups in nodes.items()
    }
    return {name: _of_levels(nodes, of_nodes) for name, of_nodes in found.items()}


def _on_hyperboloid(space: Space, points: Points) -> tuple[Float[np.ndarray, "n d"], float] | None:
    """Points of a space that is, or has, one with a ball, on its hyperboloid; and its c."""
    parts = [(space, points)]
    if isinstance(space, Fused):
        coordinates = map(np.asarray, space.split(points))
        parts = [(part, x) for (part, _), x in zip(space.parts, coordinates, strict=True)]
    for part, x in parts:
        ball = part.ball()
        if ball is not None and ball.c:
            c = float(ball.c)
            with jax.enable_x64(True):
                in_ball = part.to_ball(np.asarray(x, np.float64))
                return np.asarray(lorentz.with_time(lorentz.from_poincare(in_ball, c), c)), c
    return None


def _radii_in_ball(
    lifted: Float[np.ndarray, "n d"], c: float, groups: Groups
) -> Float[np.ndarray, " groups"]:
    sums = _sums(lifted, groups)
    time, across = sums[:, 0], np.linalg.norm(sums[:, 1:], axis=1)
    return np.arcsinh(across / np.sqrt((time - across) * (time + across))) / c**0.5


def _sums(x: Float[np.ndarray, "n d"], groups: Groups) -> Float[np.ndarray, "groups d"]:
    sums = np.zeros((groups.max() + 1, x.shape[1]))
    np.add.at(sums, groups, x)
    return sums


def _of_levels(
    nodes: Mapping[str, Groups], of_nodes: Mapping[str, Float[np.ndarray, " nodes"]]
) -> dict[str, dict[str, float]]:
    found = {"image": {"median": float(np.median(of_nodes["image"]))}}
    for child, parent in itertools.pairwise(nodes):
        above = np.empty(len(of_nodes[child]), int)
        above[nodes[child]] = nodes[parent]
        inside = [
            farther_in(of_nodes[parent][i], np.median(of_nodes[child][above == i]))
            for i in np.flatnonzero(np.bincount(above) > 1)
        ]
        share = float(np.mean(inside)) if inside else np.nan
        median = float(np.median(of_nodes[parent]))
        found[parent] = {"median": median, "share_nearer_than_its_children": share}
    return found


def agreement_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line per run: its wrong first hits, and rank correlations; of `scores`."""
    found = {run["run"]: run["known_hierarchy"] for run in runs}
    first = next(iter(found.values()))
    names = [*first["wrong_first_hits"]][2:]
    groups = ["", "", "of the right group (chance):", *[""] * (len(names) - 1)]
    rows = [[*groups, "rank correlation:", ""]]
    rows.append(["run", "wrong first hits", *names, "all pairs", "different classes"])
    for run, each in found.items():
        hits = each["wrong_first_hits"]
        row = [run, f"{hits['wrong']} of {hits['queries']}"]
        row += [f"{hits[name]['share']:.1%} ({hits[name]['chance']:.1%})" for name in names]
        rows.append([*row, *(f"{value:.4f}" for value in each["rank_correlation"].values())])
    return aligned(rows)


def radii_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line per run and space: median radii, and shares nearer than their children."""
    names = [*runs[0]["known_hierarchy"]["radii"]["flat"]]
    rows = [["run", "space", *names]]
    for run in runs:
        for space, of_levels in run["known_hierarchy"]["radii"].items():
            images, *others = of_levels.values()
            row = [run["run"], space, f"{images['median']:.3f}"]
            row += ["{:.3f} ({:.0%})".format(*each.values()) for each in others]
            rows.append(row)
    return aligned(rows)
