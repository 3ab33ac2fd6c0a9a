"""Relations between the images of a prepared dataset, kept as tables of names beside its records.

`pairs.parquet` lists pairs of training images that show one object, from which tuples are drawn.
`judgements.parquet` lists, for each query, its box and what it should find in the gallery. Names
of images that a partial copy lacks are skipped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow
import tensorflow_datasets as tfds
from jaxtyping import Int, Shaped

from hypjax.data.records import damaged, read_table
from hypjax.types import Judgements

PAIRS = "pairs"
PAIRS_SCHEMA = pyarrow.schema([("anchor", pyarrow.string()), ("positive", pyarrow.string())])

JUDGEMENTS = "judgements"
_NAMES = pyarrow.list_(pyarrow.string())
JUDGEMENTS_SCHEMA = pyarrow.schema(
    [
        ("query", pyarrow.string()),
        ("box", pyarrow.list_(pyarrow.int32())),  # Left, top, right and bottom, in pixels.
        ("easy", _NAMES),
        ("hard", _NAMES),
        ("junk", _NAMES),
    ]
)

Names = Shaped[np.ndarray, " images"]


class Judged(NamedTuple):
    """What is known of the queries, in their order.

    Attributes:
        boxes: Part of each query image that shows the object: left, top, right and bottom.
        judgements: Positions of judged images in the gallery.
    """

    boxes: Int[np.ndarray, "queries 4"]
    judgements: Judgements


def read_pairs(builder: tfds.core.DatasetBuilder, names: Names) -> Int[np.ndarray, "pairs 2"]:
    """Reads the pairs as positions of images.

    Args:
        builder: A prepared dataset that has pairs.
        names: Names of the training images, by position.

    Raises:
        UserError: The table is damaged or missing.
    """
    table = read_table(builder, f"{PAIRS}.parquet", PAIRS_SCHEMA)
    columns = [_positions(table[column].to_numpy(), names) for column in PAIRS_SCHEMA.names]
    pairs = np.stack(columns, axis=1)
    return pairs[(pairs >= 0).all(axis=1)]


def read_judgements(builder: tfds.core.DatasetBuilder, queries: Names, gallery: Names) -> Judged:
    """Reads the boxes and judgements of queries.

    Args:
        builder: A prepared dataset that has judgements.
        queries: Names of the queries.
        gallery: Names of the images to search, by position.

    Raises:
        UserError: The table is damaged or missing, or lacks a query.
    """
    table = read_table(builder, f"{JUDGEMENTS}.parquet", JUDGEMENTS_SCHEMA)
    rows = _positions(queries, table["query"].to_numpy())
    boxes = np.array(table["box"].to_pylist(), np.int32).reshape(-1, 4)
    if (rows < 0).any():
        problem = f"{JUDGEMENTS}.parquet lacks {queries[rows < 0][0]}"
        raise damaged(builder.name, builder.data_dir, problem)
    known = {name: i for i, name in enumerate(gallery)}

    def items(column: str) -> Sequence[Int[np.ndarray, " items"]]:
        listed = table[column].to_pylist()
        found = ([known[name] for name in listed[row] if name in known] for row in rows)
        return [np.array(positions, np.int64) for positions in found]

    return Judged(boxes[rows], Judgements(*map(items, Judgements._fields)))


def _positions(wanted: Names, names: Names) -> Int[np.ndarray, " wanted"]:
    """Positions of wanted names among given ones; -1 for those that are missing."""
    known = {name: i for i, name in enumerate(names)}
    return np.array([known.get(name, -1) for name in wanted], np.int64)
