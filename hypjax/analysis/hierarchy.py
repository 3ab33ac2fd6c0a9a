"""The hierarchy in a run's embeddings of test images: trees, their scores, and files."""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from hypjax.analysis import disk, known_hierarchy, trees
from hypjax.analysis.hit_grid import DPI, Picture, draw_rows, save
from hypjax.analysis.known_hierarchy import Levels, Radii, draw_tanglegram, nested_levels
from hypjax.analysis.run_embeddings import ChosenImages, Points, scored_head
from hypjax.analysis.trees import Heights, Tree
from hypjax.data.groupings import CLASS
from hypjax.errors import writing
from hypjax.geometry import Space, spaces
from hypjax.inference.run import Run
from hypjax.runs.tables import aligned
from hypjax.system.files import write_json

_ROWS = 8  # Proxies whose images are shown.
_COLUMNS = 10  # Images of each.
_TANGLED = 120  # Largest number of classes in a tanglegram.

Affinity = Float[np.ndarray, "classes classes"]
Rows = Sequence[Sequence[Picture]]


class Hierarchy(NamedTuple):
    """Trees over images, from a run's embeddings."""

    scores: dict[str, Any]  # As in hierarchy.json, but NaN for undefined numbers.
    tree: Tree  # Of the proxies if there are any, else of average linkage.
    nodes: list[dict[str, Any]]  # Of the tree, as in tree.json.
    affinity: Affinity  # Similarity of classes, at the mean distance of their images.
    positions: disk.Positions | None  # Of the nodes; None without proxies, or in flat space.
    leaf_images: Rows  # Nearest images of proxies that are leaves.
    class_tree: Tree  # Average linkage of classes, by the mean distances of their images.
    class_heights: Heights


def hierarchy_of_run(run: Run, images: ChosenImages) -> Hierarchy:
    """Embeds images by `scored_head`, and finds their hierarchy."""
    head = scored_head(run)
    return find_hierarchy(run.name, head.embed(images.dataset), head.space, images, head.proxies)


def find_hierarchy(
    name: str, points: Points, space: Space, images: ChosenImages, proxies: Points | None = None
) -> Hierarchy:
    """Scores the tree of average linkage, and first the tree of proxies, if there are any."""
    distances = _distances(space, points, points)
    clusters, heights = trees.average_linkage(distances)
    of_classes = _class_means(distances, images.groupings[CLASS].labels)
    # Half the difference of heights, so that the path of two images is their ancestor's height.
    lengths = np.where(clusters.parents < 0, 0, (heights[clusters.parents] - heights) / 2)
    merged = enumerate(heights[clusters.leaves :].tolist())
    inner = [(f"cluster {i}", {"kind": "cluster", "height": height}) for i, height in merged]
    scores = {"run": name, "trees": [_scores("average linkage", clusters, images)]}
    if len(images.groupings) > 1:
        levels = {name: level.labels for name, level in nested_levels(images.groupings).items()}
        scores["known_hierarchy"] = {
            "levels": [*levels],
            "wrong_first_hits": known_hierarchy.wrong_first_hits(points, space, images.groupings),
            "rank_correlation": known_hierarchy.rank_correlations(distances, [*levels.values()]),
            "radii": known_hierarchy.radii(points, space, levels),
        }
    nodes, affinity = _nodes(clusters, lengths, images, inner), space.similarity(of_classes)
    classes = trees.average_linkage(of_classes)
    hierarchy = Hierarchy(scores, clusters, nodes, np.asarray(affinity), None, (), *classes)
    if proxies is None:
        return hierarchy
    return _with_proxies(hierarchy, points, proxies, space, images)


def _with_proxies(
    hierarchy: Hierarchy, points: Points, proxies: Points, space: Space, images: ChosenImages
) -> Hierarchy:
    """Adds the tree of the proxies, points of the space; its files replace average linkage's."""
    n, all_points = len(points), np.concatenate([points, proxies])
    measured = _distances(space, all_points, np.pad(proxies, ((0, 1), (0, 0))))
    distances, radii = measured[:, :-1], measured[:, -1]  # The last column is the origin's.
    above = trees.ancestors(distances, radii, radii[n:])
    tree, used = trees.ancestor_tree(above[:n], above[n:])
    in_tree = np.concatenate([np.arange(n), n + used])
    edges = np.where(above >= 0, distances[np.arange(len(radii)), above], radii)
    inner = [(f"proxy {proxy}", {"kind": "proxy"}) for proxy in used]
    nodes = _nodes(tree, [*edges[in_tree], 0.0], images, [*inner, ("origin", {"kind": "origin"})])
    for node, radius in zip(nodes, [*radii[in_tree].tolist(), 0.0], strict=True):
        node["radius"] = radius
    positions, ball = None, space.ball()
    if ball is not None and ball.c:
        # Layout: true distances from the origin, and angles from the tree, whose siblings stand in
        # the order of their images' first principal component.
        shown = np.concatenate([all_points[in_tree], 0 * points[:1]]).astype(np.float64)
        lengths = float(ball.c) ** 0.5 * np.linalg.norm(space.to_ball(shown), axis=1)
        _, components = np.linalg.eigh(np.cov(points, rowvar=False))
        starts = tree.sorted_starts(points @ components[:, -1])
        angles = (starts + tree.sizes / 2) * (2 * np.pi / tree.leaves)
        positions = lengths * np.exp(1j * angles)
    of_both = [_scores("proxies", tree, images), *hierarchy.scores["trees"]]
    of_radii = _scores_of_radii(distances[:n], radii[:n], radii[n:], used, above[:n])
    scores = {**hierarchy.scores, "trees": of_both, "radii": of_radii}
    rows = _leaf_images(distances[:n], tree, used, images)
    return Hierarchy(scores, tree, nodes, hierarchy.affinity, positions, rows, *hierarchy[-2:])


def _distances(space: Space, x: Points, y: Points) -> Float[np.ndarray, "n m"]:
    """Distances in float64."""
    with jax.enable_x64(True):
        return np.maximum(spaces.distance_matrix(space, np.float64(x), np.float64(y)), 0)


def _class_means(distances: np.ndarray, labels: np.ndarray) -> Affinity:
    """Mean distance of two images of each pair of classes; 0 for the pair of a single image."""
    members = (labels == np.arange(labels.max() + 1)[:, None]).astype(np.float64)
    counts = members.sum(axis=1)
    sums = members @ distances @ members.T - np.diag(members @ np.diagonal(distances))
    return sums / np.maximum(np.outer(counts, counts) - np.diag(counts), 1)


def _scores(kind: str, tree: Tree, images: ChosenImages) -> dict[str, Any]:
    classes, purities, separations = images.groupings[CLASS].labels, {}, {}
    for name, (labels, _) in images.groupings.items():
        chance = trees.chance_purity(tree, labels)
        purities[name] = {"purity": trees.purity(tree, labels), "chance": chance}
        if name != CLASS:
            nearer, correlation = trees.separation(tree, classes, labels)
            separations[name] = {"nearer": nearer, "correlation": correlation}
    return {
        "tree": kind,
        "inner_nodes": len(tree.parents) - tree.leaves,
        "depth": int(tree.depths[: tree.leaves].max()),
        "purity": purities,
        "separation": separations,
    }


def _scores_of_radii(
    distances: np.ndarray, radii: Radii, proxy_radii: Radii, used: np.ndarray, above: np.ndarray
) -> dict[str, float | int]:
    nearest_proxies, nearest = np.unique(np.argmin(distances, axis=1), return_inverse=True)
    medians = [np.median(radii[nearest == i]) for i in range(len(nearest_proxies))]
    inside = trees.farther_in(proxy_radii[nearest_proxies], medians)
    return {
        "median_of_images": float(np.median(radii)),
        "median_of_proxies_used": float(np.median(proxy_radii[used])) if len(used) else np.nan,
        "proxies": len(proxy_radii),
        "proxies_used": len(used),
        "nearest_proxies": len(nearest_proxies),
        "share_of_nearest_proxies_farther_in_than_their_images": float(np.mean(inside)),
        "share_of_images_beneath_no_proxy": float(np.mean(above < 0)),
    }


def _leaf_images(distances: np.ndarray, tree: Tree, used: np.ndarray, images: ChosenImages) -> Rows:
    """Nearest images of the largest leaf proxies; frames mark the images beneath them."""
    n, above = tree.leaves, tree.parents[: tree.leaves]
    counts = np.bincount(above, minlength=len(tree.parents))
    childless = np.setdiff1d(np.arange(n, n + len(used)), tree.parents[n:])
    rows = []
    for node in childless[np.argsort(-counts[childless], kind="stable")][:_ROWS]:
        proxy, row = used[node - n], []
        for image in np.argsort(distances[:, proxy], kind="stable")[:_COLUMNS].tolist():
            head = "" if row else f"proxy {proxy}, {counts[node]} images\n"
            colour = "tab:blue" if above[image] == node else "none"
            row.append(Picture(image, head + images.dataset.class_name(image), colour))
        rows.append(row)
    return rows


def _nodes(
    tree: Tree, lengths: Sequence[float], images: ChosenImages, inner: Sequence[tuple[str, dict]]
) -> list[dict[str, Any]]:
    """Rows of tree.json: the images, then the inner nodes with their names and facts."""
    described = []
    for i, index in enumerate(images.indices.tolist()):
        of_image = {n: g.names[g.labels[i]] for n, g in images.groupings.items()}
        described.append((images.dataset.name(i), {"kind": "image", "index": index, **of_image}))
    rows = zip(tree.parents.tolist(), map(float, lengths), [*described, *inner], strict=True)
    return [
        {"parent": parent if parent >= 0 else None, "name": name, "length": length, **facts}
        for parent, length, (name, facts) in rows
    ]


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats tables of runs' `scores`; the first has no title."""
    texts = [_scores_table(runs)]
    if any("radii" in run for run in runs):
        texts.append(_radii_table(runs))
    if "known_hierarchy" in runs[0]:
        levels = ", ".join(runs[0]["known_hierarchy"]["levels"])
        title = f"first hits, and distances in the known hierarchy of {levels}:"
        texts.append(f"{title}\n{known_hierarchy.agreement_table(runs)}")
        texts.append(f"median distance from the origin:\n{known_hierarchy.radii_table(runs)}")
    return "\n\n".join(texts)


def _scores_table(runs: Sequence[Mapping[str, Any]]) -> str:
    first = runs[0]["trees"][0]
    groupings, columns = [""] * 4, ["run", "tree", "inner nodes", "depth"]
    for name in first["purity"]:
        further = ["same nearer", "correlation"] * (name in first["separation"])
        columns += ["purity (chance)", *further]
        groupings += [f"{name}:", *[""] * len(further)]
    rows = [groupings, columns]
    for name, tree in ((run["run"], tree) for run in runs for tree in run["trees"]):
        row = [name, tree["tree"], str(tree["inner_nodes"]), str(tree["depth"])]
        for grouping, purities in tree["purity"].items():
            row.append("{:.4f} ({:.4f})".format(*purities.values()))
            row += [f"{value:.4f}" for value in tree["separation"].get(grouping, {}).values()]
        rows.append(row)
    return aligned(rows)


def _radii_table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["run", "proxies used", "median radius: images", "proxies", "nearest proxies"]
    rows = [[*head, "farther in than their images", "images beneath none"]]
    for run in (run for run in runs if "radii" in run):
        images, of_used, proxies, used, nearest, inside, rootless = run["radii"].values()
        row = [run["run"], f"{used} of {proxies}", f"{images:.3f}", f"{of_used:.3f}"]
        rows.append([*row, str(nearest), f"{inside:.1%}", f"{rootless:.1%}"])
    return aligned(rows)


def write(hierarchy: Hierarchy, images: ChosenImages, parent: pathlib.Path) -> list[pathlib.Path]:
    """Writes a run's tree and figures to a folder of its name; returns the files."""
    folder = parent / hierarchy.scores["run"].strip("/").replace("/", "-")
    names = ("tree.json", "affinity.png", "trees.png", "disk.png", "leaves.png")
    files = tree, affinity, tangled, in_disk, leaves = [folder / name for name in names]
    with writing(folder):
        folder.mkdir(exist_ok=True)
        write_json(tree, hierarchy.nodes)
        for old in files[2:]:  # Not every run has them.
            old.unlink(missing_ok=True)
    first = np.unique(images.groupings[CLASS].labels, return_index=True)[1]  # Of each class.
    groups = {n: g.labels[first] for n, g in images.groupings.items() if n != CLASS}
    _draw_affinity(hierarchy, groups, affinity)
    levels = nested_levels(images.groupings)
    if len(levels) > 1 and len(hierarchy.affinity) <= _TANGLED:
        *_, widest = levels.values()
        classes = hierarchy.class_tree, hierarchy.class_heights
        draw_tanglegram(*classes, levels, widest.labels[first], tangled)
    if hierarchy.positions is not None:  # Groups colour the leaves of the tree of the proxies.
        n, legend = hierarchy.tree.leaves, disk.default_grouping(images.groupings)
        labels, names = images.groupings[legend]
        above, parents = np.split(hierarchy.tree.parents - n, [n])
        proxies = disk.Proxies(hierarchy.positions[n:], np.maximum(parents, -1), above)
        panel = disk.Panel("", hierarchy.positions[:n], labels, [], None)
        disk.draw_disks(disk.Drawing([panel], names, legend, proxies), in_disk)
    if hierarchy.leaf_images:
        draw_rows(hierarchy.leaf_images, leaves, functools.partial(disk.read_rgb, images.dataset))
    return [file for file in files if file.exists()]


def _draw_affinity(hierarchy: Hierarchy, groups: Levels, output: pathlib.Path) -> None:
    """Draws affinities, sorted by groups and within these by average linkage, beside the groups."""
    affinity = hierarchy.affinity
    alike = hierarchy.class_tree.starts()[: len(affinity)]
    order = np.lexsort((alike, *reversed(groups.values())))
    apart = affinity[~np.eye(len(affinity), dtype=bool)]
    panels = [("affinity", affinity, np.quantile(apart, (0.01, 0.995)), {"extend": "both"})]
    if groups:
        title = "number of equal groups: " if len(groups) > 1 else "same "
        title += ", ".join(groups)
        equal = sum(group[:, None] == group for group in groups.values())
        panels.append((title, equal, (0, len(groups)), {"ticks": range(len(groups) + 1)}))
    figure = Figure(figsize=(4.6 * len(panels), 4.6), dpi=DPI, layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, panel, (low, high), bar) in zip(row, panels, strict=True):
        style = {"vmin": low, "vmax": high, "cmap": "cividis", "interpolation": "nearest"}
        matrix = axes.imshow(panel[np.ix_(order, order)], **style)
        axes.set(xticks=[], yticks=[], xlabel=f"{len(affinity)} classes")
        axes.set_title(title, fontsize=11, parse_math=False)
        if panel is affinity or len(groups) > 1:
            figure.colorbar(matrix, ax=axes, shrink=0.85, **bar)
    save(figure, output)
