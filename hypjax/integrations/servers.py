"""Galleries on servers that search by Euclidean distance.

A server stores the points of a ball, and lists candidates; this module ranks them by their exact
distances. Candidates come from repeated searches or from a search of each shell, as
`hypjax.retrieval.euclidean` describes; held-out queries choose between the two at each export.
"""

import itertools
import json
import pathlib
import re
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float, Int

from hypjax.errors import UserError, counted, redacted
from hypjax.galleries.embeddings import Embeddings
from hypjax.galleries.search import ArrayGallery, GalleryItem, Neighbours
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space, space_of
from hypjax.retrieval import euclidean, inputs, subtraction
from hypjax.retrieval.euclidean import NEAREST
from hypjax.retrieval.inputs import Points, Rows
from hypjax.system.progress import Bar

_UPLOAD_BATCH = 500  # Images to add in one request.
_CLASSES_SAMPLE = 1000  # Images whose classes `classes` lists.
# Candidates to try in a search of all images, and of a shell.
_REPEATED, _IN_SHELL = (64, 128, 256, 512, 1024), (12, 16, 24, 32, 64, 128, 256, 512, 1024)
_SCANNED = 5  # Candidates of a scan for each neighbour: servers round centres to float32.
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FACTS = ("fingerprint", "model", "noun", "candidates", "by_shell", "shells")


class Wanted(NamedTuple):
    """The images that searches may find."""

    without: Sequence[str] = ()  # Key of the image that each query leaves out, if any.
    label: str | None = None
    shell: int | None = None  # See `euclidean.shells_of`.
    exact: bool = False  # Whether to scan the images, instead of searching an index.


Batch = list[tuple[GalleryItem, int]]  # Images with points in the ball, and their shells.
# Images, and each query's k nearest among them: distances and indices, ∞ and −1 for no image.
_Results = tuple[list[GalleryItem], Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]


class ServerGallery:
    """A gallery on a server; see `hypjax.galleries.search.Gallery`."""

    space: Space  # Isometric to a ball, or the sphere.
    fingerprint: str
    model: str
    noun: str = "image"
    by_shell: bool = True  # Whether candidates come from a search of each shell.
    candidates: int = _IN_SHELL[-1]  # In one search for 10 neighbours; in proportion for more.
    shells: Sequence[int] = ()  # Numbers of the shells with images.

    # What a server does. The points of its images lie in the ball.
    _create: Callable[[int], None]  # Creates a missing collection, for points with d coordinates.
    _load_facts: Callable[[], str | None]  # Text that was saved; None if there is no collection.
    _save_facts: Callable[[str], None]
    _count: Callable[[str | None], int]  # Number of images, or of those of a class.
    _read: Callable[[Sequence[str]], list[GalleryItem]]  # Images with these keys, in any order.
    _first: Callable[[int], list[GalleryItem]]  # Images with the lowest keys.
    _add: Callable[[Iterable[Batch]], None]  # Adds images, or replaces those with equal keys.
    _delete: Callable[[Sequence[str]], None]
    # The wanted images nearest to each centre in Euclidean distance.
    _nearest: Callable[[Points, int, Wanted], list[list[GalleryItem]]]

    def __init__(self, url: str) -> None:
        self.name = redacted(url)

    @classmethod
    def open(cls, url: str) -> Self:
        """Opens the gallery at a URL; raises a `UserError` if there is none."""
        gallery = cls(url)
        gallery._read_facts()
        return gallery

    @classmethod
    def export(cls, embeddings: Embeddings, path: pathlib.Path, url: str) -> str:
        """Adds images to the gallery at a URL, which is created if needed.

        Replaces images with equal paths. Returns a sentence with the gallery's name and its recall.
        """
        del path  # The server holds the gallery.
        euclidean.curvature(embeddings.space)  # Checks the space.
        gallery = cls(url)
        gallery._create(embeddings.vectors.shape[1])
        gallery.space, gallery.model = embeddings.space, embeddings.model
        gallery.fingerprint, gallery.noun = embeddings.fingerprint, embeddings.noun
        if len(gallery):
            gallery._read_facts()
        if embeddings.fingerprint != gallery.fingerprint:
            raise UserError(f"{gallery.name} holds points of another model; choose another name")
        gallery._upsert(embeddings)
        recall = f"{gallery._tune(embeddings):.1%} of the {NEAREST} nearest neighbours"
        held = counted(len(gallery), gallery.noun)
        return f"{gallery.name}, which now holds {held}; it finds {recall}"

    def __len__(self) -> int:
        return self._count(None)

    def has_class(self, name: str) -> bool:
        """Whether an image is of this class."""
        return self._count(name) > 0

    def classes(self) -> list[str]:
        """Names of the classes of a thousand images, in order."""
        return sorted({item.label for item in self.sample(_CLASSES_SAMPLE)} - {""})

    def read(self, keys: Sequence[str]) -> list[GalleryItem]:
        """The images with these keys, in order, without unknown keys; see `image_key`."""
        images = self._read(list(filter(_UUID.fullmatch, keys)))
        items = {item.key: item for item in self._in_space(images)}
        return [items[key] for key in keys if key in items]

    def sample(self, most: int) -> list[GalleryItem]:
        """Up to `most` images, those with the lowest keys; since keys are hashes, at random."""
        return self._in_space(self._first(most))

    def nearest(
        self, points: Points, k: int, paths: Sequence[str] | None = None, label: str | None = None
    ) -> list[Neighbours]:
        """Finds the k nearest images of each query; see `Gallery.nearest`.

        A search in a class is exact. If several images link to a query's file, the query may find
        fewer than k.
        """
        inputs.check_count(k)
        self._read_facts()  # Another export may have added shells.
        wanted = Wanted(label=label, exact=label is not None)
        images, distances, rows = self._search(points, k + (paths is not None), wanted)
        results = ArrayGallery()  # Of the images found for all queries.
        results.ids = np.array([image.path for image in images], str)
        results.labels = np.array([image.label for image in images], str)
        # Each alone: of equal names among several, `own_rows` does not know which is which.
        own_rows = [results.own_rows([path])[0] for path in paths or [""] * len(points)]
        return [
            hits._replace(keys=[images[int(row)].key for row in hits.keys])
            for hits in results.neighbours(distances, rows, own_rows, k)
        ]

    def remove(self, ids: Sequence[str]) -> None:
        """Removes the images with these paths; ignores paths that the gallery does not hold."""
        self._delete([image_key(path) for path in ids])

    def _in_space(self, images: Sequence[GalleryItem]) -> list[GalleryItem]:
        points = self._points(images).astype(np.float32, copy=False)
        return [x._replace(point=point) for x, point in zip(images, points, strict=True)]

    def _points(self, images: Sequence[GalleryItem]) -> Float[np.ndarray, "n d"]:
        """Points of the gallery's space, from those that the server stores."""
        if not images:
            return np.empty((0, 1))
        return euclidean.from_ball(np.array([x.point for x in images], np.float32), self.space)

    def _upsert(self, embeddings: Embeddings) -> None:
        """Adds images, or replaces those with equal paths."""
        points = euclidean.in_ball(embeddings.vectors, embeddings.space)
        shells = euclidean.shells_of(points, embeddings.space)
        self.shells = sorted({*self.shells, *shells.tolist()})
        self._write_facts()  # Before the images: searches must know their shells.

        def batch(block: slice) -> Batch:
            paths, labels = embeddings.ids[block].tolist(), embeddings.labels[block].tolist()
            rounded = points[block].astype(np.float32)
            images = map(GalleryItem, map(image_key, paths), paths, labels, rounded)
            return list(zip(images, shells[block].tolist(), strict=True))

        blocks = inputs.blocks(len(embeddings), _UPLOAD_BATCH)
        self._add(map(batch, Bar(blocks, unit=f" {_UPLOAD_BATCH} {self.noun}s", disable=None)))

    def _tune(self, embeddings: Embeddings) -> float:
        """Chooses and saves how to search, and returns the recall of such searches.

        Takes the fewest candidates with which searches for a sample find 98% of the 10 nearest.
        Each search leaves out only its query's image. If the whole sample were left out, a graph
        could not reach images that are linked only through it, at any number of candidates.
        """
        sample_rows, _ = euclidean.sample_queries(len(embeddings), len(self))
        if not len(sample_rows):
            return 1.0
        keys = list(map(image_key, embeddings.ids[sample_rows]))

        def search_sample(way: tuple[int, bool, int], exact: bool = False) -> inputs.Nearest:
            _, self.by_shell, self.candidates = way
            k, wanted = min(NEAREST, len(self) - 1), Wanted(keys, exact=exact)
            return self._search(embeddings.vectors[sample_rows], k, wanted)[1:]

        # The number of all candidates, whether by shell, and the number in each search.
        ways = [(2 * n, False, n) for n in _REPEATED]
        ways += [(len(self.shells) * n, True, n) for n in _IN_SHELL]
        ways = [way for way in ways if way[1] in self._kinds()]
        recall = euclidean.tune(search_sample, search_sample(ways[0], exact=True), sorted(ways))
        self._write_facts()
        return recall

    def _kinds(self) -> set[bool]:
        """Ways to search that may be chosen: repeatedly (False), and in each shell (True)."""
        return {False, len(self.shells) > 1}

    def _search(self, points: Points, k: int, wanted: Wanted) -> _Results:
        """Finds the k nearest of the wanted images for each query."""
        points = np.asarray(points, np.float32)
        shells = self.shells if self.by_shell and not wanted.exact else [None]
        scanned = _SCANNED * k if wanted.exact else 0
        count = max(scanned, self.candidates * max(k, NEAREST) // NEAREST)
        images: dict[str, GalleryItem] = {}

        def search(centres: Points, queries: Rows) -> euclidean.Candidates:
            without = [wanted.without[i] for i in queries] if wanted.without else []
            wanted_in = [wanted._replace(without=without, shell=shell) for shell in shells]
            answers = [self._nearest(centres.astype(np.float32), count, x) for x in wanted_in]
            lists = [list(itertools.chain(*parts)) for parts in zip(*answers, strict=True)]
            images.update((image.key, image) for image in itertools.chain(*lists))
            row_of = {key: row for row, key in enumerate(images)}
            columns = itertools.zip_longest(*lists)
            items = [[row_of[x.key] if x else -1 for x in column] for column in columns]
            listed = np.array(items, int).reshape(len(items), len(lists)).T
            return self._points(list(images.values())), listed

        separations, rows = euclidean.repeat(
            search, points, k=k, space=self.space, once=len(shells) > 1
        )
        return list(images.values()), subtraction.distances(self.space, separations), rows

    def _read_facts(self) -> None:
        if (text := self._load_facts()) is None:
            raise UserError(f"there is no gallery at {self.name}")
        try:
            facts = {"noun": "image"} | json.loads(text)  # Which earlier exports lack.
            self.space = space_of(facts["space"])
            for name in _FACTS:
                setattr(self, name, facts[name])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.name} was not written by hypjax.embed") from error

    def _write_facts(self) -> None:
        facts = {name: getattr(self, name) for name in _FACTS}
        self._save_facts(json.dumps(facts | {"space": describe_space(self.space)}))


def image_key(path: str) -> str:
    """A UUID made from an image's path, so that adding the image again replaces it."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"file:{path}"))


def spellings(label: str) -> list[str]:
    """The name of a class, as given and in two Unicode forms."""
    return [label, *(unicodedata.normalize(form, label) for form in ("NFC", "NFD"))]
