"""Scores of predicted classes in a tree of labels: how far off are wrong predictions?

HyCoCLIP (Pal et al., ICLR 2025) reports these scores for ImageNet's classes in WordNet.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hypjax.errors import UserError


class LabelTree(NamedTuple):
    """Classes as nodes of a tree, or of a graph whose nodes may have several parents (WordNet).

    A class is none of its own ancestors, so that a wrong sibling shares all ancestors of a class.
    Published scores count so: UNCHA's mean LCA, 1.96, is 1 + TIE/2 less the share of errors.
    """

    paths: Int[np.ndarray, "classes classes"]  # Edges of the shortest path, in any direction.
    shared: Int[np.ndarray, "classes classes"]  # Shared ancestors; all ancestors on the diagonal.

    @classmethod
    def of(cls, classes: Sequence[str], edges: Iterable[tuple[str, str]]) -> "LabelTree":
        """Builds the tree of some classes from pairs of a node and one of its parents, by name.

        Several roots get a common parent. Raises a `UserError` if a class is not in the tree or is
        its only root, or if a node is its own ancestor.
        """
        from scipy.sparse import csgraph, csr_array

        edges = [*edges]
        names = dict.fromkeys(itertools.chain.from_iterable(edges))
        children = {node for node, _ in edges}
        roots = [name for name in names if name not in children]
        if len(roots) > 1:
            edges += [(name, "") for name in roots]
        rows = {name: row for row, name in enumerate([*names, ""])}
        for name in classes:
            if name not in names or roots == [name]:
                problem = "has no ancestor in" if name in names else "is not in"
                raise UserError(f"the class {name} {problem} the tree; add its parent")
        nodes = np.array([[rows[name] for name in edge] for edge in edges])
        graph = csr_array((np.ones(len(nodes)), (*nodes.T,)), shape=(len(rows), len(rows)))
        _, component_of = csgraph.connected_components(graph, connection="strong")
        is_circular = (np.bincount(component_of)[component_of] > 1) | (graph.diagonal() > 0)
        if is_circular.any():
            name = [*rows][np.argmax(is_circular)]
            raise UserError(f"{name} is its own ancestor in the tree; remove one of its parents")
        indices = [rows[name] for name in classes]
        up = csgraph.shortest_path(graph, unweighted=True, indices=indices)
        paths = csgraph.shortest_path(graph, directed=False, unweighted=True, indices=indices)
        above = (np.isfinite(up) & (up > 0)).astype(np.float64)  # NumPy multiplies integers slowly.
        return cls(paths[:, indices].astype(int), (above @ above.T).astype(int))


def tree_scores(
    predicted: Int[np.ndarray, " n"], true: Int[np.ndarray, " n"], tree: LabelTree
) -> dict[str, float]:
    """Means over images of scores that compare a predicted with a true class, by their ancestors.

    With A the ancestors of a class: tie, the edges of the path between the classes; lca, which is
    |A_predicted| − |A_predicted ∩ A_true| + 1, so 1 (not 0) for a right prediction; jaccard, the
    share of common ancestors in the union; h_precision and h_recall, their shares in A_predicted
    and A_true.
    """
    shared, num_ancestors = tree.shared[predicted, true], np.diagonal(tree.shared)
    of_predicted, of_true = num_ancestors[predicted], num_ancestors[true]
    scores = {
        "tie": tree.paths[predicted, true],
        "lca": of_predicted - shared + 1,
        "jaccard": shared / (of_predicted + of_true - shared),
        "h_precision": shared / of_predicted,
        "h_recall": shared / of_true,
    }
    return {name: float(np.mean(values)) for name, values in scores.items()}
