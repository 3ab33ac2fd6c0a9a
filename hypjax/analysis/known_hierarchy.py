"""Agreement of embeddings with a known hierarchy of classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from hypjax.analysis.run_embeddings import Points
from hypjax.analysis.trees import Distances
from hypjax.data.groupings import CLASS, Grouping
from hypjax.geometry import Space
from hypjax.retrieval import nearest_neighbors
from hypjax.runs.tables import aligned

Groups = Int[np.ndarray, " images"]  # Number of each image's group, from 0 without gaps.
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
