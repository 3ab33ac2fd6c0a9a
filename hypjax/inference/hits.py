"""Hits of searches, and the distance beyond which the nearest hit is probably no match."""

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
from hypjax.runs.files import MATCHES, read_object
from hypjax.system import console
from hypjax.system.files import write_json

_MATCH_SHARE = 0.95  # Share of the queries whose match is within the distance.
_MAX_IMAGES = 2_000  # Largest number of images to measure match distances on.
_MIN_QUERIES = 10  # Fewest queries with a match for a meaningful quantile.


class Match(NamedTuple):
    """The distance within which queries find their nearest match, an image of their class."""

    distance: float  # 95% of the queries with a match find one within this distance.
    images: str  # Split on which the distance was measured: validation or test.

    def remark(self, nearest: float) -> str:
        """Warns that a nearest hit at this distance is probably no match; '' within `distance`."""
        if nearest <= self.distance:
            return ""
        return (
            f"perhaps no match: the nearest hit is at {nearest:.4f}, and {_MATCH_SHARE:.0%} of the "
            f"{self.images} images with a match found it within {self.distance:.4f}"
        )


def match_split(splits: Splits) -> tuple[str, Dataset, Dataset | None] | None:
    """The split on which a `Match` is measured: its name, queries, and gallery if it has one.

    None for a test with ground truth, where matches are not the images of a query's class.
    """
    if splits.validation is not None:
        return "validation", _images_of_random_classes(splits.validation), None
    if splits.ground_truth is not None:
        return None
    if splits.gallery is None:
        return "test", _images_of_random_classes(splits.test), None
    gallery = _images_of_random_classes(splits.gallery)
    with_match = np.flatnonzero(np.isin(splits.test.labels, gallery.labels))
    return "test", splits.test.take(with_match[:_MAX_IMAGES]), gallery


def _images_of_random_classes(images: Dataset) -> Dataset:
    """Images of random classes, at most `_MAX_IMAGES`; the last class may be incomplete."""
    classes, indices = np.unique(images.labels, return_inverse=True)
    class_rank = np.random.default_rng(0).permutation(len(classes))[indices]
    return images.take(np.sort(np.argsort(class_rank, kind="stable")[:_MAX_IMAGES]))


def match_distance(
    queries: Float[np.ndarray, "n d"],
    labels: Int[np.ndarray, " n"],
    gallery: Float[np.ndarray, "m d"],
    gallery_labels: Int[np.ndarray, " m"],
    space: Space,
    own_rows: OwnRows = (),
) -> float | None:
    """Measures the distance of a `Match`; None if fewer than 10 queries have a match.

    `own_rows` are the gallery rows of each query's own file, which is not a match. If `queries`
    and `gallery` are the same array, a query's own row is excluded, too.
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
    return float(np.quantile(nearest, _MATCH_SHARE, method="higher"))


def write_matches(folder: pathlib.Path, matches: Mapping[str, Match]) -> None:
    """Writes match distances by fingerprint of the embeddings."""
    with console.tolerating(str(folder / MATCHES)):
        write_json(folder / MATCHES, {key: match._asdict() for key, match in matches.items()})


def read_matches(folder: pathlib.Path) -> dict[str, Match]:
    """Reads a run's match distances by fingerprint of the embeddings; {} if none were measured."""
    matches = (read_object(folder / MATCHES) or {}).items()
    return {fingerprint: Match(**fields) for fingerprint, fields in matches}


class Hits(NamedTuple):
    """A query and its hits, nearest first; a label is the class, '' if unknown."""

    query: str
    label: str
    paths: list[str]
    labels: list[str]
    distances: list[float]
    remark: str = ""  # On the nearest hit, see `Match`.

    def mark(self, i: int) -> str:
        """Returns 'right' or 'wrong' for hit `i`, or '' if its or the query's class is unknown."""
        if not (self.label and self.labels[i]):
            return ""
        return "right" if self.label == self.labels[i] else "wrong"

    def __str__(self) -> str:
        """A table with a line per hit: rank, distance, right or wrong, and path."""
        label, mark_width = "", 0
        if self.label:
            label, mark_width = f" ({on_one_line(self.label)})", 7
        lines = [f"{_short_path(self.query)}{label}", f"rank   distance  {'':{mark_width}}path"]
        for i, (path, distance) in enumerate(zip(self.paths, self.distances, strict=True)):
            mark = f"{self.mark(i):{mark_width}}"
            lines.append(f"{i + 1:>4} {distance:>10.4f}  {mark}{_short_path(path)}")
        if self.remark:
            lines.append(f"{_short_path(self.query)}: {self.remark}")
        return "\n".join(lines)


def _short_path(path: str) -> str:
    """A path relative to the current folder if it lies below the folder."""
    relative = os.path.relpath(path)
    return on_one_line(path if "://" in path or relative.startswith(os.pardir) else relative)


def require_searchable(gallery: Gallery, k: int, postprocessing: Postprocessing) -> None:
    """Raises a `UserError`, before queries are embedded, if a gallery does not allow a search."""
    if postprocessing != Postprocessing() and not isinstance(gallery, Embeddings):
        raise UserError("expansion and re-ranking need the .npz gallery")
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
    """Finds the k nearest images of a gallery to each query, nearest first.

    `queries` are the embeddings of `images`. An image does not find itself, unless `keep_self`. A
    query without a class gets its class in the gallery, or else the name of its folder if the
    gallery has a class of that name. `match` adds remarks on hits that are probably no match.
    """
    postprocessing = postprocessing or Postprocessing()
    require_searchable(gallery, k, postprocessing)
    k = int(k)
    require_model(gallery, queries.fingerprint, queries.model)
    for path, reason in queries.unreadable.items():
        raise UserError(f"cannot read {path} ({reason})")
    paths = images.names.tolist()  # Names of features may be paths, too.
    if images.vectors is None:
        paths = [images.path(i) for i in range(len(images))]
    ids = [""] * len(paths) if keep_self else paths
    if postprocessing == Postprocessing():
        neighbours = gallery.nearest(queries.vectors, k, ids)
    else:
        points, own_ids, num_listed = queries.vectors, None, k
        own_rows = gallery.own_rows(ids, points)
        if most_own := max(map(len, own_rows), default=0):
            own_ids = np.array([rows[0] if rows else -1 for rows in own_rows])
            # The search leaves out a query's first own row, and `neighbours` the others.
            num_listed = min(k - 1 + most_own, len(gallery) - 1)
        ranked = postprocessing.search(
            points, own_ids, gallery.vectors, k=num_listed, space=gallery.space
        )
        neighbours = gallery.neighbours(*ranked, own_rows, k)
    fewest = min((len(nearest.ids) for nearest in neighbours), default=k)
    if fewest < k:
        raise UserError(f"k is {k}, but a search finds only {fewest} images")
    has_class = functools.cache(gallery.has_class)
    # Expansion and re-ranking change the distances.
    if postprocessing.expansion or postprocessing.reranking:
        match = None
    results = []
    for i, nearest in enumerate(neighbours):
        folder = os.path.basename(os.path.dirname(paths[i]))
        label = images.class_name(i) or nearest.own_label or (folder if has_class(folder) else "")
        hits = Hits(images.name(i), label, nearest.ids, nearest.labels, nearest.distances)
        if match and hits.distances and hits.mark(0) != "right":
            hits = hits._replace(remark=match.remark(hits.distances[0]))
        results.append(hits)
    marks = {hits.mark(i) for hits in results for i in range(len(hits.labels))}
    if marks - {""} == {"wrong"} and not any(has_class(hits.label) for hits in results):
        console.warn("no query's class is in the gallery; check the labels")
    return results
