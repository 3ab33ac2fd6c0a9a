"""Images that a dataset holds more than once: queries in their gallery, and identical files."""

import collections
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

from hypjax.data.dataset import Dataset
from hypjax.data.parts import OwnRows, Splits
from hypjax.system.files import real_paths

# Parts that should have no images in common.
_APART = [(name, "training") for name in ("test", "query", "gallery", "validation")]
_APART.append(("query", "gallery"))


def own_rows(queries: Sequence[str], gallery: Sequence[str]) -> OwnRows:
    """Gallery rows with each query's file, by path; links are resolved."""
    return equal_rows(real_paths(queries), real_paths(gallery))


def equal_rows(queries: Sequence[Hashable], gallery: Sequence[Hashable]) -> OwnRows:
    """Rows of a gallery that equal each query."""
    rows = collections.defaultdict(list)
    for row, item in enumerate(gallery):
        rows[item].append(row)
    return [rows.get(query, []) for query in queries]


def queries_in_gallery(rows: OwnRows) -> str:
    """Says how many queries are in the gallery; '' if none is."""
    note = "{} of {} queries are in the gallery, and do not find themselves"
    return note.format(sum(map(bool, rows)), len(rows)) if any(rows) else ""


def with_repeats(splits: Splits) -> Splits:
    """Finds the queries that are in the gallery, and counts images that are identical to others."""
    tested, query_rows = "test" if splits.gallery is None else "query", ()
    if splits.gallery is not None and splits.ground_truth is None:
        query_rows = own_rows(splits.test.names.tolist(), splits.gallery.names.tolist())
    parts = {"training": splits.train, "validation": splits.validation}
    parts |= {tested: splits.test, "gallery": splits.gallery}
    parts = {name: part for name, part in parts.items() if part is not None}
    checksums = {name: _checksums(part) for name, part in parts.items()}
    notes = [queries_in_gallery(query_rows)]
    if all(column is not None for column in checksums.values()):
        if splits.ground_truth is None:  # With ground truth, all images may have one class.
            notes.append(_in_two_classes([*parts.values()], itertools.chain(*checksums.values())))
        for name, other in _APART:
            if {name, other} <= parts.keys():
                rows = equal_rows(checksums[name], checksums[other])
                if other == "gallery" and query_rows:  # Counted already.
                    rows = [[] if known else x for x, known in zip(rows, query_rows, strict=True)]
                notes.append(_identical(parts, name, other, rows))
    return splits._replace(own_rows=query_rows, repeats=tuple(filter(None, notes)))


def _checksums(images: Dataset) -> list[int] | None:
    if images.vectors is not None:
        return [hash(row.tobytes()) for row in images.vectors]
    return None if images.checksums is None else images.checksums.tolist()


def _identical(parts: Mapping[str, Dataset], name: str, other: str, rows: OwnRows) -> str:
    """Says how many images of a part equal some of another, at the given rows."""
    repeated = [i for i, equal in enumerate(rows) if equal]
    if not repeated:
        return ""
    example, copy = parts[name].name(repeated[0]), parts[other].name(rows[repeated[0]][0])
    count = f"{len(repeated)} of {len(rows)} {name} images"
    return f"{count} are identical to {other} images, such as {example} and {copy}"


def _in_two_classes(parts: Sequence[Dataset], checksums: Iterable[int]) -> str:
    """Says how many images occur in more than one class."""
    names_by_class = collections.defaultdict(dict)
    rows = [(part.class_name(i), part.name(i)) for part in parts for i in range(len(part))]
    for checksum, (label, name) in zip(checksums, rows, strict=True):
        names_by_class[checksum].setdefault(label, name)
    repeated = [names for names in names_by_class.values() if len(names) > 1]
    if not repeated:
        return ""
    examples = [f"{name} ({label})" for label, name in repeated[0].items()][:2]
    return f"{len(repeated)} images are in more than one class, such as {' and '.join(examples)}"
