"""Right answers of searches where points crowd, compared with faiss."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from hypjax.benchmarks import peers
from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.retrieval import nearest_neighbors, subtraction

_CLASSES, _DIM, _K = 600, 128, 10
_SPREADS = (1, 0.1, 0.01, 0.003, 1e-6)
_SPACES = {"ball": PoincareBall(0.1, 2.3), "sphere": Sphere()}


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields one row per space and spread of three crowds, which hold images of all classes.

    Each row has the shares of queries with their true neighbours in the true order, and Recall@1,
    from distances by subtraction in float64, from hypjax and from faiss, if it is installed.
    """
    points = 600 if quick else 6000
    rng = np.random.default_rng(0)
    labels, crowd = rng.integers(0, _CLASSES, points), rng.integers(0, 3, points)
    centres, noise = rng.normal(size=(3, _DIM))[crowd], rng.normal(size=(points, _DIM))
    for name, space in _SPACES.items():
        for spread in _SPREADS:
            x = np.array(space.embed((centres + spread * noise).astype(np.float32)))
            found = {"hypjax": nearest_neighbors(x, x, k=_K, space=space, exclude_self=True)[1]}
            if peers.installed("faiss"):
                found["faiss"] = _faiss_neighbors(space, x)
            true = _without_self(subtraction.nearest(space, x, x, _K + 1).ids)
            row = {"space": name, "spread": spread, "recall@1": {"true": _recall(true, labels)}}
            row["recall@1"] |= {who: _recall(ids, labels) for who, ids in found.items()}
            yield row | {"right": {who: _right(ids, true) for who, ids in found.items()}}


def _faiss_neighbors(space: Space, x: Float[np.ndarray, "n d"]) -> Int[np.ndarray, "n k"]:
    import faiss

    gallery, queries = (
        np.ascontiguousarray(space.search_vectors(x, role), np.float32)
        for role in ("gallery", "query")
    )
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery)
    return _without_self(index.search(queries, _K + 1)[1])


def _without_self(ids: Int[np.ndarray, "n k"]) -> Int[np.ndarray, "n k-1"]:
    return np.stack([row[row != i][:_K] for i, row in enumerate(ids)])


def _recall(ids: Int[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    return float(np.mean(labels[ids[:, 0]] == labels))


def _right(ids: Int[np.ndarray, "n k"], true: Int[np.ndarray, "n k"]) -> float:
    return float(np.mean(np.all(ids == true, axis=1)))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a Markdown table with one row per space and spread."""
    titles = ("points", "spread", "right: hypjax", "faiss", "Recall@1: true", "hypjax", "faiss")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        right = [_share(row["right"].get(who), 3) for who in ("hypjax", "faiss")]
        recalls = [_share(row["recall@1"].get(who), 4) for who in ("true", "hypjax", "faiss")]
        lines.append(f"| {' | '.join([row['space'], str(row['spread']), *right, *recalls])} |")
    return "\n".join(lines)


def _share(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
