"""The hierarchy that a run finds among test images: its trees and what they are worth."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Complex, Float, Int

from hypjax.analysis.disk import sectors
from hypjax.analysis.hierarchy_result import Found, Nodes, Purity, Radii, Scores
from hypjax.analysis.trees import (
    Tree,
    ancestor_tree,
    ancestors,
    average_linkage,
    chance_purity,
    farther_in,
    purity,
    separation,
)
from hypjax.data.dataset import Dataset
from hypjax.data.groupings import CLASS, Grouping, groupings
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space

_BLOCK = 256  # Points that are compared with all others at once.


class Images(NamedTuple):
    """The test images among which hierarchies are sought.

    Attributes:
        dataset: The images.
        indices: Their indices among all test images.
        groupings: By name; the first are the classes.
        summary: How many they are, in words.
    """

    dataset: Dataset
    indices: Int[np.ndarray, " images"]
    groupings: Mapping[str, Grouping]
    summary: str

    @classmethod
    def of(cls, name: str, test: Dataset, most: int, seed: int) -> Self:
        """Chooses random classes that fit as a whole, or random images if fewer than two do.

        Args:
            name: Name of the dataset.
            test: Its test images.
            most: Largest number of images.
            seed: Seed of the choice.

        Raises:
            UserError: There are fewer than two classes among them, or no two images of one class.
        """
        if test.num_classes in (1, len(test)):
            raise UserError(
                f"the test images of {name} cannot be analysed by class: they are "
                f"{test.describe()}, of which two of one class and one of another are needed"
            )
        chosen = _choose(test.labels, most, np.random.default_rng(seed))
        images = test.take(chosen)
        if images.num_classes < 2 or images.num_classes == len(images):
            raise UserError(
                f"--images is {most}, too few for two classes and two images of one of them; "
                f"there are {test.describe()}"
            )
        summary = (
            f"{len(images)} of {len(test)} test images, "
            f"{images.num_classes} of {test.num_classes} classes"
        )
        return cls(images, chosen, groupings(name, images), summary)

    @property
    def further(self) -> dict[str, Grouping]:
        """The groupings beyond the classes."""
        return {name: each for name, each in self.groupings.items() if name != CLASS}

    def groups_of_classes(self) -> dict[str, Int[np.ndarray, " classes"]]:
        """Each class's group in each grouping beyond the classes."""
        first = np.unique(self.groupings[CLASS].labels, return_index=True)[1]
        return {name: each.labels[first] for name, each in self.further.items()}


def _choose(
    labels: Int[np.ndarray, " images"], most: int, rng: np.random.Generator
) -> Int[np.ndarray, " chosen"]:
    """Indices of the images of random classes, of which each is taken if it still fits."""
    classes, counts = np.unique(labels, return_counts=True)
    taken, room = [], most
    for place in rng.permutation(len(classes)):
        if counts[place] <= room:
            taken.append(classes[place])
            room -= counts[place]
    if len(taken) < 2:
        return np.sort(rng.permutation(len(labels))[:most])
    return np.flatnonzero(np.isin(labels, taken))


class Disk(NamedTuple):
    """The tree of proxies in the Poincaré disk.

    Attributes:
        tree: The tree.
        places: Place of each node, inside the unit circle.
    """

    tree: Tree
    places: Complex[np.ndarray, " nodes"]


class Leaf(NamedTuple):
    """A proxy without any proxy beneath it.

    Attributes:
        proxy: Its index.
        size: Number of images beneath it.
        nearest: Indices of the images that are nearest to it.
        beneath: Which of these are beneath it.
    """

    proxy: int
    size: int
    nearest: list[int]
    beneath: list[bool]


class Hierarchy(NamedTuple):
    """What a run makes of the images.

    Attributes:
        found: Its numbers.
        nodes: Its tree: that of the proxies if there are any, else that of average linkage.
        affinity: Similarity of each pair of classes, at the mean distance of their images.
        disk: None without proxies, or in flat space.
        leaves: The proxies with no other beneath, those with most images first.
    """

    found: Found
    nodes: Nodes
    affinity: Float[np.ndarray, "classes classes"]
    disk: Disk | None
    leaves: list[Leaf]


def find_hierarchy(
    name: str,
    points: Float[np.ndarray, "images dim"],
    space: Space,
    images: Images,
    proxies: Float[np.ndarray, "p dim"] | None = None,
) -> Hierarchy:
    """Finds the trees of a run and scores them. Distances are float64.

    Args:
        name: Name of the run in reports.
        points: Points of the images.
        space: Their space.
        images: The images.
        proxies: Points of the hierarchical proxies, in the ball; None for a run without them.
    """
    distances = _distances(space, points, points)
    tree, heights = average_linkage(distances)
    clusters = _score("average linkage", tree, images)
    affinity = np.asarray(space.similarity(_class_means(distances, images.groupings[CLASS].labels)))
    if proxies is None:
        found = Found(name, [clusters], None)
        return Hierarchy(found, _cluster_nodes(tree, heights, images), affinity, None, [])
    ball = _Ball.of(space, points, proxies)
    found = Found(name, [_score("proxies", ball.tree, images), clusters], ball.radii())
    nodes = _proxy_nodes(ball, images)
    return Hierarchy(found, nodes, affinity, ball.disk(space, points, proxies), ball.leaves())


def _distances(
    space: Space, x: Float[np.ndarray, "n dim"], y: Float[np.ndarray, "m dim"]
) -> Float[np.ndarray, "n m"]:
    found = np.empty((len(x), len(y)))
    with jax.enable_x64(True):
        compare, others = jax.jit(space.distance_matrix), jnp.asarray(y, jnp.float64)
        for start in range(0, len(x), _BLOCK):
            block = slice(start, start + _BLOCK)
            found[block] = compare(jnp.asarray(x[block], jnp.float64), others)
    return np.maximum(found, 0)


def _class_means(
    distances: Float[np.ndarray, "n n"], labels: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "classes classes"]:
    """Mean distance of two images of each pair of classes; 0 for the pair of a single image."""
    counts = np.bincount(labels)
    rows = np.stack([distances[labels == label].sum(axis=0) for label in range(len(counts))])
    rows[labels, np.arange(len(labels))] -= np.diagonal(distances)  # Of an image and itself.
    sums = np.stack([rows[:, labels == label].sum(axis=1) for label in range(len(counts))], axis=1)
    return sums / np.maximum(np.outer(counts, counts) - np.diag(counts), 1)


def _score(kind: str, tree: Tree, images: Images) -> Scores:
    labels = {name: grouping.labels for name, grouping in images.groupings.items()}
    return Scores(
        kind,
        len(tree.parents) - tree.leaves,
        int(tree.depths[: tree.leaves].max()),
        {n: Purity(purity(tree, each), chance_purity(tree, each)) for n, each in labels.items()},
        {n: separation(tree, labels[CLASS], labels[n]) for n in images.further},
    )


class _Ball(NamedTuple):
    """Images and proxies in the ball.

    Attributes:
        distances: Of each image and each proxy.
        radii_of_images: Distances from the origin.
        radii_of_proxies: Distances from the origin.
        tree: Images beneath proxies beneath the origin.
        used: Indices of the proxies in the tree.
        lengths: Length of the edge above each node of the tree.
    """

    distances: Float[np.ndarray, "n p"]
    radii_of_images: Float[np.ndarray, " n"]
    radii_of_proxies: Float[np.ndarray, " p"]
    tree: Tree
    used: Int[np.ndarray, " used"]
    lengths: Float[np.ndarray, " nodes"]

    @classmethod
    def of(
        cls,
        space: Space,
        points: Float[np.ndarray, "n dim"],
        proxies: Float[np.ndarray, "p dim"],
    ) -> Self:
        everything, targets = np.concatenate([points, proxies]), np.pad(proxies, ((0, 1), (0, 0)))
        measured = _distances(space, everything, targets)  # The last column is the origin's.
        distances, among = np.split(measured[:, :-1], [len(points)])
        radii, proxy_radii = np.split(measured[:, -1], [len(points)])
        above, of_proxies = (
            ancestors(distances, radii, proxy_radii),
            ancestors(among, proxy_radii, proxy_radii),
        )
        tree, used = ancestor_tree(above, of_proxies)
        edges = np.where(above >= 0, distances[np.arange(len(radii)), above], radii)
        inner = np.where(
            of_proxies >= 0, among[np.arange(len(proxy_radii)), of_proxies], proxy_radii
        )
        lengths = np.concatenate([edges, inner[used], [0.0]])
        return cls(distances, radii, proxy_radii, tree, used, lengths)

    def radii(self) -> Radii:
        """Where images and proxies are."""
        nearest = np.argmin(self.distances, axis=1)
        held = np.unique(nearest)
        medians = [np.median(self.radii_of_images[nearest == proxy]) for proxy in held]
        used = self.radii_of_proxies[self.used]
        return Radii(
            images=float(np.median(self.radii_of_images)),
            used=float(np.median(used)) if len(used) else np.nan,
            proxies=len(self.radii_of_proxies),
            number_used=len(used),
            nearest=len(held),
            inside=float(np.mean(farther_in(self.radii_of_proxies[held], medians))),
            rootless=float(np.mean(self._above == len(self.tree.parents) - 1)),
        )

    @property
    def _above(self) -> Int[np.ndarray, " n"]:
        """Parent of each image."""
        return self.tree.parents[: self.tree.leaves]

    def leaves(self) -> list[Leaf]:
        """The proxies with no other beneath, those with most images first."""
        images = self.tree.leaves
        numbers = np.bincount(self._above, minlength=len(self.tree.parents))
        inner = np.unique(self.tree.parents[images:])
        found = [node for node in range(images, len(numbers) - 1) if node not in inner]
        leaves = []
        for node in sorted(found, key=lambda node: -numbers[node]):
            proxy = int(self.used[node - images])
            nearest = np.argsort(self.distances[:, proxy], kind="stable")
            beneath = self._above[nearest] == node
            leaves.append(Leaf(proxy, int(numbers[node]), nearest.tolist(), beneath.tolist()))
        return leaves

    def disk(
        self,
        space: Space,
        points: Float[np.ndarray, "n dim"],
        proxies: Float[np.ndarray, "p dim"],
    ) -> Disk | None:
        """Places in the disk: true distances from the origin, and angles from the tree."""
        if not isinstance(space, PoincareBall) or not space.c:
            return None
        everything = np.concatenate([points, proxies[self.used], 0 * points[:1]])
        radii = float(space.c) ** 0.5 * np.linalg.norm(everything.astype(np.float64), axis=1)
        angles = sectors(self.tree, np.asarray(points, np.float64)).mean(axis=1)
        return Disk(self.tree, radii * np.exp(1j * angles))


def _facts_of_images(images: Images) -> list[dict[str, str | int]]:
    facts = []
    for i, index in enumerate(images.indices):
        of_image = {n: each.names[each.labels[i]] for n, each in images.groupings.items()}
        facts.append({"kind": "image", "index": int(index), **of_image})
    return facts


def _names(images: Images) -> list[str]:
    return [images.dataset.name(i) for i in range(len(images.dataset))]


def _proxy_nodes(ball: _Ball, images: Images) -> Nodes:
    facts = [
        {**facts, "radius": radius}
        for facts, radius in zip(
            _facts_of_images(images), ball.radii_of_images.tolist(), strict=True
        )
    ]
    for proxy in ball.used.tolist():
        facts.append({"kind": "proxy", "radius": float(ball.radii_of_proxies[proxy])})
    facts.append({"kind": "origin", "radius": 0.0})
    names = [*_names(images), *(f"proxy {proxy}" for proxy in ball.used), "origin"]
    return Nodes(ball.tree, names, facts, ball.lengths)


def _cluster_nodes(tree: Tree, heights: Float[np.ndarray, " nodes"], images: Images) -> Nodes:
    """Edges have half the difference of heights, so that paths are the heights of ancestors."""
    facts = _facts_of_images(images)
    facts += [{"kind": "cluster", "height": height} for height in heights[tree.leaves :].tolist()]
    names = [*_names(images), *(f"cluster {i}" for i in range(tree.leaves - 1))]
    lengths = (heights[tree.parents] - heights) / 2
    return Nodes(tree, names, facts, np.where(tree.parents < 0, 0, lengths))
