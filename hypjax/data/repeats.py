"""Images that a dataset holds more than once: queries in their gallery, and identical files."""

import collections
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

from hypjax.data.dataset import Dataset
from hypjax.data.parts import OwnRows, Splits
from hypjax.errors import counted
from hypjax.system.files import real_paths

# Parts that should have no images in common.
_APART = [(name, "training") for name in ("test", "query", "gallery", "validation")]
_APART.append(("query", "gallery"))


def own_rows(queries: Sequence[str], gallery: Sequence[str]) -> OwnRows:
    """Rows of each query's file in a gallery, by names or, where these are links, their targets."""
    return equal_rows(real_paths(queries), real_paths(gallery))


def equal_rows(queries: Sequence[Hashable], gallery: Sequence[Hashable]) -> OwnRows:
    """Rows of a gallery that equal each query."""
    rows = collections.defaultdict(list)
    for row, item in enumerate(gallery):
        rows[item].append(row)
    return [rows.get(query, []) for query in queries]


def queries_in_gallery(rows: OwnRows) -> str:
    """Says how many queries are in the gallery, '' if none is."""
    count = sum(map(bool, rows))
    say = "is in the gallery, and does not find itself"
    if count > 1:
        say = "are in the gallery, and do not find themselves"
    return f"{count} of {len(rows)} queries {say}" if count else ""


def with_repeats(splits: Splits) -> Splits:
    """Finds the queries that are in the gallery, and counts images that are identical to others."""
    tested, own = "test" if splits.gallery is None else "query", ()
    if splits.gallery is not None and splits.ground_truth is None:
        own = own_rows(splits.test.names.tolist(), splits.gallery.names.tolist())
    parts = {"training": splits.train, "validation": splits.validation}
    parts |= {tested: splits.test, "gallery": splits.gallery}
    parts = {name: part for name, part in parts.items() if part is not None}
    checksums = {name: _checksums(part) for name, part in parts.items()}
    notes = [queries_in_gallery(own)]
    if all(column is not None for column in checksums.values()):
        if splits.ground_truth is None:  # Classes of judged images say little.
            notes.append(_in_two_classes([*parts.values()], itertools.chain(*checksums.values())))
        notes += [
            _identical(parts, name, other, equal_rows(checksums[name], checksums[other]), own)
            for name, other in _APART
            if {name, other} <= parts.keys()
        ]
    return splits._replace(own_rows=own, repeats=tuple(filter(None, notes)))


def _checksums(images: Dataset) -> list[int] | None:
    if images.vectors is not None:
        return [hash(row.tobytes()) for row in images.vectors]
    return None if images.checksums is None else images.checksums.tolist()


def _identical(
    parts: Mapping[str, Dataset], name: str, other: str, rows: OwnRows, own: OwnRows
) -> str:
    """Says how many images of a part equal some of another, beside queries that are in both."""
    known = own if other == "gallery" and own else [[]] * len(rows)
    repeated = [i for i in range(len(rows)) if rows[i] and not known[i]]
    if not repeated:
        return ""
    images = parts[name].name(repeated[0]), parts[other].name(rows[repeated[0]][0])
    return (
        f"{len(repeated)} of {len(rows)} {name} images {'is' if len(repeated) == 1 else 'are'} "
        f"identical to {other} images, such as "
        f"{' and '.join(images)}"
    )


def _in_two_classes(parts: Sequence[Dataset], checksums: Iterable[int]) -> str:
    """Says how many images occur in more than one class."""
    classes = collections.defaultdict(dict)
    names = [(part.class_name(i), part.name(i)) for part in parts for i in range(len(part))]
    for checksum, (label, name) in zip(checksums, names, strict=True):
        classes[checksum].setdefault(label, name)
    repeated = [names for names in classes.values() if len(names) > 1]
    if not repeated:
        return ""
    examples = [f"{name} ({label})" for label, name in repeated[0].items()][:2]
    verb = "is" if len(repeated) == 1 else "are"
    number = counted(len(repeated), "image")
    return f"{number} {verb} in more than one class, such as {' and '.join(examples)}"
