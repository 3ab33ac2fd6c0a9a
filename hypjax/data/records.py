"""Prepared datasets on disk: ArrayRecord files named as by TFDS, and an index in Parquet.

The index of a split, `index-SPLIT.parquet`, holds what plans, messages and scores need to know of
every record, so that opening a dataset reads no records:

    label, height, width (int32), checksum (uint32: zlib.crc32 of the encoded image),
    name, class_name, superlabel (strings; superlabel is '' if classes have no groups),
    offset, length (int64: position of the encoded image in its record, in bytes)

TFDS's own writer keeps up to 1 GB of a split in memory and needs TensorFlow beyond that; this one
writes each record immediately. Pages of the index have checksums.

Relations between images are tables of the same kind. `pairs.parquet` lists pairs of training images
that show one object, from which tuples are drawn. `judgements.parquet` lists, for each query, its
box and what it should find in the gallery. They refer to images by name; names that a partial copy
lacks are skipped.
"""

import contextlib
import itertools
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import tensorflow_datasets as tfds
import tqdm
from jaxtyping import Int, Shaped

from hypjax.data.dataset import Dataset, hash_facts
from hypjax.errors import UserError
from hypjax.types import Judgements

_SHARD_BYTES = 2**28
_SCHEMA = pyarrow.schema(
    [
        ("label", pyarrow.int32()),
        ("height", pyarrow.int32()),
        ("width", pyarrow.int32()),
        ("checksum", pyarrow.uint32()),
        ("name", pyarrow.string()),
        ("class_name", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
        ("superlabel", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
        ("offset", pyarrow.int64()),
        ("length", pyarrow.int64()),
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
Example = Mapping[str, Any]  # Values of an image's features by name.


class EncodedImages(Sequence):
    """The image files in a split's records, extracted without parsing the records."""

    def __init__(self, records: Sequence[bytes], index: pyarrow.Table, name: str, folder: str):
        """Takes what worker processes need, but no builder; name and folder are for messages."""
        self._records, self._name, self._folder = records, name, folder
        self._offsets, self._lengths = (index[key].to_numpy() for key in ("offset", "length"))

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> bytes:
        """Returns the i-th image's bytes; raises UserError if they are damaged."""
        # Parsing with TFDS takes longer than reading and blocks other threads: input by threads was
        # a tenth slower.
        start = int(self._offsets[i])
        with reading(self._name, self._folder):
            record = self._records[int(i)]
        return record[start : start + int(self._lengths[i])]


class RecordBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A TFDS builder whose records can be read by position and have an index.

    A subclass's `_examples_by_split` names the classes (of the feature `label`), and returns each
    split's examples in the order of the records: an `image` (encoded bytes), its `height` and
    `width`, `name`, `class_name` and `superlabel`. For the progress bar, it may set `_total`, the
    number of all examples.
    """

    DESCRIPTION: str
    IMAGE_SHAPE: tuple[int | None, int | None, int] = (None, None, 3)
    TABLES: tuple[str, ...] = ()  # Names of its tables of relations.
    _total: int | None = None

    # Nothing is downloaded. By default TFDS 4.9 looks for a list of checksums, and for that imports
    # importlib_resources, which it does not declare as a dependency for this Python.
    url_infos = None

    def __init__(self, **kwargs: Any):
        """Opens the dataset, prepared or not; takes arguments of TFDS, above all `data_dir`."""
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=self.IMAGE_SHAPE),
            "height": np.int32,
            "width": np.int32,
            # Its names come from the files, or from the prepared dataset.
            "label": tfds.features.ClassLabel(),
            "name": tfds.features.Text(doc="What the dataset calls the image; unique."),
            "class_name": tfds.features.Text(),
            "superlabel": tfds.features.Text(doc="Group of the class; '' where there are none."),
        }
        return self.dataset_info_from_configs(
            description=self.DESCRIPTION,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            disable_shuffling=True,
        )

    def _generate_examples(self) -> None:
        """Not called, since `_generate_splits` is ours; TFDS requires it, and the next."""

    _split_generators = _generate_examples

    def _generate_splits(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig,
    ) -> list[tfds.core.SplitInfo]:
        """Writes all splits except empty ones, which TFDS cannot describe."""
        limit, splits = download_config.max_examples_per_split, self._examples_by_split()
        bar = {"total": self._total, "unit": "image", "disable": None, "leave": False}
        with tqdm.tqdm(desc=f"preparing {self.name}", **bar) as progress:

            def counted(examples: Iterator[Example]) -> Iterator[Example]:
                for example in itertools.islice(examples, limit):
                    progress.update()
                    yield example

            written = [self._write_split(name, counted(part)) for name, part in splits.items()]
        splits = [split for split in written if split.num_examples]
        for name, table in self.tables().items():
            _write_table(pathlib.Path(self.data_dir) / f"{name}.parquet", table)
        return splits

    def tables(self) -> Mapping[str, pyarrow.Table]:
        """Returns the tables of relations, by the names in `TABLES`; called after the splits."""
        return {}

    def _write_split(self, name: str, examples: Iterator[Example]) -> tfds.core.SplitInfo:
        """Writes the records of a split, in as many files as needed, and its index."""
        from array_record.python.array_record_module import ArrayRecordWriter

        index: dict[str, list[Any]] = {column: [] for column in _SCHEMA.names}
        template = self._get_filename_template(split_name=name)
        folder = pathlib.Path(self.data_dir)
        lengths, sizes, serialized = [], [], (self._serialize(each, index) for each in examples)
        # How many files there will be, which their names tell, is known after the last.
        for first in serialized:
            path = folder / f"{name}-{len(lengths)}.unfinished"
            # Images are compressed already.
            writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
            lengths.append(0)
            sizes.append(0)
            try:
                for record in itertools.chain([first], serialized):
                    writer.write(record)
                    lengths[-1] += 1
                    sizes[-1] += len(record)
                    if sizes[-1] >= _SHARD_BYTES:
                        break
            finally:
                writer.close()
        for i in range(len(lengths)):
            path = template.sharded_filepath(shard_index=i, num_shards=len(lengths))
            (folder / f"{name}-{i}.unfinished").rename(path)
        if lengths:
            _write_table(folder / f"index-{name}.parquet", pyarrow.table(index, _SCHEMA))
        return tfds.core.SplitInfo(
            name=name, shard_lengths=lengths, num_bytes=sum(sizes), filename_template=template
        )

    def _serialize(self, example: Example, index: dict[str, list[Any]]) -> bytes:
        """Serialises an example, and appends it to the index."""
        features, image = self.info.features, example["image"]
        example = {**example, "label": example["class_name"]}
        record = features.serialize_example({name: example[name] for name in features})
        row = {
            **example,
            "label": features["label"].encode_example(example["label"]),
            "checksum": zlib.crc32(image),
            "offset": _find(image, record),
            "length": len(image),
        }
        for column, values in index.items():
            values.append(row[column])
        return record


def open_records(builder: tfds.core.DatasetBuilder, split: str) -> Dataset:
    """Opens one split of a prepared dataset, without reading records.

    Labels are indices into the names of the builder's feature `label`. Raises UserError if files
    are damaged or missing, as all functions below do.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    index = read_index(builder, split)
    with reading(builder.name, builder.data_dir):
        files = [str(path) for path in builder.info.splits[split].filepaths]
        records = ArrayRecordDataSource(files)
    groups, superlabels = _strings(index["superlabel"]), None
    if groups.any():
        groups, superlabels = np.unique(groups, return_inverse=True)
    sizes = np.stack([index["height"].to_numpy(), index["width"].to_numpy()], axis=1)
    checksums = index["checksum"].to_numpy()
    return Dataset(
        records=EncodedImages(records, index, builder.name, str(builder.data_dir)),
        positions=np.arange(len(index)),
        labels=index["label"].to_numpy(),
        sizes=sizes,
        names=_strings(index["name"]),
        superlabels=superlabels,
        class_names=_strings(index["class_name"]),
        group_names=None if superlabels is None else groups,
        # Of facts on images alone, so that datasets with equal images share caches.
        source=hash_facts([sizes.tobytes(), checksums.tobytes()]),
    )


def read_index(
    builder: tfds.core.DatasetBuilder, split: str, columns: Sequence[str] = tuple(_SCHEMA.names)
) -> pyarrow.Table:
    """Reads columns of a split's index."""
    schema = pyarrow.schema([_SCHEMA.field(column) for column in columns])
    return read_table(builder, f"index-{split}.parquet", schema)


def read_table(
    builder: tfds.core.DatasetBuilder, file: str, schema: pyarrow.Schema
) -> pyarrow.Table:
    """Reads the columns of a schema from a table in the dataset's folder."""
    path = pathlib.Path(builder.data_dir) / file
    with reading(builder.name, builder.data_dir):
        table = pyarrow.parquet.read_table(
            path, columns=schema.names, page_checksum_verification=True
        )
        return table.select(schema.names).cast(schema)


def _write_table(path: pathlib.Path, table: pyarrow.Table) -> None:
    pyarrow.parquet.write_table(table, path, compression="zstd", write_page_checksum=True)


def is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    """Returns whether the dataset's folder exists, which appears when all files are written."""
    return pathlib.Path(builder.data_dir).exists()


@contextlib.contextmanager
def reading(name: str, folder: str | pathlib.Path) -> Iterator[None]:
    """Turns any error of reading a prepared dataset into one sentence."""
    try:
        yield
    except Exception as error:  # TFDS and ArrayRecord raise almost anything.
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name} in {folder} is damaged ({reason}); remove that folder, and prepare it again "
            f"(python -m hypjax.prepare --dataset={name}); a copy from the cloud is made again"
        ) from error


def _find(image: bytes, record: bytes) -> int:
    """Returns the offset of an image in its record."""
    # Searching for the first bytes is quicker; searching for all takes as long as writing.
    start = record.index(image[:64])
    return start if record.startswith(image, start) else record.index(image)


def _strings(column: pyarrow.ChunkedArray) -> Shaped[np.ndarray, " rows"]:
    """Returns an array of strings; equal ones share an object if the column is a dictionary."""
    if not pyarrow.types.is_dictionary(column.type):
        return column.to_numpy()
    values = column.unify_dictionaries().combine_chunks()
    return values.dictionary.to_numpy(zero_copy_only=False)[values.indices.to_numpy()]


def read_pairs(builder: tfds.core.DatasetBuilder, names: Names) -> Int[np.ndarray, "pairs 2"]:
    """Reads a dataset's pairs as positions among the named training images."""
    table = read_table(builder, f"{PAIRS}.parquet", PAIRS_SCHEMA)
    columns = [_positions(table[column].to_numpy(), names) for column in PAIRS_SCHEMA.names]
    pairs = np.stack(columns, axis=1)
    return pairs[(pairs >= 0).all(axis=1)]


def read_judgements(
    builder: tfds.core.DatasetBuilder, queries: Names, gallery: Names
) -> tuple[Int[np.ndarray, "queries 4"], Judgements]:
    """Reads the box of each named query, in pixels, and positions of judged gallery images."""
    table = read_table(builder, f"{JUDGEMENTS}.parquet", JUDGEMENTS_SCHEMA)
    rows = _positions(queries, table["query"].to_numpy())
    boxes = np.array(table["box"].to_pylist(), np.int32).reshape(-1, 4)
    known = {name: i for i, name in enumerate(gallery)}

    def items(column: str) -> Sequence[Int[np.ndarray, " items"]]:
        listed = table[column].to_pylist()
        found = ([known[name] for name in listed[row] if name in known] for row in rows)
        return [np.array(positions, np.int64) for positions in found]

    return boxes[rows], Judgements(*map(items, Judgements._fields))


def _positions(wanted: Names, names: Names) -> Int[np.ndarray, " wanted"]:
    """Positions of wanted names among given ones; -1 for those that are missing."""
    known = {name: i for i, name in enumerate(names)}
    return np.array([known.get(name, -1) for name in wanted], np.int64)
