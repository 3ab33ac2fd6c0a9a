"""Images that occur more than once in a dataset: queries in their gallery, and identical files."""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits
from hypjax.retrieval.own_images import Contents, OwnImages, OwnRows, copies


def own_rows(queries: Dataset, gallery: Dataset | None) -> OwnRows:
    """Finds the rows of each query's own image in the dataset's gallery, or among the queries."""
    if gallery is None:
        return copies(queries.names.tolist())
    images = OwnImages(gallery.names.tolist(), _contents(gallery))
    return images.rows(queries.names.tolist(), _contents(queries), one_table=True)


def queries_in_gallery(rows: OwnRows) -> str:
    """Notes how many queries are in the gallery; '' if none is."""
    count = sum(map(bool, rows))
    note = "queries that are in the gallery, and do not find themselves"
    return f"{note}: {count} of {len(rows)}" if count else ""


def sharing_files(rows: OwnRows) -> str:
    """Notes how many images of a table share their file with other images; '' if none does."""
    count = sum(len(image_rows) > 1 for image_rows in rows)
    note = "images that share their files, and do not find each other"
    return f"{note}: {count} of {len(rows)}" if count else ""


def with_repeats(splits: Splits) -> Splits:
    """Fills in `own_rows`, and notes in `repeats` how many images are identical to others."""
    query_rows = own_rows(splits.test, splits.gallery) if splits.ground_truth is None else ()
    if splits.gallery is None:
        tested, notes = {"test": splits.test}, [sharing_files(query_rows)]
        compared = [("test", "test", query_rows or [[i] for i in range(len(splits.test))])]
    else:
        tested, notes = {"query": splits.test, "gallery": splits.gallery}, []
        notes.append(queries_in_gallery(query_rows))
        compared = [("query", "gallery", query_rows)]
    parts = {"training": splits.train, **tested, "validation": splits.validation}
    parts = {name: part for name, part in parts.items() if part is not None}
    checksums = {name: _checksums(part) for name, part in parts.items()}
    if all(column is not None for column in checksums.values()):
        if splits.ground_truth is None:  # With ground truth, all images may have one class.
            notes.append(_in_two_classes([*parts.values()], itertools.chain(*checksums.values())))
        if splits.train is not None:
            compared = [(name, "training", ()) for name in [*parts][1:]] + compared
        notes += [_identical_note(parts, checksums, *options) for options in compared]
    return splits._replace(own_rows=query_rows, repeats=tuple(filter(None, notes)))


def _contents(images: Dataset) -> Contents:
    return images.checksums if images.vectors is None else images.vectors


def _checksums(images: Dataset) -> list[int] | None:
    if images.vectors is not None:
        return [hash(row.tobytes()) for row in images.vectors]
    return None if images.checksums is None else images.checksums.tolist()


def _identical_note(
    parts: Mapping[str, Dataset],
    checksums: Mapping[str, list[int]],
    name: str,
    other: str,
    known_rows: OwnRows,
) -> str:
    """Notes how many images of part `name` are identical to images of part `other`.

    Rows of `other` that are known to be an image itself do not count.
    """
    rows_of = collections.defaultdict(list)
    for row, checksum in enumerate(checksums[other]):
        rows_of[checksum].append(row)
    pairs = []  # Names of an image, and of the first image that is identical.
    for i, checksum in enumerate(checksums[name]):
        known = known_rows[i] if known_rows else ()
        rows = [row for row in rows_of.get(checksum, ()) if row not in known]
        if rows:
            pairs.append((parts[name].name(i), parts[other].name(rows[0])))
    count = f"{len(pairs)} of {len(checksums[name])}"
    others = "other " * (name == other) + other
    note = f"{name} images that are identical to {others} images: {count}"
    return f"{note}, such as {' and '.join(pairs[0])}" if pairs else ""


def _in_two_classes(parts: Sequence[Dataset], checksums: Iterable[int]) -> str:
    """Notes how many images occur in more than one class."""
    names_by_class = collections.defaultdict(dict)  # By checksum, then by class.
    rows = [(part.class_name(i), part.name(i)) for part in parts for i in range(len(part))]
    for checksum, (label, name) in zip(checksums, rows, strict=True):
        names_by_class[checksum].setdefault(label, name)
    repeated = [names for names in names_by_class.values() if len(names) > 1]
    examples = [f"{name} ({label})" for names in repeated[:1] for label, name in names.items()]
    note = f"images in more than one class: {len(repeated)}"
    return f"{note}, such as {' and '.join(examples[:2])}" if repeated else ""
