"""Captions of images, and texts and trees of classes, in users' files."""

import itertools
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hypjax.data.dataset import Dataset
from hypjax.data.tables import listed_file, table_of_files
from hypjax.data.texts import read_texts
from hypjax.errors import UserError, counted, explained
from hypjax.system.columns import find_column, require_options, split_options
from hypjax.system.files import read_rows
from hypjax.types import composed


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
    location, options = split_options(where)
    require_options(options, ("path", "caption"), location)
    table = pathlib.Path(location).expanduser()
    with explained(f"cannot read {table}"):
        columns, rows = read_rows(table)
    if "image_url" in columns:  # HierarCaps' column id holds numbers.
        options = {"path": "image_url", **options}
    path, caption = (find_column(columns, role, options, table) for role in ("path", "caption"))
    if not (path and caption and rows):
        needed = "the columns path and caption (or ?path=COLUMN&caption=COLUMN), and rows"
        raise UserError(f"{table} needs {needed}; it has {', '.join(columns)}")
    base = pathlib.Path(folder or table.parent, table.name).expanduser()
    files, chains = [], []
    for number, row in enumerate(rows, start=1):
        name, text = (str(row[x] or "").strip() for x in (path, caption))
        chains.append([part.strip() for part in text.split(" => ")])
        if not (name and all(chains[-1])) or len(chains[-1]) != len(chains[0]):
            needed = f"a path and {counted(len(chains[0]), 'caption')}, like all rows"
            raise UserError(f"{table}, row {number} needs {needed}")
        name = name.rpartition("/")[2] if path == "image_url" else name
        files.append(str(listed_file(base, name, f"{table}, row {number}")))
    names, owners = np.unique(files, return_inverse=True)
    texts, text_rows = np.unique(np.ravel(chains), return_inverse=True)
    images = table_of_files([*map(pathlib.Path, names)])
    return CaptionedImages(images, texts.tolist(), text_rows.reshape(np.shape(chains)), owners)


def class_texts(file: str | None, class_names: Iterable[str]) -> dict[str, list[str]]:
    """Reads texts that stand for each class: from its name, with spaces for _, or from a file.

    A line of the file is a class and, after tabs, its texts; by default, the class.
    """
    names = {composed(name): [name.replace("_", " ")] for name in sorted({*class_names})}
    texts = {composed(x): others or [x] for x, *others in _cells(file)} if file else names
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
