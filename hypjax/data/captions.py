"""Captions of images, and texts and trees of classes, in users' files."""

import collections
import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hypjax.data.dataset import Dataset, Region, stacked
from hypjax.data.folders import is_image_name
from hypjax.data.photos import labelled_images, list_images, read_vectors
from hypjax.data.shards import is_table
from hypjax.data.tables import listed_file, table_of_files, usual_columns
from hypjax.data.texts import cell_texts, read_texts
from hypjax.errors import UserError, counted, explained
from hypjax.galleries.feature_files import read_arrays
from hypjax.retrieval.inputs import blocks
from hypjax.system import console
from hypjax.system.columns import find_column, require_options, split_options
from hypjax.system.files import absolute, read_rows
from hypjax.types import class_name, composed

_FURTHER = ("label", "split", "coarse_label")  # Columns beside path and caption.
_CHECKED_ROWS = 1 << 13  # Vectors that are compared at once.


class CaptionedImages(NamedTuple):
    """Images with chains of captions, from general to specific; a single caption is a chain."""

    images: Dataset
    texts: list[str]  # Distinct captions.
    chains: Int[np.ndarray, "chains levels"]  # Rows of `texts`.
    owners: Int[np.ndarray, " chains"]  # Rows of `images`.


def read_captions(where: str, folder: str | None = None) -> CaptionedImages:
    """Reads a CSV, TSV or Parquet table with the columns path and caption.

    Captions of a chain are separated by ' => ', as in HierarCaps. Paths are relative to the folder,
    by default the table's; of the URLs in a column image_url, the last part is a path.
    """
    all_rows = _captioned_rows(where, folder)
    rows = [row for row in all_rows if row.box is None]
    if num_boxes := len(all_rows) - len(rows):
        console.say(f"{where}: captions of boxes are left out: {num_boxes}")
    files, chains = [str(row.file) for row in rows], [row.captions for row in rows]
    for number, chain in enumerate(chains, start=1):
        if len(chain) != len(chains[0]):
            needed = f"{counted(len(chains[0]), 'caption')}, like all rows"
            raise UserError(f"{where}, row {number} needs {needed}")
    names, owners = np.unique(files, return_inverse=True)
    texts, text_rows = np.unique(np.ravel(chains), return_inverse=True)
    images = table_of_files([*map(pathlib.Path, names)])
    return CaptionedImages(images, texts.tolist(), text_rows.reshape(np.shape(chains)), owners)


class _Row(NamedTuple):
    """A row of a table: an image's file, its captions, and further columns, '' where missing."""

    file: pathlib.Path
    captions: list[str]
    label: str
    split: str
    coarse_label: str
    box: tuple[int, int, int, int] | None = None  # What the captions describe; None: the image.


def _captioned_rows(where: str, folder: str | None = None) -> list[_Row]:
    location, options = split_options(where)
    require_options(options, ("path", "caption", "box", *_FURTHER), location)
    table = pathlib.Path(location).expanduser()
    with explained(f"cannot read {table}"):
        columns, cells = read_rows(table)
    if "image_url" in columns:  # HierarCaps' column id holds numbers.
        options = {"path": "image_url", **options}
    path, caption = (find_column(columns, role, options, table) for role in ("path", "caption"))
    if not (path and caption):
        needed = "the columns path and caption (or ?path=COLUMN&caption=COLUMN)"
        raise UserError(f"{table} needs {needed}; it has {', '.join(columns)}")
    if not cells:
        raise UserError(f"{table} has no rows; add one for each caption of an image")
    usual = usual_columns(columns)
    others = [
        find_column(columns if role in options else usual, role, options, table)
        for role in _FURTHER
    ]
    box = find_column(columns if "box" in options else usual, "box", options, table)
    base = pathlib.Path(folder or table.parent, table.name).expanduser()
    rows = []
    for number, row in enumerate(cells, start=1):
        name, at = str(row[path] or "").strip(), f"{table}, row {number}"
        texts = cell_texts(row[caption])
        if not (name and texts and all(texts)):
            raise UserError(f"{at} needs a path and a caption; leave it out, or fill its cells")
        name = name.rpartition("/")[2] if path == "image_url" else name
        further = (class_name(row[other], at) if other else "" for other in others)
        label, split, coarse_label = further
        region = _box(row[box], at) if box else None
        rows.append(_Row(listed_file(base, name, at), texts, label, split, coarse_label, region))
    return rows


def _box(cell: Any, where: str) -> tuple[int, int, int, int] | None:
    """Reads the cell of a box, [left, top, right, bottom] in pixels; None if it is empty."""
    if cell is None or not str(cell).strip():
        return None
    numbers = re.split(r"[\s,;]+", str(cell).strip("[]() \n"))
    with explained(f"{where}: the box {cell} is not left, top, right and bottom in pixels"):
        edges = [float(number) for number in numbers]
        if len(edges) != 4:
            raise ValueError(f"it has {counted(len(edges), 'number')}")
        if max(edges) <= 1:
            raise ValueError("these are shares of the image; multiply them by its sides")
        left, top, right, bottom = map(round, edges)
        if left >= right or top >= bottom:
            raise ValueError("it is empty; are the last two numbers its width and height?")
        return left, top, right, bottom


def captioned_images(
    where: str,
    captions: str | None,
    exclude: Sequence[str] = (),
    *,
    skip_corrupt: bool = True,
) -> Dataset:
    """Lists images with captions; images without a class share one where captions are equal.

    Without a file of `captions` (see `with_captions`), `where` is a table with the columns path and
    caption, and perhaps label, split, coarse_label and box, several rows of a path being several
    captions, and those with a box captions of a part of the image; a dataset with a column caption,
    see `hypjax.data.shards.find_dataset`; or images as for `hypjax.data.photos.list_images`, each
    beside a .txt with its captions, one in each line.
    """
    location, options = split_options(where)
    path = pathlib.Path(location).expanduser()
    suffix = path.suffix.lower()
    lists_files = suffix in (".csv", ".tsv") or (suffix == ".parquet" and is_table(path, options))
    if captions is None and lists_files:
        by_file: dict[pathlib.Path, list[_Row]] = {}
        all_rows = _captioned_rows(where)
        for row in all_rows:
            if row.box is None:
                by_file.setdefault(row.file, []).append(row)
        boxes = [row for row in all_rows if row.box is not None]
        labels, splits, coarse = (
            [
                _agreed([getattr(row, name) for row in rows], name, file)
                for file, rows in by_file.items()
            ]
            for name in _FURTHER
        )
        images = table_of_files([*by_file], labels, splits, coarse)
        texts = [[text for row in rows for text in row.captions] for rows in by_file.values()]
        return _with_boxes(_own_classes(_captioned(images, texts)), boxes, where)
    images = list_images(where, exclude, skip_corrupt=skip_corrupt, captioned=captions is None)
    if images.vectors is not None:
        raise UserError(f"{where} holds features; set --config.data.name=features")
    if images.captions is not None:
        return _own_classes(_captioned(images, images.captions.tolist()))
    if captions is None:
        return _own_classes(_captioned(images, _texts_beside(images, path)))
    return _own_classes(with_captions(images, captions))


def _with_boxes(images: Dataset, boxes: Sequence[_Row], where: str) -> Dataset:
    """Adds rows of captioned boxes, in the class and split of their images."""
    if not boxes:
        return images
    row_of = {name: row for row, name in enumerate(images.names.tolist())}
    owners = [str(absolute(row.file)) for row in boxes]
    if alone := [name for name in owners if name not in row_of]:
        raise UserError(f"{where} has only boxes of {alone[0]}; add a row for the whole image")
    records = [Region(name, row.box) for name, row in zip(owners, boxes, strict=True) if row.box]
    names, captions = (np.empty(len(boxes), object) for _ in range(2))
    names[:] = [f"{name}{[*box]}" for name, box in records]
    captions[:] = [tuple(row.captions) for row in boxes]
    regions = images.take(np.array([row_of[name] for name in owners]))
    assert regions.file_versions is not None
    versions = [
        f"{x}{[*record.box]}" for x, record in zip(regions.file_versions, records, strict=True)
    ]
    regions = dataclasses.replace(
        regions,
        records=records,
        positions=np.arange(len(boxes)),
        names=names,
        captions=captions,
        file_versions=np.array(versions, object),
    )
    all_owners = np.array([*images.names, *owners], object)
    return dataclasses.replace(stacked([images, regions]), owners=all_owners)


def captioned_pairs(dataset: Any) -> Dataset:
    """Lists images and captions that are passed from Python, see `photos.labelled_images`."""
    images = labelled_images(dataset, captioned=True)
    assert images.captions is not None
    return _own_classes(_captioned(images, images.captions.tolist()))


def with_captions(images: Dataset, captions: str) -> Dataset:
    """Adds captions from a file to a table of images.

    The file is COCO's captions_*.json, whose images are found by their names; or has in each line a
    class and, after tabs, texts that describe all of its images.
    """
    if captions.lower().endswith(".json"):
        return _captioned(images, _coco_captions(images, pathlib.Path(captions).expanduser()))
    texts = class_texts(captions, images.class_names)
    return _captioned(images, [texts[composed(name)] for name in images.class_names])


def captioned_features(where: str, labels: str | None) -> Dataset:
    """Reads an .npz or .pt file of features whose rows are pairs of an image and a caption.

    Beside the arrays of any file of features it has `texts`, strings; or `text_features`, their
    vectors; or both. Rows of one image have equal `ids`. Equal vectors stand for equal texts.
    """
    table, arrays = read_vectors(where, labels), read_arrays(where)
    texts, vectors = arrays.get("texts"), arrays.get("text_features")
    if texts is None and vectors is None:
        needed = "an array texts or text_features, with a row for each image"
        raise UserError(f"{where} needs {needed}; store all arrays in an .npz or .pt file")
    for name, array, axes in (("texts", texts, 1), ("text_features", vectors, 2)):
        if array is not None and (array.ndim != axes or len(array) != len(table)):
            needed = f"[{len(table)}{', dimension' * (axes - 1)}], a row for each image"
            raise UserError(f"{name} of {where} has the shape {[*array.shape]}, not {needed}")
    if texts is not None:
        texts = np.char.decode(texts, "utf-8", "replace") if texts.dtype.kind == "S" else texts
        names = [str(text).strip() for text in texts.tolist()]
    elif vectors is not None:
        rows = np.unique(vectors, axis=0, return_inverse=True)[1]
        names = [f"text {row}" for row in rows.ravel().tolist()]
    by_text = None
    if vectors is not None:
        first, text_of_row = np.unique(names, return_index=True, return_inverse=True)[1:]
        _require_equal(vectors, first[text_of_row], f"text_features of {where}", "text")
        by_text = dict(zip(names, vectors.astype(np.float32), strict=True))
    ids = table.names.astype(str)
    ids, first, image_of_row = np.unique(ids, return_index=True, return_inverse=True)
    captions: list[list[str]] = [[] for _ in ids]
    for image, text in zip(image_of_row, names, strict=True):
        captions[image].append(text)
    assert table.vectors is not None
    _require_equal(table.vectors, first[image_of_row], f"features of {where}", "id")
    columns: dict[str, Any] = {}
    rows_of = np.split(
        np.argsort(image_of_row, kind="stable"), np.cumsum(np.bincount(image_of_row))
    )
    for name in ("class_names", "splits", "coarse_labels"):
        if (column := getattr(table, name)) is not None:
            pairs = zip(rows_of, ids, strict=False)
            agreed = [_agreed(column[rows].tolist(), name, image) for rows, image in pairs]
            columns[name] = np.array(agreed, object)
    images = dataclasses.replace(table.take(first), **columns)
    images = _own_classes(_captioned(images, captions))
    return dataclasses.replace(images, caption_vectors=by_text)


def _agreed(cells: Sequence[str], column: str, image: object) -> str:
    """The cell that the rows of an image share, some of which may be empty."""
    found = [*dict.fromkeys(filter(None, cells))]
    if len(found) > 1:
        shown = f"{found[0]!r} and {found[1]!r} in {column}"
        raise UserError(f"rows of the image {image} have {shown}; give all of them one value")
    return found[0] if found else ""


def _require_equal(
    vectors: Float[np.ndarray, "n d"], first: Int[np.ndarray, " n"], source: str, key: str
) -> None:
    """Rejects rows that are not finite, or differ from the first row of their key."""
    for rows in blocks(len(vectors), _CHECKED_ROWS):
        found, expected = (x.astype(np.float32) for x in (vectors[rows], vectors[first[rows]]))
        infinite = np.flatnonzero(~np.isfinite(found).all(axis=1))
        if len(infinite):
            raise UserError(f"{source}: row {rows.start + infinite[0]} is not finite; mend it")
        norms = np.linalg.norm(expected, axis=1)
        differing = np.flatnonzero(np.linalg.norm(found - expected, axis=1) > 0.01 * norms)
        if len(differing):
            row = rows.start + differing[0]
            problem = f"{source}: row {row} differs from row {first[row]} of the same {key}"
            raise UserError(f"{problem}; mend one of them")


def _captioned(images: Dataset, texts: Sequence[Sequence[str]]) -> Dataset:
    """Adds captions; each is listed once."""
    column = np.empty(len(images), object)
    column[:] = [tuple(dict.fromkeys(captions)) for captions in texts]
    for row, captions in enumerate(column):
        if not captions or not all(captions):
            problem = f"{images.name(row)} has {'an empty' if captions else 'no'} caption"
            raise UserError(f"{problem}; add a text, or leave the image out")
    return dataclasses.replace(images, captions=column)


def _own_classes(images: Dataset) -> Dataset:
    """Makes a class of each image that has none, and of all that are linked by equal captions."""
    assert images.captions is not None
    names = images.class_names.astype(object)
    first_of: dict[str, int] = {}  # The first row, by caption.
    rows = np.flatnonzero(names == "").tolist()
    parent = {row: row for row in rows}

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for row in rows:
        for caption in images.captions[row]:
            one, other = root(row), root(first_of.setdefault(caption, row))
            parent[max(one, other)] = min(one, other)
    names[rows] = [images.names[root(row)] for row in rows]
    labels = np.unique(names.astype(str), return_inverse=True)[1]
    return dataclasses.replace(images, class_names=names, labels=labels)


def _texts_beside(images: Dataset, listing: pathlib.Path) -> list[list[str]]:
    """The lines of the .txt beside each image; `listing` may be one that lists the images."""
    files = [pathlib.Path(str(name)).with_suffix(".txt") for name in images.names]
    known = {*files, listing.expanduser().absolute()}
    for folder in sorted({file.parent for file in files}):
        stems = {file.stem for file in folder.glob("*") if is_image_name(file.name)}
        stray = [x for x in folder.glob("*.txt") if x not in known and x.stem not in stems]
        if stray:  # An image without its text raises an error below.
            console.warn(f"{min(stray)} describes no image beside it; it is left out")
    for file, name in zip(files, images.names, strict=True):
        if not file.is_file():
            advice = f"write {file}, or name a file of captions by --config.data.captions"
            raise UserError(f"{name} has no caption; {advice}")
    return [[text.strip() for text in read_texts(str(file))] for file in files]


def _coco_captions(images: Dataset, file: pathlib.Path) -> list[list[str]]:
    """Captions of images, which are found by the last part of their names."""
    with explained(f"cannot read {file}", "; it must be COCO's captions_*.json"):
        content = json.loads(file.read_text("utf-8"))
        name_of = {image["id"]: str(image["file_name"]) for image in content["images"]}
        files_of = collections.Counter(pathlib.PurePath(x).name for x in {*name_of.values()})
        texts: dict[str, list[str]] = {}
        for annotation in content["annotations"]:
            name = pathlib.PurePath(name_of[annotation["image_id"]]).name
            texts.setdefault(name, []).append(str(annotation["caption"]).strip())
    names = [pathlib.PurePath(str(name)).name for name in images.names]
    images_of = collections.Counter(names)
    if twice := [x for x in images_of if x in texts and max(images_of[x], files_of[x]) > 1]:
        problem = f"several images are named {twice[0]}, which their captions in {file} cannot tell"
        raise UserError(f"{problem}; give each image a name of its own")
    if missing := texts.keys() - {*names}:
        described = f"{counted(len(missing), 'image')} of {file}, such as {min(missing)},"
        console.warn(f"{described} cannot be found; their captions are left out")
    return [texts.get(name, []) for name in names]


def class_texts(file: str | None, class_names: Iterable[str]) -> dict[str, list[str]]:
    """Reads texts that stand for each class: from its name, with spaces for _, or from a file.

    A line of the file is a class and, after tabs, its texts; by default, the class.
    """
    names = {composed(name): [name.replace("_", " ")] for name in sorted({*class_names})}
    texts: dict[str, list[str]] = {} if file else names
    for name, *others in _cells(file) if file else ():
        texts.setdefault(composed(name), []).extend(others or [name])
    if unknown := [name for name in names if not name or name not in texts]:
        problem = f"{file} lacks the class {unknown[0]}" if unknown[0] else "some have none"
        raise UserError(f"each image needs a class, and {problem}; add it")
    return texts


def class_tree(file: str | None, images: Dataset) -> list[tuple[str, str]]:
    """Reads pairs of a node and its parent, from a file or from coarse classes (Food/Fruit)."""
    if file:
        return [(composed(x), composed(y)) for x, *above in _cells(file) for y in above]
    coarse = () if images.coarse_labels is None else images.coarse_labels
    edges = []
    for name, path in dict.fromkeys(zip(images.class_names, coarse, strict=False)):
        levels = [*itertools.accumulate(f"/{path}".split("/"), "{}/{}".format), composed(name)]
        edges += [(node, parent) for parent, node in itertools.pairwise(levels[1:])]
    return edges


def _cells(file: str) -> list[list[str]]:
    """Reads lines of cells that are separated by tabs."""
    return [[*filter(None, map(str.strip, line.split("\t")))] for line in read_texts(file)]
