"""Hits of searches: the nearest images of a gallery to each query."""

import dataclasses
import functools
import os
from typing import NamedTuple

import numpy as np

from hypjax.data.dataset import Dataset
from hypjax.errors import UserError, on_one_line
from hypjax.galleries.embeddings import Embeddings
from hypjax.galleries.search import Gallery, Neighbours, require_model
from hypjax.retrieval.inputs import Points, check_count
from hypjax.retrieval.postprocessing import NO_POSTPROCESSING, Postprocessing
from hypjax.system import console
from hypjax.types import composed


class Hits(NamedTuple):
    """A query and its hits, nearest first; a label is the class, '' if unknown."""

    query: str
    label: str
    paths: list[str]
    labels: list[str]
    distances: list[float]

    def mark(self, i: int) -> str:
        """Returns 'right' or 'wrong' for hit `i`, or '' if its or the query's class is unknown."""
        if not (self.label and self.labels[i]):
            return ""
        return "right" if composed(self.label) == composed(self.labels[i]) else "wrong"

    def __str__(self) -> str:
        """A table with a line per hit: rank, distance, right or wrong, and path."""
        label = f" ({on_one_line(self.label)})" if self.label else ""
        mark_width = len("right  ") if self.label else 0
        lines = [f"{_short_path(self.query)}{label}", f"rank   distance  {'':{mark_width}}path"]
        for i, (path, distance) in enumerate(zip(self.paths, self.distances, strict=True)):
            mark = f"{self.mark(i):{mark_width}}"
            lines.append(f"{i + 1:>4} {distance:>10.4f}  {mark}{_short_path(path)}")
        return "\n".join(lines)


def _short_path(path: str) -> str:
    """A path on one line, relative to the current folder if inside it."""
    if not os.path.isabs(path):  # Relative already, or a URL or a text.
        return on_one_line(path)
    relative = os.path.relpath(path)
    return on_one_line(path if relative.startswith(os.pardir) else relative)


def require_searchable(gallery: Gallery, k: int, postprocessing: Postprocessing) -> None:
    """Raises a `UserError`, before queries are embedded, if a gallery does not allow a search."""
    if postprocessing != NO_POSTPROCESSING and not isinstance(gallery, Embeddings):
        raise UserError("expansion and re-ranking need the .npz gallery")
    if not len(gallery):
        raise UserError(f"there are no {gallery.noun}s in the gallery")
    check_count(k)


def find_hits(
    queries: Embeddings,
    images: Dataset,
    gallery: Gallery,
    k: int,
    postprocessing: Postprocessing = NO_POSTPROCESSING,
    *,
    keep_self: bool = False,
) -> list[Hits]:
    """Finds the k nearest images of a gallery to each query, or all if there are fewer.

    `queries` are the embeddings of `images`. Hits are sorted, nearest first. An image does not find
    itself, unless `keep_self`. A query without a class gets its class in the gallery, or else the
    name of its folder if the gallery has a class of that name.
    """
    require_searchable(gallery, k, postprocessing)
    k = int(k)
    require_model(gallery, queries.fingerprint, queries.model)
    for path, reason in queries.unreadable.items():
        raise UserError(f"cannot read {path} ({reason})")
    paths = images.names.tolist()  # Names of features may be paths, too.
    if images.vectors is None:
        paths = [images.path(i) for i in range(len(images))]
    ids = [""] * len(paths) if keep_self else paths
    if postprocessing == NO_POSTPROCESSING:
        neighbours = gallery.nearest(queries.vectors, k, ids)
    else:
        assert isinstance(gallery, Embeddings)  # As `require_searchable` checks.
        neighbours = _postprocessed(queries.vectors, ids, gallery, k, postprocessing)
    has_class = functools.cache(gallery.has_class)
    results = []
    for i, nearest in enumerate(neighbours):
        folder = os.path.basename(os.path.dirname(paths[i]))
        label = images.class_name(i) or nearest.own_label or (folder if has_class(folder) else "")
        results.append(Hits(images.name(i), label, nearest.ids, nearest.labels, nearest.distances))
    marks = {hits.mark(i) for hits in results for i in range(len(hits.labels))}
    if marks - {""} == {"wrong"} and not any(has_class(hits.label) for hits in results):
        console.warn("no query's class is in the gallery; check the labels")
    return results


def _postprocessed(
    points: Points, ids: list[str], gallery: Embeddings, k: int, postprocessing: Postprocessing
) -> list[Neighbours]:
    """The k nearest items of each query after postprocessing, without the query's own images."""
    own_rows = gallery.own_rows(ids, points)
    in_gallery = np.array([len(rows) > 0 for rows in own_rows], bool)
    if k >= len(gallery) and in_gallery.any() and not in_gallery.all():
        # The others find one image more, but a search lists equally many for all of its queries.
        neighbours: dict[int, Neighbours] = {}
        for rows in np.flatnonzero(in_gallery), np.flatnonzero(~in_gallery):
            ids_of_rows = [ids[row] for row in rows]
            of_rows = _postprocessed(points[rows], ids_of_rows, gallery, k, postprocessing)
            neighbours |= zip(rows.tolist(), of_rows, strict=True)
        return [neighbours[row] for row in range(len(points))]
    first_own_rows, num_items, num_listed = None, len(gallery), k
    if most_own := max(map(len, own_rows), default=0):
        first_own_rows = np.array([rows[0] if rows else -1 for rows in own_rows])  # −1: none.
        # The search leaves out a query's first own row, and `neighbours` its other own rows.
        num_items, num_listed = num_items - 1, k - 1 + most_own
    if not num_items:
        return gallery.nearest(points, k, ids)
    expansion = min(postprocessing.expansion, num_items)
    postprocessing = dataclasses.replace(postprocessing, expansion=expansion)
    num_listed = min(num_listed, num_items)
    distances, rows = postprocessing.search(
        points, first_own_rows, gallery.vectors, k=num_listed, space=gallery.space
    )
    return gallery.neighbours(distances, rows, own_rows, k)
