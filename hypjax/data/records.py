"""Prepared datasets on disk: an ArrayRecord file of images for each split, and an index in Parquet.

The index of a split, `index-SPLIT.parquet`, holds what plans, messages and scores need to know of
every image, so that opening a dataset reads none:

    label, height, width (int32), checksum (uint32: zlib.crc32 of the encoded image),
    name, class_name, superlabel (strings; superlabel is '' if classes have no groups)

Relations between images are further tables. `pairs.parquet` lists pairs of training images that
show one object, from which tuples are drawn. `judgements.parquet` lists, for each query, its box
and what it should find in the gallery. They refer to images by name; names that a partial copy
lacks are skipped. Pages of all tables have checksums.
"""

import contextlib
import dataclasses
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import tqdm
from jaxtyping import Int, Shaped

from hypjax.data.dataset import Dataset, hash_facts
from hypjax.errors import UserError
from hypjax.system.files import write_json
from hypjax.types import Judgements

VERSION = "2.0.0"  # Of the format; part of the folders' paths.
MANIFEST = "dataset.json"  # Fields of a `RecordFolder`.
_SCHEMA = pyarrow.schema(
    [
        ("label", pyarrow.int32()),
        ("height", pyarrow.int32()),
        ("width", pyarrow.int32()),
        ("checksum", pyarrow.uint32()),
        ("name", pyarrow.string()),
        ("class_name", pyarrow.string()),
        ("superlabel", pyarrow.string()),
    ]
)

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


class Count(NamedTuple):
    """Size of a split; a number of classes that is not known (None) is not compared."""

    images: int
    classes: int | None


class Example(NamedTuple):
    """An image to be written."""

    image: bytes  # Its file.
    height: int
    width: int
    name: str  # What the dataset calls the image; unique.
    class_name: str
    superlabel: str = ""


class Contents(NamedTuple):
    """A dataset to be written."""

    splits: Mapping[str, Iterable[Example]]  # In the order of the records.
    total: int  # Number of all examples, for the progress bar.
    tables: Mapping[str, pyarrow.Table]  # Of relations, by name.


@dataclasses.dataclass(frozen=True)
class RecordFolder:
    """The folder of a prepared dataset."""

    name: str
    path: pathlib.Path
    splits: Mapping[str, Count]  # Those with images.
    tables: Sequence[str]  # Names of its tables of relations.
    part: str | None  # The part of the dataset that was prepared; None: the whole.


def write_records(folder: pathlib.Path, name: str, contents: Contents, part: str | None) -> None:
    """Writes a dataset into a new folder, without splits that have no images.

    Classes are numbered in the order in which they first appear.
    """
    folder.mkdir()
    splits, labels = {}, {}
    bar = {"total": contents.total, "unit": "image", "disable": None, "leave": False}
    with tqdm.tqdm(desc=f"preparing {name}", **bar) as progress:
        for split, examples in contents.splits.items():
            if (count := _write_split(folder, split, examples, labels, progress)).images:
                splits[split] = count
    for table_name, table in contents.tables.items():
        _write_table(folder / f"{table_name}.parquet", table)
    facts = {"splits": splits, "tables": [*contents.tables], "part": part}
    write_json(folder / MANIFEST, facts)


def _write_split(
    folder: pathlib.Path,
    split: str,
    examples: Iterable[Example],
    labels: dict[str, int],
    progress: tqdm.tqdm,
) -> Count:
    """Writes the records of a split and its index, unless it has no images."""
    from array_record.python.array_record_module import ArrayRecordWriter

    path, rows = folder / f"{split}.array_record", []
    # Images are compressed already.
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    try:
        for image, height, width, *names in examples:
            writer.write(image)
            label = labels.setdefault(names[1], len(labels))
            rows.append((label, height, width, zlib.crc32(image), *names))
            progress.update()
    finally:
        writer.close()
    if not rows:
        path.unlink()
        return Count(0, 0)
    columns = dict(zip(_SCHEMA.names, zip(*rows, strict=True), strict=True))
    _write_table(folder / f"index-{split}.parquet", pyarrow.table(columns, _SCHEMA))
    return Count(len(rows), len({*columns["label"]}))


def open_folder(name: str, path: pathlib.Path) -> RecordFolder:
    """Opens the folder of a prepared dataset; damaged or missing files are a UserError."""
    with reading(name, path):
        facts = json.loads((path / MANIFEST).read_text())
        facts["splits"] = {split: Count(*count) for split, count in facts["splits"].items()}
        return RecordFolder(name, path, **facts)


def open_records(folder: RecordFolder, split: str) -> Dataset:
    """Opens one split of a prepared dataset, without reading images."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    with reading(folder.name, folder.path):
        records = ArrayRecordDataSource(str(folder.path / f"{split}.array_record"))
    index = _read_table(folder, f"index-{split}")
    groups = index["superlabel"].to_numpy()
    sizes = np.stack([index["height"].to_numpy(), index["width"].to_numpy()], axis=1)
    return Dataset(
        records=records,
        positions=np.arange(len(index)),
        labels=index["label"].to_numpy(),
        sizes=sizes,
        names=index["name"].to_numpy(),
        class_names=index["class_name"].to_numpy(),
        groups=groups if groups.any() else None,
        # Of facts on images alone, so that datasets with equal images share caches.
        source=hash_facts([sizes.tobytes(), index["checksum"].to_numpy().tobytes()]),
    )


def _read_table(folder: RecordFolder, table_name: str) -> pyarrow.Table:
    with reading(folder.name, folder.path):
        path = folder.path / f"{table_name}.parquet"
        return pyarrow.parquet.read_table(path, page_checksum_verification=True)


def _write_table(path: pathlib.Path, table: pyarrow.Table) -> None:
    pyarrow.parquet.write_table(table, path, compression="zstd", write_page_checksum=True)


@contextlib.contextmanager
def reading(name: str, path: pathlib.Path) -> Iterator[None]:
    """Turns any error of reading a prepared dataset into one sentence."""
    try:
        yield
    except Exception as error:  # ArrayRecord and pyarrow raise almost anything.
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name} in {path} is damaged ({reason}); remove that folder, and prepare it again "
            f"(python -m hypjax.prepare --dataset={name}); a copy from the cloud is made again"
        ) from error


def read_pairs(folder: RecordFolder, names: Names) -> Int[np.ndarray, "pairs 2"]:
    """Reads a dataset's pairs as positions among the named training images."""
    table = _read_table(folder, PAIRS)
    columns = [_positions(table[column].to_numpy(), names) for column in PAIRS_SCHEMA.names]
    pairs = np.stack(columns, axis=1)
    return pairs[(pairs >= 0).all(axis=1)]


def read_judgements(
    folder: RecordFolder, queries: Names, gallery: Names
) -> tuple[Int[np.ndarray, "queries 4"], Judgements]:
    """Reads the box of each named query, in pixels, and positions of judged gallery images."""
    table = _read_table(folder, JUDGEMENTS)
    rows = _positions(queries, table["query"].to_numpy())
    boxes = np.array(table["box"].to_pylist(), np.int32).reshape(-1, 4)
    known = {name: i for i, name in enumerate(gallery)}

    def items(column: str) -> Sequence[Int[np.ndarray, " items"]]:
        listed = table[column].to_pylist()
        present = ([known[name] for name in listed[row] if name in known] for row in rows)
        return [np.array(positions, np.int64) for positions in present]

    return boxes[rows], Judgements(*map(items, Judgements._fields))


def _positions(wanted: Names, names: Names) -> Int[np.ndarray, " wanted"]:
    """Positions of wanted names among given ones; -1 for those that are missing."""
    known = {name: i for i, name in enumerate(names)}
    return np.array([known.get(name, -1) for name in wanted], np.int64)
