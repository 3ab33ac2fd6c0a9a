"""Images that a dataset holds more than once: queries in their gallery, and identical files."""

import collections
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Int

from hypjax.data.dataset import Dataset
from hypjax.system.files import real_paths
from hypjax.types import GroundTruth

OwnRows = Sequence[Sequence[int]]  # Rows of a gallery that hold each query's file.


def own_rows(queries: Sequence[str], gallery: Sequence[str]) -> OwnRows:
    """Rows of each query's file in a gallery, by names or, where these are links, their targets."""
    return equal_rows(real_paths(queries), real_paths(gallery))


def equal_rows(queries: Sequence[Hashable], gallery: Sequence[Hashable]) -> OwnRows:
    """Rows of a gallery that equal each query."""
    rows = collections.defaultdict(list)
    for row, item in enumerate(gallery):
        rows[item].append(row)
    return [rows.get(query, []) for query in queries]


def in_gallery(own_rows: OwnRows) -> str:
    """Says how many queries are in the gallery."""
    count = sum(map(bool, own_rows))
    return f"{count} of {len(own_rows)} queries are in the gallery, and do not find themselves"


def repeat_notes(
    train: Dataset | None,
    validation: Dataset | None,
    test: Dataset,
    gallery: Dataset | None,
    own_rows: OwnRows,
    ground_truth: GroundTruth | None,
) -> tuple[str, ...]:
    """Says how many queries are in the gallery, and how many images are identical to others."""
    notes = []
    if any(own_rows):
        notes.append(in_gallery(own_rows))
    parts = [part for part in (train, validation, test, gallery) if part is not None]
    checksums = {id(part): _checksums(part) for part in parts}
    if any(column is None for column in checksums.values()):
        return tuple(notes)
    if ground_truth is None:  # Classes of judged images say little.
        notes += _in_two_classes(parts, np.concatenate([*checksums.values()]))
    tested = "test" if gallery is None else "query"
    pairs = [(tested, test, "training", train), ("gallery", gallery, "training", train)]
    pairs += [("validation", validation, "training", train), ("query", test, "gallery", gallery)]
    for name, images, other, others in pairs:
        if images is None or others is None:
            continue
        rows = equal_rows(*(checksums[id(part)].tolist() for part in (images, others)))
        own = own_rows if other == "gallery" and own_rows else [[]] * len(rows)
        repeated = [i for i in range(len(rows)) if rows[i] and not own[i]]
        if repeated:
            first = repeated[0]
            example = f"{images.name(first)} and {others.name(rows[first][0])}"
            notes.append(
                f"{len(repeated)} of {len(images)} {name} images are identical to {other} images, "
                f"such as {example}"
            )
    return tuple(notes)


def _checksums(images: Dataset) -> Int[np.ndarray, " images"] | None:
    if images.vectors is not None:
        return np.array([hash(row.tobytes()) for row in images.vectors])
    return images.checksums


def _in_two_classes(parts: Sequence[Dataset], checksums: Int[np.ndarray, " images"]) -> list[str]:
    """Says how many images occur in more than one class."""
    names = [part.name(i) for part in parts for i in range(len(part))]
    labels = np.concatenate([part.class_names for part in parts]).astype(str)
    columns = (np.unique(column, return_inverse=True)[1] for column in (checksums, labels))
    pairs, first_rows = np.unique(np.stack([*columns], axis=1), axis=0, return_index=True)
    repeated = np.flatnonzero(np.bincount(pairs[:, 0]) > 1)
    if not len(repeated):
        return []
    examples = first_rows[pairs[:, 0] == repeated[0]][:2]
    places = " and ".join(f"{names[row]} ({labels[row]})" for row in examples)
    return [f"{len(repeated)} images are in more than one class, such as {places}"]
