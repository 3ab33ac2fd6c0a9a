"""Hits of searches, and the distance beyond which a nearest hit is probably no match."""

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits
from hypjax.errors import UserError, on_one_line
from hypjax.geometry import Space, spaces
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.galleries import Gallery, require_model
from hypjax.retrieval.inputs import check_count
from hypjax.retrieval.own_images import OwnRows
from hypjax.retrieval.postprocessing import Postprocessing
from hypjax.retrieval.projection import require_prefix
from hypjax.runs.files import MATCHES, read_object
from hypjax.system import console
from hypjax.system.files import write_json

_SHARE = 0.95  # Share of the queries whose match is within the distance.
_MAX_IMAGES = 2_000  # To compare with each other: all of some classes.
_MIN_QUERIES = 10  # With a match.


class Match(NamedTuple):
    """How far a query is from its nearest match."""

    distance: float  # Within it, 95% of the queries with a match find the nearest one.
    images: str  # The split on which it was measured: validation or test.

    def remark(self, nearest: float) -> str:
        """Warns that the nearest hit, at this distance, is probably no match; '' if it may be."""
        if nearest <= self.distance:
            return ""
        return (
            f"perhaps no match: the nearest hit is at {nearest:.4f}, and {_SHARE:.0%} of the "
            f"{self.images} images with a match found it within {self.distance:.4f}"
        )


def match_split(splits: Splits) -> tuple[str, Dataset, Dataset | None] | None:
    """The split on which a `Match` is measured: its name, queries, and gallery if it has one.

    None for a test with ground truth, where matches are not the images of a query's class.
    """
    if splits.validation is not None:
        return "validation", _of_some_classes(splits.validation), None
    if splits.ground_truth is not None:
        return None
    if splits.gallery is None:
        return "test", _of_some_classes(splits.test), None
    items = _of_some_classes(splits.gallery)
    alike = np.flatnonzero(np.isin(splits.test.labels, items.labels))
    return "test", splits.test.take(alike[:_MAX_IMAGES]), items


def _of_some_classes(images: Dataset) -> Dataset:
    classes, indices = np.unique(images.labels, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(classes))[indices]
    return images.take(np.sort(np.argsort(order, kind="stable")[:_MAX_IMAGES]))


def match_distance(
    queries: Float[np.ndarray, "n d"],
    labels: Int[np.ndarray, " n"],
    gallery: Float[np.ndarray, "m d"],
    gallery_labels: Int[np.ndarray, " m"],
    space: Space,
    own_rows: OwnRows = (),
) -> float | None:
    """The distance of a `Match`; None if fewer than 10 queries have one.

    No query matches its own file. If the queries are the gallery, they search among each other.
    """
    distances = np.array(spaces.distance_matrix(space, queries, gallery))
    distances[labels[:, None] != gallery_labels] = np.inf
    for query, rows in enumerate(own_rows):
        distances[query, rows] = np.inf
    if queries is gallery:
        np.fill_diagonal(distances, np.inf)
    nearest = distances.min(axis=1, initial=np.inf)
    nearest = nearest[np.isfinite(nearest)]
    if len(nearest) < _MIN_QUERIES:
        return None
    return float(np.quantile(nearest, _SHARE, method="higher"))


def write_matches(folder: pathlib.Path, matches: Mapping[str, Match]) -> None:
    """Writes match distances by fingerprint of the embeddings."""
    with console.tolerating(str(folder / MATCHES)):
        write_json(folder / MATCHES, {key: match._asdict() for key, match in matches.items()})


def read_matches(folder: pathlib.Path) -> dict[str, Match]:
    """Reads a run's match distances by fingerprint, if they were measured."""
    matches = (read_object(folder / MATCHES) or {}).items()
    return {fingerprint: Match(**fields) for fingerprint, fields in matches}


class Hits(NamedTuple):
    """A query's hits, nearest first, and a remark on the nearest; '' is an unknown class."""

    query: str
    label: str
    paths: list[str]
    labels: list[str]
    distances: list[float]
    remark: str = ""

    def mark(self, i: int) -> str:
        """Returns 'right' or 'wrong' for a hit, or '' if a class is unknown."""
        known = self.label and self.labels[i]
        return ("right" if self.label == self.labels[i] else "wrong") if known else ""

    def __str__(self) -> str:
        """A table with one line per hit: rank, distance, whether it is right, and path."""
        known, width = f" ({on_one_line(self.label)})" if self.label else "", 7 * bool(self.label)
        lines = [f"{_shown(self.query)}{known}", f"rank   distance  {'':{width}}path"]
        for i, (path, distance) in enumerate(zip(self.paths, self.distances, strict=True)):
            lines.append(f"{i + 1:>4} {distance:>10.4f}  {self.mark(i):{width}}{_shown(path)}")
        if self.remark:
            lines.append(f"{_shown(self.query)}: {self.remark}")
        return "\n".join(lines)


def _shown(path: str) -> str:
    shorter = os.path.relpath(path)
    return on_one_line(path if "://" in path or shorter.startswith(os.pardir) else shorter)


def require_searchable(gallery: Gallery, k: int, postprocessing: Postprocessing) -> None:
    """Raises a `UserError` if a gallery cannot be searched so; call it before embedding queries."""
    if postprocessing != Postprocessing() and not isinstance(gallery, Embeddings):
        raise UserError("expansion, re-ranking and prefixes need the .npz gallery")
    if postprocessing.prefix:
        require_prefix(postprocessing.prefix, gallery.vectors.shape[1], gallery.space)
    check_count(k, len(gallery))
    if postprocessing.expansion:
        check_count(postprocessing.expansion, len(gallery), "expansion")


def find_hits(
    queries: Embeddings,
    images: Dataset,
    gallery: Gallery,
    k: int,
    postprocessing: Postprocessing | None = None,
    match: Match | None = None,
    *,
    keep_self: bool = False,
) -> list[Hits]:
    """Finds the nearest images of a gallery to each query, in the order of their distances.

    An image does not find itself, unless `keep_self`. A query without a class has its class in the
    gallery, or else its folder's name if that is a class of the gallery.
    """
    postprocessing = postprocessing or Postprocessing()
    require_searchable(gallery, k, postprocessing)
    k = int(k)
    require_model(gallery, queries.fingerprint, queries.model)
    for path, reason in queries.unreadable.items():
        raise UserError(f"cannot read {path} ({reason})")
    paths = images.names.tolist()  # Ids of features may be paths, too.
    if images.vectors is None:
        paths = [images.path(i) for i in range(len(images))]
    ids = [""] * len(paths) if keep_self else paths
    if postprocessing == Postprocessing():
        neighbours = gallery.nearest(queries.vectors, k, ids)
    else:
        points, items, own_ids, listed = queries.vectors, gallery.vectors, None, k
        own_rows = gallery.own_rows(ids, points)
        if most := max(map(len, own_rows), default=0):
            own_ids = np.array([rows[0] if rows else -1 for rows in own_rows])
            listed = min(k - 1 + most, len(gallery) - 1)
        ranked = postprocessing.search(points, own_ids, items, k=listed, space=gallery.space)
        neighbours = gallery.neighbours(*ranked, own_rows, k)
    fewest = min((len(hits.ids) for hits in neighbours), default=k)
    if fewest < k:
        raise UserError(f"k is {k}, but a search finds only {fewest} images")
    has_class = functools.cache(gallery.has_class)
    # Expansion and re-ranking change the distances.
    if postprocessing.expansion or postprocessing.reranking:
        match = None
    results = []
    for i, nearest in enumerate(neighbours):
        folder = os.path.basename(os.path.dirname(paths[i]))
        label = images.class_name(i) or nearest.own_label or folder * has_class(folder)
        hits = Hits(images.name(i), label, nearest.ids, nearest.labels, nearest.distances)
        if match and hits.distances and hits.mark(0) != "right":
            hits = hits._replace(remark=match.remark(hits.distances[0]))
        results.append(hits)
    marks = {hits.mark(i) for hits in results for i in range(len(hits.labels))}
    if marks - {""} == {"wrong"} and not any(has_class(hits.label) for hits in results):
        console.warn("no query's class is in the gallery; check the labels")
    return results
