"""The hierarchy in a run's embeddings of test images: trees, scores, tables and figures."""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from hypjax.analysis import disk, trees
from hypjax.analysis.hit_grid import DPI, Picture, draw_rows, save
from hypjax.analysis.run_embeddings import ChosenImages, Points, scored_head
from hypjax.analysis.trees import Radii, Tree
from hypjax.data.groupings import CLASS, Grouping
from hypjax.errors import writing
from hypjax.experiment.experiment import Experiment
from hypjax.geometry import Space, spaces
from hypjax.retrieval import nearest_neighbors
from hypjax.runs.tables import aligned
from hypjax.system.files import write_json

_ROWS = 8  # Proxies whose images are shown.
_COLUMNS = 10  # Images of each.

Rows = Sequence[Sequence[Picture]]


class Hierarchy(NamedTuple):
    """Trees over images, from a run's embeddings."""

    scores: dict[str, Any]  # As in hierarchy.json, but NaN for undefined numbers.
    tree: Tree  # The tree of proxies if the run has proxies, else average linkage's.
    nodes: list[dict[str, Any]]  # Rows of tree.json.
    affinity: Float[np.ndarray, "classes classes"]  # Similarity, from mean distances of images.
    positions: disk.Positions | None  # Layout of the tree's nodes; None without proxies or a ball.
    leaf_images: Rows  # Nearest images of proxies that are leaves.
    class_tree: Tree  # Average linkage of classes, by the mean distances of their images.


def hierarchy_of_run(run: Experiment, images: ChosenImages) -> Hierarchy:
    """Embeds images with a run's best model, and finds their hierarchy."""
    head = scored_head(run)
    return find_hierarchy(run.name, head.embed(images.dataset), head.space, images, head.proxies)


def find_hierarchy(
    name: str, points: Points, space: Space, images: ChosenImages, proxies: Points | None = None
) -> Hierarchy:
    """Finds the trees of average linkage and of any proxies, and scores both."""
    distances = _distances(space, points, points)
    clusters, heights = trees.average_linkage(distances)
    scores: dict[str, Any] = {"run": name, "trees": [_scores("average linkage", clusters, images)]}
    if len(images.groupings) > 1:
        levels = nested_levels(images.groupings)
        scores["known_hierarchy"] = {
            "levels": [*levels],
            "wrong_first_hits": wrong_first_hits(points, space, images.groupings),
            "rank_correlation": rank_correlations(distances, [x.labels for x in levels.values()]),
        }
    # Half the difference of heights, so that the path between two images is as long as the height
    # at which they merge.
    lengths = np.where(clusters.parents < 0, 0, (heights[clusters.parents] - heights) / 2)
    inner_heights = enumerate(heights[clusters.leaves :].tolist())
    inner = [(f"cluster {i}", {"kind": "cluster", "height": height}) for i, height in inner_heights]
    nodes = _nodes(clusters, lengths, images, inner)
    class_distances = _class_means(distances, images.groupings[CLASS].labels)
    affinity = np.asarray(space.similarity(class_distances))
    class_tree, _ = trees.average_linkage(class_distances)
    hierarchy = Hierarchy(scores, clusters, nodes, affinity, None, (), class_tree)
    if proxies is None:
        return hierarchy
    return _with_proxies(hierarchy, points, proxies, space, images)


def _with_proxies(
    hierarchy: Hierarchy, points: Points, proxies: Points, space: Space, images: ChosenImages
) -> Hierarchy:
    """Replaces the tree of average linkage by the proxies' tree; keeps the scores of both."""
    n = len(points)
    all_points = np.concatenate([points, proxies])
    distances = _distances(space, all_points, np.pad(proxies, ((0, 1), (0, 0))))
    to_proxies, radii = distances[:, :-1], distances[:, -1]  # The last is the origin.
    parents = trees.ancestors(to_proxies, radii, radii[n:])
    tree, used = trees.ancestor_tree(parents[:n], parents[n:])
    in_tree = np.concatenate([np.arange(n), n + used])  # All nodes but the origin, the last.
    lengths = np.where(parents >= 0, to_proxies[np.arange(len(radii)), parents], radii)
    inner = [(f"proxy {proxy}", {"kind": "proxy"}) for proxy in used]
    inner.append(("origin", {"kind": "origin"}))
    nodes = _nodes(tree, [*lengths[in_tree], 0.0], images, inner)
    for node, radius in zip(nodes, [*radii[in_tree].tolist(), 0.0], strict=True):
        node["radius"] = radius
    scores = {
        **hierarchy.scores,
        "trees": [_scores("proxies", tree, images), *hierarchy.scores["trees"]],
        "radii": _scores_of_radii(to_proxies[:n], radii[:n], radii[n:], used, parents[:n]),
    }
    leaf_images = _leaf_images(to_proxies[:n], tree, used, images)
    with_origin = np.pad(all_points[in_tree], ((0, 1), (0, 0)))
    ball: Any = space.ball()
    positions = _positions(tree, with_origin, space, ball.c) if ball and ball.c else None
    return hierarchy._replace(
        scores=scores, tree=tree, nodes=nodes, positions=positions, leaf_images=leaf_images
    )


def _positions(tree: Tree, points: Points, space: Space, c: float) -> disk.Positions:
    """Places a tree in the disk at its nodes' true distances from the origin.

    Angles follow the tree, with siblings in the order of their images' first principal component.
    """
    in_ball = np.asarray(space.to_ball(points.astype(np.float64)))
    moduli = float(c) ** 0.5 * np.linalg.norm(in_ball, axis=1)
    images = points[: tree.leaves]
    _, components = np.linalg.eigh(np.cov(images, rowvar=False))
    angles = (tree.starts(images @ components[:, -1]) + tree.sizes / 2) * (2 * np.pi / tree.leaves)
    return moduli * np.exp(1j * angles)


def nested_levels(groupings: Mapping[str, Grouping]) -> dict[str, Grouping]:
    """The classes, then ever coarser groupings whose groups are unions of the previous groups."""
    levels = {CLASS: groupings[CLASS]}
    for name, coarse in sorted(groupings.items(), key=lambda item: -len(item[1].names)):
        fine = list(levels.values())[-1]
        pairs = np.unique(np.stack([fine.labels, coarse.labels]), axis=1)
        nested = pairs.shape[1] == len(fine.names)  # Each fine group is in one coarse group.
        if nested and 1 < len(coarse.names) < len(fine.names):
            levels[name] = coarse
    return levels


def wrong_first_hits(
    points: Points, space: Space, groupings: Mapping[str, Grouping]
) -> dict[str, Any]:
    """Counts nearest images of a wrong class, and those of them that are in the query's group.

    Queries are the images with another image of their class.

    Returns:
        "queries" and "wrong", the numbers of queries and of wrong nearest images; for each
        grouping, the "share" of wrong images in the query's group, and the share by "chance", if
        wrong images were random images of other classes.
    """
    classes = groupings[CLASS].labels
    hits = nearest_neighbors(points, points, k=1, space=space, exclude_self=True)[1][:, 0]
    class_sizes = np.bincount(classes)[classes]  # Of each image's class.
    wrong = np.flatnonzero((class_sizes > 1) & (classes[hits] != classes))
    scores: dict[str, Any] = {"queries": int(np.sum(class_sizes > 1)), "wrong": len(wrong)}
    for name, (groups, _) in groupings.items():
        if name == CLASS:
            continue
        _, pairs = np.unique(np.stack([classes, groups]), axis=1, return_inverse=True)
        in_class_and_group = np.bincount(pairs.ravel())[pairs.ravel()]
        others_in_group = np.bincount(groups)[groups] - in_class_and_group
        chance = others_in_group[wrong] / (len(points) - class_sizes[wrong])
        same_group = groups[hits[wrong]] == groups[wrong]
        scores[name] = {
            "share": float(np.mean(same_group)) if len(wrong) else np.nan,
            "chance": float(np.mean(chance)) if len(wrong) else np.nan,
        }
    return scores


def rank_correlations(
    distances: trees.Distances, levels: Sequence[Int[np.ndarray, " images"]]
) -> dict[str, float]:
    """Spearman's correlation of images' distances with the number of levels that separate them.

    Over all pairs, and over pairs of different classes; NaN if all distances are equal.
    """
    from scipy.stats import spearmanr

    pairs = np.tri(len(distances), k=-1, dtype=bool)  # Each pair once.
    num_levels = sum((level[:, None] != level).astype(np.int8) for level in levels)[pairs]
    correlations = {}
    for name, chosen in (("all_pairs", num_levels >= 0), ("different_classes", num_levels > 0)):
        x, y = distances[pairs][chosen], num_levels[chosen]
        constant = not len(x) or np.ptp(x) == 0 or np.ptp(y) == 0
        correlations[name] = np.nan if constant else float(spearmanr(x, y).statistic)
    return correlations


def _distances(space: Space, x: Points, y: Points) -> Float[np.ndarray, "n m"]:
    """Distances computed in float64, none below 0."""
    with jax.enable_x64(True):
        return np.maximum(spaces.distance_matrix(space, np.float64(x), np.float64(y)), 0)


def _class_means(distances: np.ndarray, labels: np.ndarray) -> Float[np.ndarray, "classes classes"]:
    """Mean distance of two images, for each pair of classes; 0 for a class with a single image."""
    members = (labels == np.arange(labels.max() + 1)[:, None]).astype(np.float64)
    counts = members.sum(axis=1)
    sums = members @ distances @ members.T - np.diag(members @ np.diagonal(distances))
    return sums / np.maximum(np.outer(counts, counts) - np.diag(counts), 1)


def _scores(kind: str, tree: Tree, images: ChosenImages) -> dict[str, Any]:
    purities, separations = {}, {}
    for name, (labels, _) in images.groupings.items():
        chance = trees.chance_purity(tree, labels)
        purities[name] = {"purity": trees.purity(tree, labels), "chance": chance}
        if name != CLASS:
            nearer, correlation = trees.separation(tree, images.groupings[CLASS].labels, labels)
            separations[name] = {"nearer": nearer, "correlation": correlation}
    return {
        "tree": kind,
        "inner_nodes": len(tree.parents) - tree.leaves,
        "depth": int(tree.depths[: tree.leaves].max()),
        "purity": purities,
        "separation": separations,
    }


def _scores_of_radii(
    distances: np.ndarray, radii: Radii, proxy_radii: Radii, used: np.ndarray, parents: np.ndarray
) -> dict[str, float | int]:
    """Compares distances from the origin of images and proxies; `used` proxies are in the tree."""
    nearest_proxies, nearest = np.unique(np.argmin(distances, axis=1), return_inverse=True)
    medians = [np.median(radii[nearest == i]) for i in range(len(nearest_proxies))]
    inside = trees.farther_in(proxy_radii[nearest_proxies], np.array(medians))
    return {
        "median_of_images": float(np.median(radii)),
        "median_of_proxies_used": float(np.median(proxy_radii[used])) if len(used) else np.nan,
        "proxies": len(proxy_radii),
        "proxies_used": len(used),
        "nearest_proxies": len(nearest_proxies),
        "share_of_nearest_proxies_farther_in_than_their_images": float(np.mean(inside)),
        "share_of_images_beneath_no_proxy": float(np.mean(parents < 0)),
    }


def _leaf_images(distances: np.ndarray, tree: Tree, used: np.ndarray, images: ChosenImages) -> Rows:
    """Images nearest to the largest childless proxies; frames mark a proxy's own images."""
    n, parents = tree.leaves, tree.parents[: tree.leaves]
    counts = np.bincount(parents, minlength=len(tree.parents))
    leaf_proxies = np.setdiff1d(np.arange(n, n + len(used)), tree.parents[n:])
    rows = []
    for node in leaf_proxies[np.argsort(-counts[leaf_proxies], kind="stable")][:_ROWS]:
        proxy = used[node - n]
        row: list[Picture] = []
        for image in np.argsort(distances[:, proxy], kind="stable")[:_COLUMNS].tolist():
            title = "" if row else f"proxy {proxy}, {counts[node]} images\n"
            colour = "tab:blue" if parents[image] == node else "none"
            row.append(Picture(image, title + images.dataset.class_name(image), colour))
        rows.append(row)
    return rows


def _nodes(
    tree: Tree, lengths: Any, images: ChosenImages, inner: Sequence[tuple[str, dict]]
) -> list[dict[str, Any]]:
    """Rows of tree.json: the images, then the `inner` nodes, which have names and facts."""
    named = []
    for i, index in enumerate(images.indices.tolist()):
        groups = {name: names[labels[i]] for name, (labels, names) in images.groupings.items()}
        named.append((images.dataset.name(i), {"kind": "image", "index": index, **groups}))
    rows = zip(tree.parents.tolist(), lengths, [*named, *inner], strict=True)
    return [
        {"parent": parent if parent >= 0 else None, "name": name, "length": float(x), **facts}
        for parent, x, (name, facts) in rows
    ]


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats the tables that compare runs, from their `Hierarchy.scores`."""
    texts = [_scores_table(runs)]
    if any("radii" in run for run in runs):
        texts.append(_radii_table(runs))
    if "known_hierarchy" in runs[0]:
        levels = ", ".join(runs[0]["known_hierarchy"]["levels"])
        title = f"first hits, and distances in the known hierarchy of {levels}:"
        texts.append(f"{title}\n{_agreement_table(runs)}")
    return "\n\n".join(texts)


def _scores_table(runs: Sequence[Mapping[str, Any]]) -> str:
    first_tree = runs[0]["trees"][0]
    groupings, columns = ["", "", "", ""], ["run", "tree", "inner nodes", "depth"]
    for name in first_tree["purity"]:
        groupings.append(f"{name}:")
        columns.append("purity (chance)")
        if name in first_tree["separation"]:
            groupings += ["", ""]
            columns += ["same nearer", "correlation"]
    rows = [groupings, columns]
    for run in runs:
        for tree in run["trees"]:
            row = [run["run"], tree["tree"], str(tree["inner_nodes"]), str(tree["depth"])]
            for grouping, purities in tree["purity"].items():
                row.append("{:.4f} ({:.4f})".format(*purities.values()))
                row += [f"{value:.4f}" for value in tree["separation"].get(grouping, {}).values()]
            rows.append(row)
    return aligned(rows)


def _agreement_table(runs: Sequence[Mapping[str, Any]]) -> str:
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


def _radii_table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["run", "proxies used", "median radius: images", "proxies", "nearest proxies"]
    rows = [[*head, "farther in than their images", "images beneath none"]]
    for run in runs:
        if "radii" not in run:
            continue
        image_radius, proxy_radius, proxies, used, nearest, inside, rootless = run["radii"].values()
        row = [run["run"], f"{used} of {proxies}", f"{image_radius:.3f}", f"{proxy_radius:.3f}"]
        rows.append([*row, str(nearest), f"{inside:.1%}", f"{rootless:.1%}"])
    return aligned(rows)


def write(hierarchy: Hierarchy, images: ChosenImages, parent: pathlib.Path) -> list[pathlib.Path]:
    """Writes a run's tree and figures to a folder named after the run; returns the files."""
    folder = parent / hierarchy.scores["run"].strip("/").replace("/", "-")
    files = [folder / name for name in ("tree.json", "affinity.png", "disk.png", "leaves.png")]
    tree_file, affinity_file, disk_file, leaves_file = files
    with writing(folder):
        folder.mkdir(exist_ok=True)
        write_json(tree_file, hierarchy.nodes)
        for optional in (disk_file, leaves_file):
            optional.unlink(missing_ok=True)  # Left by an earlier call.
    read = functools.partial(disk.read_rgb, images.dataset)
    _draw_affinity(hierarchy, images, affinity_file)
    if hierarchy.positions is not None:  # The proxies' tree, its images coloured by group.
        grouping = disk.default_grouping(images.groupings)
        labels, names = images.groupings[grouping]
        n = hierarchy.tree.leaves
        image_parents, parents = np.split(hierarchy.tree.parents - n, [n])  # The root's: −1 − n.
        proxies = disk.Proxies(hierarchy.positions[n:], np.maximum(parents, -1), image_parents)
        panel = disk.Panel("", hierarchy.positions[:n], labels, read)
        disk.draw_disks(disk.Drawing([panel], names, grouping, proxies), disk_file)
    if hierarchy.leaf_images:
        draw_rows(hierarchy.leaf_images, leaves_file, read)
    return [file for file in files if file.exists()]


def _draw_affinity(hierarchy: Hierarchy, images: ChosenImages, output: pathlib.Path) -> None:
    """Draws the affinity of classes and, next to it, the number of groups that two classes share.

    Classes are sorted by groups, and within groups by average linkage.
    """
    first_of_class = np.unique(images.groupings[CLASS].labels, return_index=True)[1]
    groups = {n: g.labels[first_of_class] for n, g in images.groupings.items() if n != CLASS}
    affinity = hierarchy.affinity
    linkage_order = hierarchy.class_tree.starts()[: len(affinity)]
    order = np.lexsort((linkage_order, *reversed(groups.values())))  # The last key counts most.
    limits = np.quantile(affinity[~np.eye(len(affinity), dtype=bool)], (0.01, 0.995))
    # Each panel's title, matrix, limits, and the colour bar's ticks.
    panels: list[tuple[str, Any, Any, Any]] = [("affinity", affinity, limits, None)]
    if groups:
        title = "number of equal groups: " if len(groups) > 1 else "same "
        title += ", ".join(groups)
        num_equal = sum(group[:, None] == group for group in groups.values())
        panels.append((title, num_equal, (0, len(groups)), range(len(groups) + 1)))
    figure = Figure(figsize=(4.6 * len(panels), 4.6), dpi=DPI, layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, matrix, limits, ticks) in zip(row, panels, strict=True):
        image = axes.imshow(matrix[np.ix_(order, order)], "cividis", interpolation="nearest")
        image.set_clim(*limits)
        axes.set(xticks=[], yticks=[], xlabel=f"{len(affinity)} classes")
        axes.set_title(title, fontsize=11, parse_math=False)
        if matrix is affinity or len(groups) > 1:
            extend = "both" if matrix is affinity else None
            figure.colorbar(image, ax=axes, shrink=0.85, ticks=ticks, extend=extend)
    save(figure, output)
