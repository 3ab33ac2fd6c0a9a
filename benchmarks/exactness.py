"""Right answers of searches where points crowd, compared with faiss."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks import measure, peers
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import nearest_neighbors
from hypjax.retrieval.neighbors import nearest_by_subtraction

_CLASSES, _DIM, _K = 600, 128, 10
_SPREADS = (1, 0.1, 0.01, 0.003, 1e-6)
_SPACES = {"ball": PoincareBall(0.1, 2.3), "sphere": Sphere()}


def rows(options: measure.Options) -> measure.Rows:
    """One row per space and spread of three crowds, which hold images of all classes.

    Each row has the shares of queries with their true neighbours in the true order, and Recall@1,
    from distances by subtraction in float64, from hypjax and from faiss, if it is installed.
    """
    points = 600 if options.quick else 6000
    rng = np.random.default_rng(0)
    labels, crowd = rng.integers(0, _CLASSES, points), rng.integers(0, 3, points)
    centres, noise = rng.normal(size=(3, _DIM))[crowd], rng.normal(size=(points, _DIM))
    rows = []
    for name, space in _SPACES.items():
        for spread in _SPREADS:
            x = np.array(space.embed((centres + spread * noise).astype(np.float32)))
            true = _without_self(nearest_by_subtraction(space, x, x, _K + 1)[1])
            found = {"hypjax": nearest_neighbors(x, x, k=_K, space=space, exclude_self=True)[1]}
            if peers.installed("faiss"):
                search = peers.faiss_search(*peers.search_vectors(space, x), _K + 1)
                found["faiss"] = _without_self(search()[1])
            recalls = {
                who: float(np.mean(labels[ids[:, 0]] == labels))
                for who, ids in {"true": true, **found}.items()
            }
            right = {who: float(np.mean(np.all(ids == true, 1))) for who, ids in found.items()}
            rows.append({"space": name, "spread": spread, "recall@1": recalls, "right": right})
    return rows


def _without_self(ids: Int[np.ndarray, "n k"]) -> Int[np.ndarray, "n k-1"]:
    return np.stack([row[row != i][:_K] for i, row in enumerate(ids)])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a Markdown table with one row per space and spread."""
    titles = ("points", "spread", "right: hypjax", "faiss", "Recall@1: true", "hypjax", "faiss")
    columns = [("right", "hypjax", 3), ("right", "faiss", 3)]
    columns += [("recall@1", who, 4) for who in ("true", "hypjax", "faiss")]
    lines = []
    for row in rows:
        cells = [f"{row[a][b]:.{digits}f}" if b in row[a] else "–" for a, b, digits in columns]
        lines.append([row["space"], str(row["spread"]), *cells])
    return measure.markdown(titles, lines)
