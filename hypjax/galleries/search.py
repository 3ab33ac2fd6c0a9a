"""The interface of searchable galleries, and a gallery of arrays with exact search."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Shaped

from hypjax.errors import UserError
from hypjax.galleries.own_images import OwnImages
from hypjax.geometry import Space
from hypjax.retrieval.inputs import Ids, Nearest, OwnRows, Points, check_count
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.selection import StreamedGallery
from hypjax.retrieval.subtraction import nearest_items
from hypjax.types import composed

_ROW = re.compile("[0-9]{1,12}")  # Keys of an `ArrayGallery`.


class Neighbours(NamedTuple):
    """Search results of one query, nearest first."""

    ids: list[str]  # Paths of the images.
    labels: list[str]  # Classes of the images; '' if unknown.
    distances: list[float]
    own_label: str = ""  # The query's class, if the gallery contains it.
    keys: Sequence[str] = ()  # See `GalleryItem`.


class GalleryItem(NamedTuple):
    """An image of a gallery."""

    key: str  # Identifies the image in URLs.
    path: str
    label: str  # '' if unknown.
    point: Float32[np.ndarray, " d"]  # In the gallery's space.


@runtime_checkable
class Gallery(Protocol):
    """Embedded images in an engine that searches them."""

    @property
    def space(self) -> Space:
        """The space of the points."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that embedded the images."""

    @property
    def model(self) -> str:
        """Name of the model, for messages; '' if unknown."""

    @property
    def noun(self) -> str:
        """What has the points, for messages: "image" or "text"."""

    def __len__(self) -> int:
        """Number of images."""

    def nearest(
        self, points: Points, k: int, paths: Sequence[str] | None = None, label: str | None = None
    ) -> list[Neighbours]:
        """Finds the k nearest images of each query, or all images if there are fewer.

        `paths` holds the path or another id of each query's image, '' if unknown. No query finds
        its own image, see `hypjax.galleries.own_images`. `label` is the class to search in, None
        for all classes. Raises UserError if a query is not a point of the space.
        """

    def has_class(self, name: str) -> bool:
        """Whether an image is of this class."""

    def classes(self) -> list[str]:
        """Sorted names of the classes; only of a sample where there may be too many to list."""

    def read(self, keys: Sequence[str]) -> list[GalleryItem]:
        """Images with these keys, in the order of the keys; leaves out unknown keys."""

    def sample(self, most: int) -> list[GalleryItem]:
        """Up to `most` images, always the same ones."""


class ArrayGallery:
    """A `Gallery` of arrays with exact search; other engines override `search_rows`."""

    vectors: Float32[np.ndarray, "n d"]  # Points of the space; may be memory-mapped.
    ids: Shaped[np.ndarray, " n"]  # Paths of the images, strings.
    labels: Shaped[np.ndarray, " n"]  # Names of the images' classes; '' if unknown.
    space: Space
    fingerprint: str
    model: str = ""
    noun: str = "image"

    def __len__(self) -> int:
        return len(self.ids)

    def search_rows(self, points: Points, k: int) -> Nearest:
        """Distances and rows of at least the k nearest images, nearest first; −1 for no image."""
        # Programs are compiled for few values of k.
        k = min(1 << (int(k) - 1).bit_length(), len(self))
        return search(points, None, self.kept_vectors, k=k, space=self.space)

    def nearest(
        self, points: Points, k: int, paths: Sequence[str] | None = None, label: str | None = None
    ) -> list[Neighbours]:
        """Finds nearest images as `Gallery.nearest` does; a search in a class is exact."""
        check_count(k)
        own_rows = self.own_rows(paths, points) if paths else [[]] * len(points)
        # Own images are left out afterwards, so that all queries run one program.
        num_listed = k + max(map(len, own_rows), default=0)
        if label is None:
            distances, rows = self.search_rows(points, min(num_listed, len(self)))
            return self.neighbours(distances, rows, own_rows, k)
        self.space.check(points)
        class_rows = np.flatnonzero(self.labels == self._classes.get(composed(label), label))
        if not len(class_rows):
            return [Neighbours([], [], []) for _ in points]
        num_listed = min(num_listed, len(class_rows))
        distances, rows = nearest_items(self.space, points, self.vectors[class_rows], num_listed)
        return self.neighbours(distances, class_rows[rows], own_rows, k)

    def neighbours(
        self, distances: Float32[np.ndarray, "q m"], rows: Ids, own_rows: OwnRows, k: int
    ) -> list[Neighbours]:
        """Looks up the images of each query's first k results that are not the query's own image.

        Results are rows of the gallery and their distances; −1 is no image.
        """
        neighbours = []
        for query_distances, query_rows, excluded in zip(distances, rows, own_rows, strict=True):
            listed = np.flatnonzero((query_rows >= 0) & ~np.isin(query_rows, excluded))[:k]
            hits = query_rows[listed]
            hit_distances = query_distances[listed].tolist()
            own_label = str(self.labels[excluded[0]]) if len(excluded) else ""
            ids, labels = self.ids[hits].tolist(), self.labels[hits].tolist()
            keys = hits.astype(str).tolist()
            neighbours.append(Neighbours(ids, labels, hit_distances, own_label, keys))
        return neighbours

    def own_rows(self, paths: Sequence[str], points: Points | None = None) -> OwnRows:
        """Gallery rows of each query's own image, by the queries' paths and points."""
        return self._own_images.rows(paths, points)

    def has_class(self, name: str) -> bool:
        """Whether an image is of this class."""
        return composed(name) in self._classes

    def classes(self) -> list[str]:
        """Sorted names of the classes."""
        return sorted(self._classes.values())

    def read(self, keys: Sequence[str]) -> list[GalleryItem]:
        """Images with these keys, which are row numbers; leaves out unknown keys."""
        rows = [int(key) for key in keys if _ROW.fullmatch(key) and int(key) < len(self)]
        points = np.asarray(self.vectors[rows], np.float32)
        columns = map(str, rows), self.ids[rows].tolist(), self.labels[rows].tolist(), points
        return list(map(GalleryItem, *columns))

    def sample(self, most: int) -> list[GalleryItem]:
        """Up to `most` images, always the same ones."""
        rows = np.random.default_rng(0).permutation(len(self))[:most]
        return self.read(list(map(str, np.sort(rows).tolist())))

    @functools.cached_property
    def kept_vectors(self) -> StreamedGallery:
        """The points, with their search vectors kept between searches."""
        return StreamedGallery(self.vectors, keep=True)

    @functools.cached_property
    def _own_images(self) -> OwnImages:
        return OwnImages(self.ids.tolist(), getattr(self, "vectors", None))

    @functools.cached_property
    def _classes(self) -> dict[str, str]:
        return {composed(name): name for name in {*self.labels.tolist()} - {""}}


def require_model(gallery: Gallery, fingerprint: str, name: str = "") -> None:
    """Raises a `UserError`, with the model's name, unless the model embedded the gallery."""
    if gallery.fingerprint != fingerprint:
        if not gallery.fingerprint:
            raise UserError("the gallery does not name its model; write it with hypjax.embed")
        embedder = gallery.model or "another run"
        contrast = "as it was before" if embedder == name else f"not by {name or 'this one'}"
        (run, _, part), (other_run, _, other_part) = (x.rpartition(" (") for x in (embedder, name))
        is_other_part = run == other_run and part != other_part
        remedy = f"add --embedding={part.removesuffix(')')}" if is_other_part else "embed it again"
        raise UserError(f"the gallery was embedded by {embedder}, {contrast}; {remedy}")
