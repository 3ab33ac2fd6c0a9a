"""Searching a gallery with images as queries, and what that finds."""

import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from hypjax.data.photos import Photo
from hypjax.errors import UserError, on_one_line
from hypjax.inference.image_embedder import ImageEmbedder
from hypjax.integrations.exports import Gallery
from hypjax.integrations.qdrant import Neighbours
from hypjax.integrations.usearch import GraphGallery
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.selection import KeptGallery


class Hits(NamedTuple):
    """The hits of a query, nearest first, and a remark on the nearest; '' is an unknown class."""

    query: str
    label: str
    paths: list[str]
    labels: list[str]
    distances: list[float]
    remark: str = ""

    def mark(self, i: int) -> str:
        """Returns 'right' or 'wrong' for a hit, or '' if a class is unknown."""
        if not (self.label and self.labels[i]):
            return ""
        return "right" if self.label == self.labels[i] else "wrong"

    def __str__(self) -> str:
        """A table with one line per hit: rank, distance, whether it is right, and path."""
        known = f" ({on_one_line(self.label)})" if self.label else ""
        lines = [
            f"{_shown(self.query)}{known}",
            "rank   distance  " + ("       " if known else "") + "path",
        ]
        for i, (path, distance) in enumerate(zip(self.paths, self.distances, strict=True)):
            mark = f"{self.mark(i):<7}" if known else ""
            lines.append(f"{i + 1:>4} {distance:>10.4f}  {mark}{_shown(path)}")
        return "\n".join(filter(None, [*lines, self.remark]))


def _shown(path: str) -> str:
    """Returns a path on one line, relative to the working directory if it is below it."""
    shorter = os.path.relpath(path)
    return on_one_line(path if "://" in path or shorter.startswith(os.pardir) else shorter)


class FeatureQueries:
    """Stands for a model where the queries' features are given: maps them into a gallery's space.

    Attributes:
        fingerprint: That of the gallery, since nothing tells which model made the features.
        match: Nothing is known of the distance of matches.
    """

    match = None

    def __init__(self, gallery: Gallery) -> None:
        self.space, self.fingerprint = gallery.space, gallery.fingerprint

    def embed(self, photos: Sequence[Photo]) -> Embeddings:
        """Maps features; raises a `UserError` for images."""
        if image := next((photo.path for photo in photos if photo.vector is None), None):
            raise UserError(f"{image} is no file of features; name the run that embeds images, too")
        features = np.stack([photo.vector for photo in photos])
        return Embeddings.from_arrays(features, space=self.space)


def find_hits(
    embedder: ImageEmbedder | FeatureQueries,
    photos: Sequence[Photo],
    gallery: Gallery,
    k: int,
    refinement: Refinement | None = None,
) -> list[Hits]:
    """Finds the nearest images of a gallery to each query, in the order of their distances.

    With a refinement, queries are expanded or results are re-ranked, which approximate searches
    cannot do. An image is not found as its own neighbour. A query's class is known if it is given,
    if the gallery holds the image, or if the image's folder is named like one of its classes.
    """
    if gallery.fingerprint != embedder.fingerprint:
        raise UserError(
            "the gallery was embedded by another run, by other parameters or as another embedding; "
            "embed it again with this model, or name the same --embedding"
        )
    queries = embedder.embed(photos)
    for path, reason in queries.unreadable.items():
        raise UserError(f"cannot read {path} ({reason})")
    paths = [os.path.realpath(photo.path) if photo.is_named else "" for photo in photos]
    refinement = refinement or Refinement()
    if not isinstance(gallery, Embeddings) and refinement != Refinement():
        raise UserError(
            "expansion, re-ranking and prefixes search all vectors; give the .npz gallery"
        )
    if isinstance(gallery, Embeddings | GraphGallery):
        found = _search_arrays(queries.vectors, paths, gallery, k, refinement)
        has_class = _known(gallery).classes.__contains__
    else:
        found = gallery.nearest(queries.vectors, k, paths)
        has_class = functools.cache(gallery.has_class)
    # Distances of an expanded query, or of a hit re-ranked by its neighbours, are others.
    usual = dataclasses.replace(refinement, shortlist=None) == Refinement()
    match = embedder.match if usual else None
    return [
        Hits(
            query=str(photo.path),
            label=photo.label
            or hits.own_label
            or (_folder_label(photo, has_class) if photo.is_named else ""),
            paths=hits.ids,
            labels=hits.labels,
            distances=hits.distances,
            remark=match.remark(hits.distances[0]) if match and hits.distances else "",
        )
        for photo, hits in zip(photos, found, strict=True)
    ]


def _search_arrays(
    points: Float32[np.ndarray, "n d"],
    paths: Sequence[str],
    gallery: Embeddings | GraphGallery,
    k: int,
    refinement: Refinement,
) -> list[Neighbours]:
    known = _known(gallery)
    own = np.array([known.places.get(path, -1) for path in paths])
    excluded = own if (own >= 0).any() else None
    if isinstance(gallery, GraphGallery):
        distances, found = gallery.nearest(points, k, excluded)
    else:
        distances, found = refinement.search(
            points, excluded, known.vectors, k=k, space=gallery.space
        )
    return [
        Neighbours(
            gallery.ids[found[i]].tolist(),
            gallery.labels[found[i]].tolist(),
            distances[i].tolist(),
            str(gallery.labels[own[i]]) if own[i] >= 0 else "",
        )
        for i in range(len(points))
    ]


class _Known(NamedTuple):
    """What each search of a gallery needs again, until its images change."""

    ids: np.ndarray  # Of the images; a gallery that changes has another array.
    places: dict[str, int]  # Row of each image, by its path without links.
    classes: set[str]
    vectors: KeptGallery | None  # Of exact searches.


_KNOWN: weakref.WeakKeyDictionary[Gallery, _Known] = weakref.WeakKeyDictionary()


def _known(gallery: Embeddings | GraphGallery) -> _Known:
    """What is known of a gallery: found once for each that is open, and again when it changes."""
    if gallery not in _KNOWN or _KNOWN[gallery].ids is not gallery.ids:
        vectors = KeptGallery(gallery.vectors) if isinstance(gallery, Embeddings) else None
        places = {path: row for row, path in enumerate(_real_paths(gallery.ids.tolist()))}
        classes = set(gallery.labels.tolist()) - {""}
        _KNOWN[gallery] = _Known(gallery.ids, places, classes, vectors)
    return _KNOWN[gallery]


def _real_paths(paths: Sequence[str]) -> Iterator[str]:
    """Paths without links; each folder is resolved once."""
    real = functools.cache(os.path.realpath)
    for path in paths:
        folder, name = os.path.split(path)
        found = os.path.join(real(folder), name)
        yield os.path.realpath(found) if os.path.islink(found) else found


def _folder_label(photo: Photo, has_class: Callable[[str], bool]) -> str:
    """The name of a query's folder, if it names one of the classes, or else ''."""
    folder = os.path.basename(os.path.dirname(os.path.abspath(photo.path)))
    return folder if has_class(folder) else ""
