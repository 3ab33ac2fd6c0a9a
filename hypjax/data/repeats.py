"""Images that a dataset holds more than once: queries in their gallery, and identical files."""

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Int

from hypjax.data.dataset import Dataset
from hypjax.system.files import real_paths
from hypjax.types import GroundTruth

OwnIds = Int[np.ndarray, " queries"] | None  # Rows in a gallery, -1 for none; None if all are -1.


def own_rows(queries: Sequence[str], gallery: Sequence[str]) -> OwnIds:
    """Rows of the queries in a gallery, by their names or, if these are links, their targets."""
    listed = equal_rows(queries, gallery)
    if listed is not None and (listed >= 0).all():
        return listed
    targets = equal_rows(real_paths(queries), real_paths(gallery))
    return targets if listed is None else np.where(listed >= 0, listed, targets)


def equal_rows(queries: Sequence[Hashable], gallery: Sequence[Hashable]) -> OwnIds:
    """Rows in a gallery that equal the queries; of several, the one with the query's number."""
    rows = {item: row for row, item in enumerate(gallery)}
    own_ids = np.array([rows.get(query, -1) for query in queries], int)
    for row, (query, item) in enumerate(zip(queries, gallery, strict=False)):
        if query == item:
            own_ids[row] = row
    return own_ids if (own_ids >= 0).any() else None


def repeat_notes(
    train: Dataset | None,
    validation: Dataset | None,
    test: Dataset,
    gallery: Dataset | None,
    own_ids: OwnIds,
    ground_truth: GroundTruth | None,
) -> tuple[str, ...]:
    """Says how many queries are in the gallery, and how many images are identical to others."""
    notes = []
    if own_ids is not None:
        notes.append(
            f"{np.sum(own_ids >= 0)} of {len(own_ids)} queries are in the gallery, and do not find "
            "themselves"
        )
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
        if rows is None:
            continue
        repeated = rows >= 0
        if other == "gallery" and own_ids is not None:
            repeated &= own_ids < 0
        if count := np.sum(repeated):
            first = int(np.argmax(repeated))
            example = f"{images.name(first)} and {others.name(rows[first])}"
            notes.append(
                f"{count} of {len(images)} {name} images are identical to {other} images, such as "
                f"{example}"
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
