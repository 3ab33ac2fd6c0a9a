"""Finds images that occur more than once: queries in their gallery, and identical files."""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from hypjax.data.dataset import Dataset
from hypjax.data.splits import Splits, Task
from hypjax.galleries.own_images import Contents, OwnImages, copies
from hypjax.retrieval.inputs import OwnRows


def own_rows(queries: Dataset, gallery: Dataset | None) -> OwnRows:
    """Finds each query's own image: its rows in the gallery, or else its copies among queries."""
    if gallery is None:
        return copies(queries.names.tolist())
    gallery_images = OwnImages(gallery.names.tolist(), _contents(gallery))
    return gallery_images.rows(queries.names.tolist(), _contents(queries), one_table=True)


def validation_task(images: Dataset) -> Task[Dataset]:
    """The search of validation images among each other."""
    return Task(images, own_rows=own_rows(images, None))


def queries_in_gallery(rows: OwnRows) -> str:
    """Notes how many queries have rows in the gallery; '' if none has."""
    count = sum(len(query_rows) > 0 for query_rows in rows)
    note = "queries that are in the gallery, and do not find themselves"
    return f"{note}: {count} of {len(rows)}" if count else ""


def sharing_files(rows: OwnRows) -> str:
    """Notes how many images have other rows with the same file; '' if none has."""
    count = sum(len(image_rows) > 1 for image_rows in rows)
    note = "images that share their files, and do not find each other"
    return f"{note}: {count} of {len(rows)}" if count else ""


def with_repeats(splits: Splits) -> Splits:
    """Fills in `own_rows`, and notes in `repeats` how many images are identical to others."""
    query_rows = own_rows(splits.test, splits.gallery) if splits.ground_truth is None else ()
    if splits.gallery is None:
        evaluated = {"test": splits.test}
        notes = [sharing_files(query_rows)]
        searching = searched = "test"
        own_rows_of_queries = query_rows or [[i] for i in range(len(splits.test))]
    else:
        evaluated = {"query": splits.test, "gallery": splits.gallery}
        notes = [queries_in_gallery(query_rows)]
        searching, searched = "query", "gallery"
        own_rows_of_queries = query_rows
    if splits.validation is not None:
        evaluated["validation"] = splits.validation
    tables = evaluated if splits.train is None else {"training": splits.train, **evaluated}
    columns = {name: _checksums(table) for name, table in tables.items()}
    checksums = {name: column for name, column in columns.items() if column is not None}
    if len(checksums) == len(tables):
        if splits.ground_truth is None:  # With ground truth, all images may have one class.
            notes.append(_in_two_classes([*tables.values()], checksums.values()))
        if splits.train is not None:
            notes += [
                _identical_note(tables, checksums, name, "training", ()) for name in evaluated
            ]
        notes.append(_identical_note(tables, checksums, searching, searched, own_rows_of_queries))
    return splits._replace(own_rows=query_rows, repeats=tuple(filter(None, notes)))


def _contents(images: Dataset) -> Contents:
    return images.checksums if images.vectors is None else images.vectors


def _checksums(images: Dataset) -> list[int] | None:
    if images.vectors is not None:
        return [hash(row.tobytes()) for row in images.vectors]
    return None if images.checksums is None else images.checksums.tolist()


def _identical_note(
    tables: Mapping[str, Dataset],
    checksums: Mapping[str, list[int]],
    split: str,
    other_split: str,
    own_rows: OwnRows,
) -> str:
    """Notes how many images of a split are identical to images of another, or of the same.

    Rows of the other split that are an image itself, its `own_rows`, do not count.
    """
    rows_by_checksum = collections.defaultdict(list)
    for row, checksum in enumerate(checksums[other_split]):
        rows_by_checksum[checksum].append(row)
    pairs = []  # Names of an image, and of the first image that is identical.
    for i, checksum in enumerate(checksums[split]):
        image_rows = own_rows[i] if own_rows else ()
        rows = [row for row in rows_by_checksum.get(checksum, ()) if row not in image_rows]
        if rows:
            pairs.append((tables[split].name(i), tables[other_split].name(rows[0])))
    others = f"other {split}" if split == other_split else other_split
    count = f"{len(pairs)} of {len(checksums[split])}"
    note = f"{split} images that are identical to {others} images: {count}"
    return f"{note}, such as {' and '.join(pairs[0])}" if pairs else ""


def _in_two_classes(tables: Sequence[Dataset], checksums: Iterable[list[int]]) -> str:
    """Notes how many images, of tables with these checksums, occur in more than one class."""
    # By checksum, then by class: an image's name.
    names: dict[int, dict[str, str]] = collections.defaultdict(dict)
    rows = [(table.class_name(i), table.name(i)) for table in tables for i in range(len(table))]
    for checksum, (class_name, name) in zip(
        itertools.chain.from_iterable(checksums), rows, strict=True
    ):
        names[checksum].setdefault(class_name, name)
    repeated = [by_class for by_class in names.values() if len(by_class) > 1]
    if not repeated:
        return ""
    first, second, *_ = (f"{name} ({class_name})" for class_name, name in repeated[0].items())
    return f"images in more than one class: {len(repeated)}, such as {first} and {second}"
