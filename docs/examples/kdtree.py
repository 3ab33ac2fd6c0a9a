"""Galleries in a k-d tree of SciPy."""

import numpy as np
from scipy.spatial import cKDTree

from hypjax.errors import writing
from hypjax.galleries.embeddings import Embeddings
from hypjax.galleries.search import ArrayGallery
from hypjax.retrieval import euclidean


def export_kdtree(embeddings, path):
    """Writes a folder, in which the tree is built when it is opened."""
    with writing(path):
        path.mkdir(exist_ok=True)
    embeddings.save(path / "gallery.npz")
    return str(path)


class TreeGallery(ArrayGallery):
    """A gallery whose points are searched by Euclidean distances."""

    def __init__(self, embeddings):
        self.vectors, self.ids, self.labels = embeddings.vectors, embeddings.ids, embeddings.labels
        self.space, self.fingerprint = embeddings.space, embeddings.fingerprint
        self._tree = cKDTree(embeddings.vectors)

    @classmethod
    def open(cls, path):
        return cls(Embeddings.load(path / "gallery.npz"))

    def search_rows(self, points, k):
        near = lambda queries, m: self._tree.query(queries, m)[1]
        how = {"k": k, "space": self.space, "candidates": min(5 * k, len(self))}
        separations, rows = euclidean.nearest(near, self.vectors, points, **how)
        return np.asarray(self.space.distance_at(separations)), rows
