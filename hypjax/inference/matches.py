"""How near matches are: the distance beyond which a nearest hit probably shows another class."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits
from hypjax.geometry import Space, spaces
from hypjax.runs.files import MATCHES, read_object
from hypjax.system import console
from hypjax.system.files import write_json

_SHARE = 0.95  # Of the queries, whose matches are within the distance.
_MAX_IMAGES = 2_000  # That are compared with each other: all of some classes.
_MIN_QUERIES = 10  # With a match; fewer say too little.


class Match(NamedTuple):
    """How far a query is from its nearest match."""

    distance: float  # Within it, 95% of the queries that have a match found their nearest one.
    images: str  # The part of the dataset on which that was measured: validation or test.

    def remark(self, nearest: float) -> str:
        """Warns that the nearest hit, at this distance, is probably no match; '' if it may be."""
        if nearest <= self.distance:
            return ""
        return (
            f"perhaps no match: {_SHARE:.0%} of the {self.images} images with a match found it "
            f"within {self.distance:.4f}"
        )


def choose(splits: Splits) -> tuple[str, Dataset, Dataset | None] | None:
    """Chooses images to measure on: validation images or, without these, test images.

    Returns the part's name, the queries, and the gallery; None if the queries search each other.
    """
    if splits.validation is not None:
        return "validation", _of_some_classes(splits.validation), None
    if splits.judgements is not None:  # Matches of judged queries are not those of a class.
        return None
    if splits.gallery is None:
        return "test", _of_some_classes(splits.test), None
    items = _of_some_classes(splits.gallery)
    alike = np.flatnonzero(np.isin(splits.test.labels, items.labels))
    return "test", splits.test.take(alike[:_MAX_IMAGES]), items


def _of_some_classes(images: Dataset) -> Dataset:
    classes, places = np.unique(images.labels, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(classes))[places]
    return images.take(np.sort(np.argsort(order, kind="stable")[:_MAX_IMAGES]))


def match_distance(
    queries: Float[np.ndarray, "n d"],
    labels: Int[np.ndarray, " n"],
    gallery: Float[np.ndarray, "m d"] | None,
    gallery_labels: Int[np.ndarray, " m"] | None,
    *,
    space: Space,
) -> float | None:
    """The distance of a `Match`; None if fewer than 10 queries have a match."""
    among_itself = gallery is None
    items, item_labels = (queries, labels) if among_itself else (gallery, gallery_labels)
    distances = np.array(spaces.distance_matrix(space, queries, items))
    distances[labels[:, None] != item_labels] = np.inf
    if among_itself:
        np.fill_diagonal(distances, np.inf)
    nearest = distances.min(axis=1, initial=np.inf)
    nearest = nearest[np.isfinite(nearest)]
    if len(nearest) < _MIN_QUERIES:
        return None
    return float(np.quantile(nearest, _SHARE, method="higher"))


def write_matches(folder: pathlib.Path, matches: Mapping[str, Match]) -> None:
    """Writes match distances by fingerprint of the embeddings; a failure is a warning."""
    with console.tolerating(str(folder / MATCHES)):
        fields = {fingerprint: match._asdict() for fingerprint, match in matches.items()}
        write_json(folder / MATCHES, fields)


def read_matches(folder: pathlib.Path) -> dict[str, Match]:
    """Reads the match distances of a run, by fingerprint; empty if they were not measured."""
    matches = read_object(folder / MATCHES) or {}
    return {fingerprint: Match(**fields) for fingerprint, fields in matches.items()}
