"""The hierarchies that runs find: their numbers as text and as JSON, and trees as files."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from hypjax.analysis.trees import Separation, Tree


class Purity(NamedTuple):
    """Dendrogram purity of a tree for one grouping of its images.

    Attributes:
        purity: The purity.
        chance: Its mean over all permutations of the images.
    """

    purity: float
    chance: float


class Scores(NamedTuple):
    """How well a tree fits groupings of its images.

    Attributes:
        kind: "proxies" or "average linkage".
        inner: Number of its inner nodes.
        depth: Largest number of edges from the root to an image.
        purity: By grouping.
        separation: By grouping other than the classes.
    """

    kind: str
    inner: int
    depth: int
    purity: Mapping[str, Purity]
    separation: Mapping[str, Separation]


class Radii(NamedTuple):
    """Where the images and the hierarchical proxies of a run are.

    Attributes:
        images: Median distance of the images from the origin.
        used: Median distance from the origin of the proxies with an image beneath them.
        proxies: Number of all proxies.
        number_used: Number of those with an image beneath them.
        nearest: Number of proxies that are the nearest one of some image.
        inside: Share of these that are closer to the origin than the median of those images.
        rootless: Share of images without any proxy above them.
    """

    images: float
    used: float
    proxies: int
    number_used: int
    nearest: int
    inside: float
    rootless: float


class Found(NamedTuple):
    """The hierarchy of a run.

    Attributes:
        run: Name of the run.
        trees: Scores of its trees.
        radii: None for a run without hierarchical proxies.
    """

    run: str
    trees: Sequence[Scores]
    radii: Radii | None


class Nodes(NamedTuple):
    """A tree with what its nodes are.

    Attributes:
        tree: The tree.
        names: Unique names of the nodes.
        facts: What is known of each node.
        lengths: Length of the edge from each node to its parent; 0 for the root.
    """

    tree: Tree
    names: Sequence[str]
    facts: Sequence[Mapping[str, Any]]
    lengths: Float[np.ndarray, " nodes"]


def scores_table(runs: Sequence[Found]) -> str:
    """Returns one line per tree: for each grouping, its purity with chance, and its separation."""
    first = runs[0].trees[0]
    groupings, columns = [""] * 4, ["run", "tree", "inner nodes", "depth"]
    for name in first.purity:
        further = ["same nearer", "correlation"] * (name in first.separation)
        columns += ["purity (chance)", *further]
        groupings += [f"{name}:", *[""] * len(further)]
    rows = [groupings, columns]
    for run in runs:
        for tree in run.trees:
            row = [run.run, tree.kind, str(tree.inner), str(tree.depth)]
            for name, (value, chance) in tree.purity.items():
                row.append(f"{value:.4f} ({chance:.4f})")
                row += [f"{number:.4f}" for number in tree.separation.get(name, ())]
            rows.append(row)
    return _aligned(rows)


def radii_table(runs: Sequence[Found]) -> str:
    """Returns one line per run with hierarchical proxies; empty without any."""
    head = ["run", "proxies used", "median radius: images", "proxies", "nearest proxies"]
    rows = [[*head, "farther in than their images", "images beneath none"]]
    for run in runs:
        if (radii := run.radii) is not None:
            row = [run.run, f"{radii.number_used} of {radii.proxies}", f"{radii.images:.3f}"]
            row += [f"{radii.used:.3f}", str(radii.nearest)]
            rows.append([*row, f"{radii.inside:.1%}", f"{radii.rootless:.1%}"])
    return _aligned(rows) if len(rows) > 1 else ""


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal widths: the first two to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def as_json(runs: Sequence[Found]) -> list[dict[str, Any]]:
    """Returns all numbers; those that do not exist are None."""
    return [
        {
            "run": run.run,
            "trees": [
                {
                    "tree": tree.kind,
                    "inner_nodes": tree.inner,
                    "depth": tree.depth,
                    "purity": _by_name(tree.purity),
                    "separation": _by_name(tree.separation),
                }
                for tree in run.trees
            ],
            **({"radii": _radii(run.radii)} if run.radii else {}),
        }
        for run in runs
    ]


def _by_name(scores: Mapping[str, Purity | Separation]) -> dict[str, dict[str, float | None]]:
    return {
        name: {key: _number(value) for key, value in each._asdict().items()}
        for name, each in scores.items()
    }


def _radii(radii: Radii) -> dict[str, float | int | None]:
    return {
        "median_of_images": _number(radii.images),
        "median_of_proxies_used": _number(radii.used),
        "proxies": radii.proxies,
        "proxies_used": radii.number_used,
        "nearest_proxies": radii.nearest,
        "share_of_nearest_proxies_farther_in_than_their_images": _number(radii.inside),
        "share_of_images_beneath_no_proxy": _number(radii.rootless),
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def nodes_json(nodes: Nodes) -> list[dict[str, Any]]:
    """Returns one object per node, the images first, each with the index of its parent."""
    return [
        {"parent": int(parent) if parent >= 0 else None, "name": name, "length": length, **facts}
        for parent, name, length, facts in zip(
            nodes.tree.parents, nodes.names, nodes.lengths.tolist(), nodes.facts, strict=True
        )
    ]


def newick(nodes: Nodes) -> str:
    """Returns the tree in Newick's format, with names in quotation marks and edge lengths."""
    parents = nodes.tree.parents
    children: list[list[str]] = [[] for _ in parents]
    for node in np.argsort(-nodes.tree.depths, kind="stable"):
        name = " ".join(nodes.names[node].split()).replace("'", "''")
        text = f"({','.join(children[node])})'{name}'" if children[node] else f"'{name}'"
        children[node] = []  # Their texts are part of this one now.
        if parents[node] >= 0:
            children[parents[node]].append(f"{text}:{nodes.lengths[node]:.6g}")
    return f"{text};\n"  # The root is the last.
