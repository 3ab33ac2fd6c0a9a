"""Searching a gallery with images as queries."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from hypjax.data.photos import Photo
from hypjax.errors import UserError
from hypjax.inference.embedder import TrainedEmbedder
from hypjax.reports.hits import Hits
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.graph import GraphGallery
from hypjax.retrieval.refinement import Refinement


def find_hits(
    embedder: TrainedEmbedder,
    photos: Sequence[Photo],
    gallery: Embeddings | GraphGallery,
    k: int,
    refinement: Refinement | None = None,
) -> list[Hits]:
    """Finds the nearest images of a gallery to each query, in the order of their distances.

    With a refinement, queries are expanded or results are re-ranked, which a graph cannot do. An
    image is not found as its own neighbour. A query's class is known if it is given, if the gallery
    holds the image, or if the image's folder is named like one of the gallery's classes.

    Raises:
        UserError: The gallery comes from another run, a query cannot be read, or k is too large.
    """
    if gallery.fingerprint != embedder.fingerprint:
        raise UserError(
            "the gallery was embedded by another run, by other parameters or as another embedding; "
            "embed it again with this run"
        )
    queries = embedder.embed(photos)
    for path, reason in queries.unreadable.items():
        raise UserError(f"cannot read {path} ({reason})")
    places = {os.path.realpath(path): i for i, path in enumerate(gallery.ids.tolist())}
    own = np.array([_place(photo, places) for photo in photos])
    excluded = own if (own >= 0).any() else None
    refinement = refinement or Refinement()
    if isinstance(gallery, GraphGallery):
        if refinement != Refinement():
            raise UserError("expansion and re-ranking search all vectors; give the .npz gallery")
        distances, found = gallery.nearest(queries.vectors, k, excluded)
    else:
        distances, found = refinement.search(
            queries.vectors, excluded, gallery.vectors, k=k, space=gallery.space
        )
    classes = set(gallery.labels.tolist()) - {""}
    return [
        Hits(
            query=str(photo.path),
            label=photo.label or _known_label(gallery, own[i]) or _folder_label(photo, classes),
            paths=gallery.ids[found[i]].tolist(),
            labels=gallery.labels[found[i]].tolist(),
            distances=distances[i].tolist(),
        )
        for i, photo in enumerate(photos)
    ]


def _place(photo: Photo, places: Mapping[str, int]) -> int:
    """The index of a query among the gallery's files; -1 if it is none of them."""
    return places.get(os.path.realpath(photo.path), -1) if photo.image is None else -1


def _known_label(gallery: Embeddings | GraphGallery, own: int) -> str:
    """The class of a query at this index in the gallery; '' if it is not there (-1)."""
    return str(gallery.labels[own]) if own >= 0 else ""


def _folder_label(photo: Photo, classes: set[str]) -> str:
    """The name of a query's folder, if it names one of the classes, or else ''."""
    folder = photo.path.absolute().parent.name
    return folder if folder in classes else ""
