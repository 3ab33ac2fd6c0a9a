"""Prepared datasets on disk: a TFDS dataset of ArrayRecord files, and tables in Parquet.

`index-SPLIT.parquet` holds the facts of every record that plans and scores need, so that opening a
dataset reads no records. `pairs.parquet` lists pairs of training images that show the same object,
and `judgements.parquet` each query's box and ground truth; a partial copy may lack some of their
images. `captions.parquet` lists texts that describe all images of a class.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from jaxtyping import Int, Shaped

from hypjax.data.dataset import Dataset, fingerprint_of
from hypjax.errors import explained, reason, require_package
from hypjax.system import files
from hypjax.system.progress import Bar, image_bar
from hypjax.types import GroundTruth

VERSION = "2.2.0"  # Version of the format; part of the folders' paths.
MANIFEST = "dataset.json"  # Fields of a `RecordFolder`.
_INDEX_COLUMNS = {  # By type.
    "int32": ("label", "height", "width"),
    "string": ("name", "class_name", "coarse_label"),  # '' without coarse classes.
    "int64": ("checksum", "offset", "length"),  # Where the image's bytes lie in its record.
}
_INDEX_SCHEMA = pyarrow.schema([(x, kind) for kind, names in _INDEX_COLUMNS.items() for x in names])

PAIRS = "pairs"
PAIRS_SCHEMA = pyarrow.schema([("anchor", pyarrow.string()), ("positive", pyarrow.string())])

CAPTIONS = "captions"
CAPTIONS_SCHEMA = pyarrow.schema(dict.fromkeys(("class_name", "caption"), pyarrow.string()))

JUDGEMENTS = "judgements"
JUDGEMENTS_SCHEMA = pyarrow.schema(
    {
        "query": pyarrow.string(),
        "box": pyarrow.list_(pyarrow.int32()),  # Left, top, right and bottom, in pixels.
        **dict.fromkeys(GroundTruth._fields, pyarrow.list_(pyarrow.string())),
    }
)

Names = Shaped[np.ndarray, " images"]


class Count(NamedTuple):
    """Size of a split."""

    images: int
    classes: int | None  # None if unknown.


class Example(NamedTuple):
    """An image to be written."""

    image: bytes  # The image file.
    height: int
    width: int
    name: str  # The dataset's name of the image; unique.
    class_name: str
    coarse_label: str = ""


class Contents(NamedTuple):
    """A dataset to be written."""

    splits: Mapping[str, Iterable[Example]]  # In the order of the records.
    total: int  # Number of all examples, for the progress bar.
    tables: Mapping[str, pyarrow.Table]  # `PAIRS`, `JUDGEMENTS` and `CAPTIONS`, if it has them.
    note: str = ""  # How it differs from the published dataset; accompanies all results.


@dataclasses.dataclass(frozen=True)
class RecordFolder:
    """The folder of a prepared dataset."""

    name: str
    path: pathlib.Path
    splits: Mapping[str, Count]  # Splits that have images.
    tables: Sequence[str]  # Names of tables other than the indexes.
    part: str | None  # The part of the dataset that was prepared, None for the whole.
    note: str
    checksums: Mapping[str, str]  # SHA-256 hashes of the tables and indexes, by file name.


def write_records(folder: pathlib.Path, name: str, contents: Contents, part: str | None) -> None:
    """Writes a dataset into a new folder; classes are numbered in the order of first images."""
    # TFDS's own builders keep up to 1 GB of a split in memory, and need TensorFlow beyond that.
    import tensorflow_datasets as tfds

    folder.mkdir()
    text = tfds.features.Text()
    features = {"image": tfds.features.Image(), "height": np.int32, "width": np.int32}
    features |= {"label": np.int64, "name": text, "class_name": text, "coarse_label": text}
    serialize = tfds.features.FeaturesDict(features).serialize_example
    labels: dict[str, int] = {}  # Numbers of the classes, to which each split adds.
    counts, split_infos = {}, []
    with image_bar(contents.total, f"preparing {name}") as progress:
        for split, examples in contents.splits.items():
            path = _records_path(folder, name, split)
            count = _write_split(path, split, examples, labels, serialize, progress)
            if count.images:
                counts[split] = count
                lengths, size = [count.images], path.stat().st_size
                info = tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=size)
                split_infos.append(info)
    for table_name, table in contents.tables.items():
        pyarrow.parquet.write_table(table, folder / f"{table_name}.parquet", compression="zstd")
    features["label"] = tfds.features.ClassLabel(names=list(labels))
    if split_infos:  # TFDS cannot describe a dataset without images, which callers reject.
        tfds.folder_dataset.write_metadata(
            data_dir=folder,
            features=features,
            split_infos=split_infos,
            version=VERSION,
            check_data=False,  # It needs TensorFlow.
        )
    manifest: dict[str, Any] = {"splits": counts, "tables": [*contents.tables], "part": part}
    manifest["note"] = contents.note
    manifest["checksums"] = {x.name: files.sha256(x) for x in folder.glob("*.parquet")}
    files.write_json(folder / MANIFEST, files.with_checksum(manifest))


def _records_path(folder: pathlib.Path, name: str, split: str) -> pathlib.Path:
    """Returns the path that TFDS prescribes for a split's records."""
    return folder / f"{name}-{split}.array_record-00000-of-00001"


def _write_split(
    path: pathlib.Path,
    split: str,
    examples: Iterable[Example],
    labels: dict[str, int],
    serialize: Callable[[Mapping[str, Any]], bytes],
    progress: Bar,
) -> Count:
    """Writes the records of a split and its index, unless it has no images; adds new labels."""
    from array_record.python.array_record_module import ArrayRecordWriter

    options = "group_size:1,uncompressed"  # Images are compressed already.
    rows = []
    try:
        with contextlib.closing(ArrayRecordWriter(str(path), options)) as writer:
            for example in examples:
                label = labels.setdefault(example.class_name, len(labels))
                record = serialize({**example._asdict(), "label": label})
                writer.write(record)
                image, *facts = example
                rows.append((label, *facts, files.checksum(image), record.index(image), len(image)))
                progress.update()
    except RuntimeError as error:  # ArrayRecord raises it for a full disk.
        raise OSError(reason(error)) from error
    if not rows:
        path.unlink()
        return Count(0, 0)
    index = pyarrow.table(list(zip(*rows, strict=True)), schema=_INDEX_SCHEMA)
    pyarrow.parquet.write_table(index, path.with_name(f"index-{split}.parquet"), compression="zstd")
    return Count(images=len(rows), classes=len({row[0] for row in rows}))


class _Images(Sequence):
    """The image files in records, which the index locates."""

    # Parsing records with TFDS would block other threads: input by threads was a tenth slower.

    def __init__(self, records: Sequence[bytes], offsets: np.ndarray, lengths: np.ndarray) -> None:
        self._records, self._offsets, self._lengths = records, offsets, lengths

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: Any) -> bytes:
        start = int(self._offsets[i])
        return self._records[int(i)][start : start + int(self._lengths[i])]


def open_folder(name: str, path: pathlib.Path) -> RecordFolder:
    """Opens the folder of a prepared dataset; raises a UserError for damaged or missing files."""
    with reading(name, path):
        facts = files.check_json(json.loads((path / MANIFEST).read_text()))
        facts["splits"] = {split: Count(*count) for split, count in facts["splits"].items()}
        return RecordFolder(name, path, **facts)


def open_records(folder: RecordFolder, split: str) -> Dataset:
    """Opens a split of a prepared dataset, without reading images."""
    require_package("array_record", "a prepared dataset", "array_record")  # Not on Windows.
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    table = _read_table(folder, f"index-{split}")
    with reading(folder.name, folder.path):
        records = ArrayRecordDataSource(str(_records_path(folder.path, folder.name, split)))
        if len(records) != len(table):
            raise ValueError(f"{split} has {len(records)} records, and {len(table)} in its index")
    index = {name: table[name].to_numpy() for name in _INDEX_SCHEMA.names}
    sizes = np.stack([index["height"], index["width"]], axis=1)
    coarse_labels = index["coarse_label"]
    return Dataset(
        records=_Images(records, index["offset"], index["length"]),
        positions=np.arange(len(table)),
        labels=index["label"],
        sizes=sizes,
        names=index["name"],
        class_names=index["class_name"],
        coarse_labels=coarse_labels if coarse_labels.any() else None,
        checksums=index["checksum"],
        # Depends only on the images, so that datasets with equal images share caches.
        records_fingerprint=fingerprint_of([sizes.tobytes(), index["checksum"].tobytes()]),
    )


def _read_table(folder: RecordFolder, name: str) -> pyarrow.Table:
    with reading(folder.name, folder.path):
        file = f"{name}.parquet"
        files.check_files(folder.path, {file: folder.checksums[file]})
        return pyarrow.parquet.read_table(folder.path / file)


@contextlib.contextmanager
def reading(name: str, path: pathlib.Path) -> Iterator[None]:
    """Turns any error of reading a prepared dataset into a UserError."""
    command = f"python -m hypjax.prepare --dataset={name}"
    advice = f"; remove that folder, and prepare it again ({command}) or have it copied again"
    with explained(f"{name} in {path} is damaged", advice):
        yield


def read_pairs(folder: RecordFolder, names: Names) -> Int[np.ndarray, "pairs 2"]:
    """Reads a dataset's pairs of images, as indices into the names of its training images."""
    table = _read_table(folder, PAIRS)
    pairs = np.stack([_indices(table[x].to_numpy(), names) for x in PAIRS_SCHEMA.names], axis=1)
    return pairs[(pairs >= 0).all(axis=1)]  # Without pairs of which an image is missing.


def read_captions(folder: RecordFolder) -> dict[str, tuple[str, ...]]:
    """Reads a dataset's descriptions of classes, by class."""
    rows = _read_table(folder, CAPTIONS).to_pylist()
    names = dict.fromkeys(row["class_name"] for row in rows)
    return {x: tuple(row["caption"] for row in rows if row["class_name"] == x) for x in names}


def read_judgements(
    folder: RecordFolder, queries: Names, gallery: Names
) -> tuple[Int[np.ndarray, "queries 4"], GroundTruth]:
    """Reads the queries' boxes, in pixels, and their ground truth, as indices into the gallery."""
    table = _read_table(folder, JUDGEMENTS)
    table = table.take(_indices(queries, table["query"].to_numpy()))
    boxes = np.array(table["box"].to_pylist(), np.int32).reshape(-1, 4)
    index_of = {name: i for i, name in enumerate(gallery)}
    levels = [
        [np.array([index_of[x] for x in names if x in index_of], np.int64) for names in lists]
        for lists in (table[level].to_pylist() for level in GroundTruth._fields)
    ]
    return boxes, GroundTruth._make(levels)


def _indices(names: Names, all_names: Names) -> Int[np.ndarray, " images"]:
    """Returns each name's index among all names; -1 if it is missing."""
    index_of = {name: i for i, name in enumerate(all_names)}
    return np.array([index_of.get(name, -1) for name in names], np.int64)
