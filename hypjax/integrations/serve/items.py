"""The images of a gallery of any engine: by a key, at random, of a class, near a point."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from hypjax.integrations.exports import Gallery
from hypjax.integrations.qdrant import QdrantGallery, point_id
from hypjax.integrations.usearch import GraphGallery
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.neighbors import nearest_by_subtraction, search
from hypjax.retrieval.selection import KeptGallery

_KEY = re.compile("[0-9]{1,12}")  # Of an image in arrays: its row.
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_Point = Float32[np.ndarray, " d"]


class Item(NamedTuple):
    """An image of a gallery; its key names it in URLs."""

    key: str
    path: str
    label: str  # Its class; '' if unknown.
    point: _Point


Found = list[tuple[Item, float]]  # Images and their distances, nearest first.


class ArrayItems:
    """The images of a .npz or .usearch gallery, whose keys are their rows.

    Attributes:
        classes: Names of the classes, in order.
    """

    def __init__(self, gallery: Embeddings | GraphGallery) -> None:
        self._gallery = gallery
        # An exact search takes most of its time to prepare all vectors, unless they are kept.
        self._vectors = None if isinstance(gallery, GraphGallery) else KeptGallery(gallery.vectors)
        self.classes = sorted(set(gallery.labels.tolist()) - {""})

    def __len__(self) -> int:
        return len(self._gallery)

    def find(self, key: str) -> Item | None:
        """Returns the image with a key, if there is one."""
        known = _KEY.fullmatch(key) and int(key) < len(self)
        return self._item(int(key)) if known else None

    def sample(self, most: int) -> list[Item]:
        """Returns some images, at most so many: always the same ones."""
        chosen = np.random.default_rng(0).permutation(len(self))[:most]
        return [self._item(row) for row in np.sort(chosen).tolist()]

    def nearest(self, point: _Point, k: int, label: str | None, own: Item | None) -> Found:
        """Finds the nearest images to a point, at most k, without the query's own image.

        With a label, those of this class are found, by all their distances, also in a graph.
        """
        gallery, queries = self._gallery, point[None]
        if label is not None:
            rows = np.flatnonzero(gallery.labels == label)
            rows = rows[rows != int(own.key)] if own else rows
            if not len(rows):
                return []
            points, most = gallery.vectors[rows], min(k, len(rows))
            distances, found = nearest_by_subtraction(gallery.space, queries, points, most)
            return self._found(distances[0], rows[found[0]])
        # Programs are compiled for few values of k. The query's own image is asked for and left
        # out here, so that there is one program whether there is such an image or not.
        wanted = min(1 << (k + (own is not None) - 1).bit_length(), len(self))
        if isinstance(gallery, GraphGallery):
            distances, found = gallery.nearest(queries, wanted)
        else:
            distances, found = search(queries, None, self._vectors, k=wanted, space=gallery.space)
        kept = np.flatnonzero(found[0] != int(own.key)) if own else np.arange(wanted)
        return self._found(distances[0][kept[:k]], found[0][kept[:k]])

    def _found(self, distances: np.ndarray, rows: np.ndarray) -> Found:
        pairs = zip(rows.tolist(), distances.tolist(), strict=True)
        return [(self._item(row), distance) for row, distance in pairs]

    def _item(self, row: int) -> Item:
        gallery = self._gallery
        path, label = str(gallery.ids[row]), str(gallery.labels[row])
        return Item(str(row), path, label, np.asarray(gallery.vectors[row], np.float32))


class CollectionItems:
    """The images of a collection of Qdrant, whose keys are its ids.

    Attributes:
        classes: Names of classes, in order: those of a sample, since there may be very many.
    """

    def __init__(self, gallery: QdrantGallery, most: int = 1000) -> None:
        self._gallery = gallery
        self.classes = sorted({item.label for item in self.sample(most)} - {""})

    def __len__(self) -> int:
        return len(self._gallery)

    def find(self, key: str) -> Item | None:
        """See `ArrayItems`."""
        return next(iter(self._read([key])), None) if _UUID.fullmatch(key) else None

    def sample(self, most: int) -> list[Item]:
        """See `ArrayItems`."""
        return [_of_collection(*item) for item in self._gallery.sample(most)]

    def nearest(self, point: _Point, k: int, label: str | None, own: Item | None) -> Found:
        """See `ArrayItems`; but images of a class are found as approximately as all others."""
        there = len(self) if label is None else self._gallery.count(label)
        most = min(k, there - (own is not None and label in (None, own.label)))
        if most <= 0:
            return []
        paths = [os.path.realpath(own.path)] if own else None
        (found,) = self._gallery.nearest(point[None], most, paths, label=label)
        items = self._read([point_id(path) for path in found.ids])
        distances = dict(zip(found.ids, found.distances, strict=True))
        return [(item, distances[item.path]) for item in items]  # One may be gone meanwhile.

    def _read(self, keys: Sequence[str]) -> list[Item]:
        return [_of_collection(*item) for item in self._gallery.read(keys)]


Items = ArrayItems | CollectionItems


def items_of(gallery: Gallery) -> Items:
    """Returns the images of an open gallery."""
    return CollectionItems(gallery) if isinstance(gallery, QdrantGallery) else ArrayItems(gallery)


def _of_collection(key: str, vector: Sequence[float], payload: dict[str, str]) -> Item:
    return Item(key, payload["id"], payload["label"], np.array(vector, np.float32))
