"""Galleries as index files of faiss."""

import pathlib
from typing import Any

import faiss
import numpy as np

from hypjax.errors import writing
from hypjax.retrieval import euclidean
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.neighbors import search
from hypjax.system.files import replacing


def export_flat(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes the search vectors as an exact IndexFlatIP; returns a sentence with the path."""
    vectors = embeddings.search_vectors()
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    _write(index, path)
    return f"{path}, a flat index of inner products, which is exact"


def export_hnsw(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes the points as an IndexHNSWFlat of Euclidean distances, to be searched twice.

    `hypjax.retrieval.euclidean` describes the search. Raises efSearch until searches find 98% of
    the 10 nearest neighbours of a sample, which is added last. Returns the path and the recall.
    """
    points, space = embeddings.vectors, embeddings.space
    euclidean.curvature(space)  # Checks the space.
    index = faiss.IndexHNSWFlat(points.shape[1], euclidean.LINKS)
    index.hnsw.efConstruction = euclidean.ADDED
    in_ball = euclidean.in_ball(points, space).astype(np.float32, copy=False)
    sample_rows, others = euclidean.held_out(len(points), len(points))
    sample, gallery, k = points[sample_rows], points[others], min(euclidean.NEAREST, len(others))
    index.add(in_ball[others])
    exact = search(sample, None, gallery, k=k, space=space)

    def search_sample(candidates: int) -> tuple[np.ndarray, np.ndarray]:
        index.hnsw.efSearch = candidates
        near = lambda queries, count: index.search(queries, count)[1]  # noqa: E731
        options = {"k": k, "space": space, "candidates": min(candidates, len(others))}
        separations, items = euclidean.nearest(near, gallery, sample, **options)
        return np.asarray(space.distance_at(separations)), items

    recall = euclidean.tune(search_sample, exact)
    index.add(in_ball[sample_rows])
    index.permute_entries(np.argsort(np.concatenate([others, sample_rows])))
    _write(index, path)
    return (
        f"{path}, a graph of Euclidean distances; two searches, as docs/engines.md describes, with "
        f"{index.hnsw.efSearch} candidates, find {recall:.1%} of the {euclidean.NEAREST} nearest "
        "neighbours"
    )


def _write(index: Any, path: pathlib.Path) -> None:
    with writing(path), replacing(path) as temporary:
        temporary.write_bytes(faiss.serialize_index(index).tobytes())
