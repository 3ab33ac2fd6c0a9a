"""Galleries in Qdrant, which shards and replicates them, and scores by the hyperbolic distance.

Qdrant searches for candidates by Euclidean distances between points in a ball, as
`hypjax.retrieval.euclidean` describes, and scores them by a formula: with the Euclidean distance
$score and the factors f = 1 / (1 − c‖x‖²), of which each item's payload holds its own, the distance
is (2/√c)·ln(√u + √(1 + u)) for u = c·$score²·f_x·f_y.
"""

import itertools
import math
import os
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Float32
from tqdm import tqdm

from hypjax.errors import UserError
from hypjax.geometry import Space, Sphere
from hypjax.integrations.qdrant_collections import (
    SCHEMES,
    Ask,
    Collection,
    Folder,
    Hits,
    Item,
    Server,
    strange_answer,
)
from hypjax.retrieval import euclidean
from hypjax.retrieval.embeddings import Embeddings, describe_space, space_of
from hypjax.retrieval.euclidean import separation_factors
from hypjax.retrieval.galleries import GalleryItem, Neighbours

SUFFIX = ".qdrant"
_BATCH = 500  # Items of one request that adds them.
_SEARCHES = 50  # Searches of one request.
_SAMPLE = 1000  # Images whose classes are listed.
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ROUNDING = 1e-5  # By which −distance may exceed 0.
_LEAST_CANDIDATES, _MOST_CANDIDATES = 64, 2**20  # Of a search.


class QdrantGallery:
    """A gallery in a collection of Qdrant.

    Attributes:
        space: Space of the points: isometric to a ball, or the sphere.
        fingerprint: Fingerprint of the model.
        candidates: Number of candidates of a search: more find more neighbours, and take longer.
        recall: Share of the 10 nearest neighbours that searches find, at least, by the sample of
            the last export.
    """

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._read_facts()

    @classmethod
    def open(cls, location: str | os.PathLike[str]) -> Self:
        """Opens a gallery.

        It is at the URL of a collection, qdrant://host:6333/name (qdrant+https:// with TLS), or in
        the folder of an embedded one. Raises a `UserError` if there is none, it is damaged or
        something else, the server does not answer, or a package is missing.
        """
        return cls(open_collection(os.fspath(location)))

    @classmethod
    def create(cls, collection: Collection, embeddings: Embeddings) -> Self:
        """Opens the gallery of a collection, or creates an empty one for such embeddings.

        Raises UserError if it holds something else, or the space has no approximate search.
        """
        euclidean.curvature(embeddings.space)  # Checks the space.
        with collection.changing():
            if collection.facts() is None:
                facts = {
                    "space": describe_space(embeddings.space),
                    "fingerprint": embeddings.fingerprint,
                    "candidates": _LEAST_CANDIDATES,
                    "recall": 0.0,
                }
                collection.create(embeddings.vectors.shape[1], facts)
            return cls(collection)

    def __len__(self) -> int:
        return self._collection.count()

    def has_class(self, name: str) -> bool:
        """Whether an image is of this class."""
        return self.count(name) > 0

    def count(self, name: str) -> int:
        """The number of images of this class."""
        return self._collection.count(name)

    def classes(self) -> list[str]:
        """Names of the classes of a sample, in order."""
        return sorted({item.label for item in self.sample(_SAMPLE)} - {""})

    def read(self, keys: Sequence[str]) -> list[GalleryItem]:
        """See `Gallery`; keys are those of `point_id`."""
        keys = [key for key in keys if _UUID.fullmatch(key)]
        found = {item.key: item for item in self._checked(self._collection.read(keys))}
        return [found[key] for key in keys if key in found]

    def sample(self, most: int) -> list[GalleryItem]:
        """See `Gallery`; they are of no particular kind, since ids are hashes."""
        return self._checked(self._collection.first(most))

    def _checked(self, items: list[Item]) -> list[GalleryItem]:
        try:
            if not items:
                return []
            points = np.array([item.vector for item in items], np.float32)
            (self.space.ball() or self.space).check(points)
            points = euclidean.from_ball(points, self.space).astype(np.float32, copy=False)
            if all(isinstance(item.payload[key], str) for item in items for key in ("id", "label")):
                return [
                    GalleryItem(item.id, item.payload["id"], item.payload["label"], point)
                    for item, point in zip(items, points, strict=True)
                ]
        except (KeyError, TypeError, ValueError):
            pass
        raise strange_answer(self._collection.name)

    def add(self, embeddings: Embeddings) -> None:
        """Adds images, or replaces those with the same paths.

        Raises a `UserError` if another model embedded them, one is not a point of the space, or the
        collection cannot be written.
        """
        embeddings.check()
        with self._collection.changing():
            self._read_facts()
            if embeddings.fingerprint != self.fingerprint:
                raise UserError(
                    f"{self._collection.name} holds images that another model embedded; name "
                    "another collection"
                )
            items = tqdm(_items(embeddings), total=len(embeddings), unit="image", disable=None)
            self._collection.add(_chunks(items, _BATCH))

    def remove(self, ids: Sequence[str]) -> None:
        """Removes the images with these paths, if they are there, or raises a `UserError`."""
        with self._collection.changing():
            self._collection.remove([point_id(path) for path in ids])

    def nearest(
        self,
        points: Float32[np.ndarray, "n d"],
        k: int,
        paths: Sequence[str] | None = None,
        label: str | None = None,
        *,
        exact: bool = False,
    ) -> list[Neighbours]:
        """See `Gallery.nearest`; with `exact`, candidates are searched for among all images.

        Raises a `UserError` if a query is not a point of the space, or the collection does not
        answer.
        """
        return self._nearest(points, k, paths, exact=exact, label=label)

    def _nearest(
        self,
        points: Float32[np.ndarray, "n d"],
        k: int,
        paths: Sequence[str] | None = None,
        *,
        exact: bool = False,
        without: Sequence[str] | None = None,
        label: str | None = None,
    ) -> list[Neighbours]:
        """As `nearest`, but may find fewer images.

        Each query leaves out its image of `without`, also on the way to others.
        """
        points = np.asarray(points, np.float32)
        self.space.check(points)
        points = euclidean.in_ball(points, self.space).astype(np.float32)
        wanted = k + (paths is not None)
        found = self._search(points, points, wanted, exact, without, label)
        if not isinstance(self.space, Sphere):
            reached = np.array([-hits[-1][1] if hits else 0.0 for hits in found])
            separations = _separations(reached, euclidean.curvature(self.space))
            centres = euclidean.centres(points, separations, self.space)
            found = self._search(centres, points, wanted, exact, without, label)
        paths = [""] * len(points) if paths is None else paths
        return [_neighbours(*pair, k) for pair in zip(found, paths, strict=True)]

    def tune(self, embeddings: Embeddings) -> None:
        """Chooses the number of candidates by a sample of images that are in the gallery.

        It is increased until searches find 98% of the 10 nearest, which one without the graph
        lists. If they never do, a warning says how many are found. Each search passes over its own
        image, as if it were new. (Without the whole sample, others that are reached through one
        of it alone, such as the leaves of a tree, would be lost at any number of candidates.)
        """
        if not len(embeddings):
            return
        chosen, _ = euclidean.held_out(len(embeddings), len(self))
        sample, paths = embeddings.vectors[chosen], embeddings.ids[chosen].tolist()
        k = min(euclidean.NEAREST, len(self) - 1)
        exact = _ranked(self._nearest(sample, k, exact=True, without=paths), k)

        def found(candidates: int) -> tuple[np.ndarray, np.ndarray]:
            self.candidates = candidates
            return _ranked(self._nearest(sample, k, without=paths), k)

        self.recall = euclidean.tune(found, exact) if len(chosen) else 1.0
        tuned = {"candidates": self.candidates, "recall": self.recall}
        with self._collection.changing():
            self._collection.describe((self._collection.facts() or {}) | tuned)

    def _read_facts(self) -> None:
        facts = self._collection.facts()
        if facts is None:
            raise UserError(self._collection.absence)
        try:
            self.space: Space = space_of(facts["space"])
            self.fingerprint, self.candidates = str(facts["fingerprint"]), int(facts["candidates"])
            self.recall = float(facts["recall"])
            if not (1 <= self.candidates <= _MOST_CANDIDATES and 0 <= self.recall <= 1):
                raise ValueError(f"{self.candidates} candidates, a recall of {self.recall}")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise UserError(f"{self._collection.name} was not written by hypjax.embed") from error

    def _search(
        self,
        centres: Float32[np.ndarray, "n d"],
        points: Float32[np.ndarray, "n d"],
        k: int,
        exact: bool,
        without: Sequence[str] | None,
        label: str | None,
    ) -> list[Hits]:
        factors = separation_factors(points, self.space)
        left_out = [None] * len(points) if without is None else map(point_id, without)
        asks = (
            Ask(centre.tolist(), point.tolist(), _score(float(factor), self.space), own)
            for centre, point, factor, own in zip(centres, points, factors, left_out, strict=True)
        )
        candidates = max(self.candidates, 5 * k)
        found = []
        for part in _chunks(asks, _SEARCHES):
            results = self._collection.search(part, k, candidates, exact=exact, label=label)
            if len(results) != len(part) or not all(_is_result(hits, k) for hits in results):
                raise strange_answer(self._collection.name)
            found += results
        return found


def open_collection(location: str) -> Collection:
    """The collection at a URL, qdrant://host:6333/name or qdrant+https://…, or in a folder."""
    return Server.at(location) if location.startswith(SCHEMES) else Folder(pathlib.Path(location))


def export_qdrant(embeddings: Embeddings, path: pathlib.Path, url: str | None = None) -> str:
    """Adds images to a `QdrantGallery` in a folder or at a URL; creates it if it is missing.

    Returns a sentence: where the gallery is, and how many neighbours searches find.
    """
    collection = open_collection(url or os.fspath(path))
    with collection.changing():
        gallery = QdrantGallery.create(collection, embeddings)
        gallery.add(embeddings)
        gallery.tune(embeddings)
    return (
        f"{collection.name}, which holds {len(gallery)} images now; it finds "
        f"{gallery.recall:.1%} of the {euclidean.NEAREST} nearest neighbours"
    )


def _items(embeddings: Embeddings) -> Iterator[Item]:
    points = euclidean.in_ball(embeddings.vectors, embeddings.space)
    factors = separation_factors(points, embeddings.space)
    points = points.astype(np.float32, copy=False)
    rows = (embeddings.ids.tolist(), embeddings.labels.tolist(), points, factors)
    for path, label, vector, factor in zip(*rows, strict=True):
        payload = {"id": path, "label": label, "factor": float(factor)}
        yield Item(point_id(path), vector.tolist(), payload)


def point_id(path: str) -> str:
    """A UUID made of the path, so that an image that is added again replaces itself."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"file:{path}"))


def _score(factor: float, space: Space) -> dict[str, Any]:
    """The formula of −distance for a query with this factor."""
    if isinstance(space, Sphere):
        return {"mult": [-1.0, "$score", "$score"]}
    c = euclidean.curvature(space)
    if c == 0:
        return {"mult": [-2.0, "$score"]}
    u = {"mult": [c * factor, "$score", "$score", "factor"]}
    # Qdrant's acosh(1 + 2u) would do, but has fewer digits for close points.
    asinh = {"ln": {"sum": [{"sqrt": u}, {"sqrt": {"sum": [1.0, u]}}]}}
    return {"mult": [-2 / c**0.5, asinh]}


def _separations(distances: np.ndarray, c: float) -> np.ndarray:
    """The inverse of a ball's `distance_at`."""
    return np.sinh(c**0.5 * distances / 2) ** 2 / c if c else distances**2 / 4


def _is_result(hits: Hits, k: int) -> bool:
    """Whether this can be what a search for k images found."""
    try:
        names = [name for payload, _ in hits for name in (payload["id"], payload["label"])]
        scores = [score for _, score in hits]
        return (
            len(hits) <= k
            and not any(b"\0" in name.encode() for name in names)
            and len(set(names[::2])) == len(hits)
            and all(math.isfinite(score) and score <= _ROUNDING for score in scores)
            and scores == sorted(scores, reverse=True)
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _neighbours(hits: Hits, path: str, k: int) -> Neighbours:
    own = [payload for payload, _ in hits if path and os.path.realpath(payload["id"]) == path]
    others = [(payload, score) for payload, score in hits if payload not in own][:k]
    return Neighbours(
        [payload["id"] for payload, _ in others],
        [payload["label"] for payload, _ in others],
        [max(-score, 0.0) for _, score in others],
        own[0]["label"] if own else "",
        [point_id(payload["id"]) for payload, _ in others],
    )


def _ranked(found: Sequence[Neighbours], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances and paths of neighbours, [n, k] each; ∞ and '' where there are fewer."""
    distances = [hits.distances + [math.inf] * (k - len(hits.ids)) for hits in found]
    return np.array(distances), np.array([hits.ids + [""] * (k - len(hits.ids)) for hits in found])


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
