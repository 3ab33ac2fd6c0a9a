"""Searching a gallery with images as queries, and what that finds."""

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

from hypjax.data.dataset import Dataset
from hypjax.errors import UserError, on_one_line
from hypjax.inference.matches import Match
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.galleries import Gallery, require_model
from hypjax.retrieval.refinement import Refinement


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


def find_hits(
    queries: Embeddings,
    images: Dataset,
    gallery: Gallery,
    k: int,
    refinement: Refinement | None = None,
    match: Match | None = None,
) -> list[Hits]:
    """Finds the nearest images of a gallery to each query, in the order of their distances.

    With a refinement, queries are expanded or results are re-ranked, which approximate searches
    cannot do. An image is not found as its own neighbour. A query's class is known if it is given,
    if the gallery holds the image, or if the image's folder is named like one of its classes.
    `match` is what is known of the distance of matches.
    """
    require_model(gallery, queries.fingerprint)
    for path, reason in queries.unreadable.items():
        raise UserError(f"cannot read {path} ({reason})")
    named = [images.path(i) for i in range(len(images))]
    paths = [os.path.realpath(path) if path else "" for path in named]
    refinement = refinement or Refinement()
    if refinement == Refinement():
        neighbours = gallery.nearest(queries.vectors, k, paths)
    elif isinstance(gallery, Embeddings):
        neighbours = gallery.nearest_refined(queries.vectors, k, paths, refinement)
    else:
        raise UserError(
            "expansion, re-ranking and prefixes search all vectors; give the .npz gallery"
        )
    fewest = min((len(hits.ids) for hits in neighbours), default=k)
    if fewest < k:
        raise UserError(f"k is {k}, but a search finds only {fewest} images")
    has_class = functools.cache(gallery.has_class)
    # Distances of an expanded query, or of a hit re-ranked by its neighbours, are others.
    if refinement.expansion or refinement.reranking:
        match = None
    return [
        Hits(
            query=images.name(i),
            label=images.class_name(i) or hits.own_label or _folder_label(named[i], has_class),
            paths=hits.ids,
            labels=hits.labels,
            distances=hits.distances,
            remark=match.remark(hits.distances[0]) if match and hits.distances else "",
        )
        for i, hits in enumerate(neighbours)
    ]


def _folder_label(path: str, has_class: Callable[[str], bool]) -> str:
    """The name of a query's folder, if it names one of the classes, or else ''."""
    folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
    return folder if path and has_class(folder) else ""
