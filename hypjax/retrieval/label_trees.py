"""Scores of predicted classes in a tree of labels, as in HyCoCLIP (Pal et al., ICLR 2025)."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hypjax.errors import UserError


class LabelTree(NamedTuple):
    """Classes in a tree, or in a graph whose nodes may have several parents, such as WordNet.

    A class is none of its own ancestors. So count published scores, in which the mean LCA of UNCHA,
    1.96, is 1 + TIE/2 less the share of errors.
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
        roots = [*names.keys() - dict(edges).keys()]
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
    """Means over images of scores of a predicted and a true class with ancestors A_p and A_t.

    tie is the number of edges between the classes; lca is |A_p| − |A_p ∩ A_t| + 1, so 1 (not 0) for
    a right prediction; jaccard, h_precision and h_recall are |A_p ∩ A_t| divided by |A_p ∪ A_t|,
    |A_p| and |A_t|.
    """
    shared = tree.shared[predicted, true]
    of_predicted, of_true = (tree.shared[rows, rows] for rows in (predicted, true))
    scores = {
        "tie": tree.paths[predicted, true],
        "lca": of_predicted - shared + 1,
        "jaccard": shared / (of_predicted + of_true - shared),
        "h_precision": shared / of_predicted,
        "h_recall": shared / of_true,
    }
    return {name: float(np.mean(values)) for name, values in scores.items()}
