"""Correctness of searches where points crowd, compared with faiss."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks import measure, peers
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import nearest_neighbors
from hypjax.retrieval.subtraction import nearest_items

COLUMNS = {
    "points": "{space}",
    "spread": "{spread}",
    "right: hypjax": "{right[hypjax]:.3f}",
    "faiss": "{right[faiss]:.3f}",
    "Recall@1: true": "{recall@1[true]:.4f}",
    "hypjax ": "{recall@1[hypjax]:.4f}",
    "faiss ": "{recall@1[faiss]:.4f}",
}
_CLASSES, _DIM, _K = 600, 128, 10
_SPREADS = (1, 0.1, 0.01, 0.003, 1e-6)
_SPACES = {"ball": PoincareBall(0.1, 2.3), "sphere": Sphere()}


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """One row per space and spread of three crowds, which hold images of all classes.

    A row holds the share of queries with the true neighbours in the true order, and Recall@1: from
    distances by subtraction in float64 (the truth), from hypjax and from faiss.
    """
    if not peers.installed("faiss"):
        raise UserError("exactness requires faiss: pip install faiss-cpu")
    num_points = 600 if options.quick else 6000
    rng = np.random.default_rng(0)
    labels, crowd = rng.integers(0, _CLASSES, num_points), rng.integers(0, 3, num_points)
    centres, noise = rng.normal(size=(3, _DIM))[crowd], rng.normal(size=(num_points, _DIM))
    for name, space in _SPACES.items():
        for spread in _SPREADS:
            x = np.array(space.embed((centres + spread * noise).astype(np.float32)))
            neighbours = {
                "true": _without_self(nearest_items(space, x, x, _K + 1)[1]),
                "hypjax": nearest_neighbors(x, x, k=_K, space=space, exclude_self=True)[1],
                "faiss": _without_self(peers.faiss_search(space, x, _K + 1)()[1]),
            }
            row = {"space": name, "spread": spread, "right": {}, "recall@1": {}}
            for library, ids in neighbours.items():
                row["right"][library] = float(np.mean(np.all(ids == neighbours["true"], 1)))
                row["recall@1"][library] = float(np.mean(labels[ids[:, 0]] == labels))
            yield row


def _without_self(ids: Int[np.ndarray, "n k"]) -> Int[np.ndarray, "n k-1"]:
    return np.stack([row[row != i][:_K] for i, row in enumerate(ids)])
