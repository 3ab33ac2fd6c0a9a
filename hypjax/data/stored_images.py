"""Images of sharded datasets in the cache: their encoded bytes as ArrayRecord, and an index."""

import hashlib
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import tqdm

from hypjax.data.shards import ShardedDataset
from hypjax.errors import UserError, writing
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.files import replacing, sync
from hypjax.system.locks import claimed

_VERSION = 2  # Of what is stored, and of how columns are understood.
_IMAGES, _INDEX = "images.array_record", "index.parquet"
_NAME = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
_SCHEMA = pyarrow.schema(
    [
        ("name", pyarrow.string()),
        ("label", _NAME),
        ("split", _NAME),
        ("superlabel", _NAME),
        ("checksum", pyarrow.uint32()),  # zlib.crc32 of the encoded image.
    ]
)


class StoredImage(NamedTuple):
    """An image in the cache, which is read when it is needed."""

    images: Sequence[bytes]  # All of the dataset.
    position: int
    checksum: int

    def read(self) -> bytes:
        """Returns the encoded image."""
        content = self.images[self.position]
        if zlib.crc32(content) != self.checksum:
            raise ValueError("its copy in the cache is damaged")
        return content


class Entry(NamedTuple):
    """What is known of an image."""

    name: str
    label: str
    split: str | None
    superlabel: str | None
    image: StoredImage


def open_stored(dataset: ShardedDataset) -> list[Entry]:
    """Lists the images of a dataset, which is copied to the cache unless it is there already.

    The copy belongs to the files as they are now; if one changes, they are read again. Raises a
    UserError if a file cannot be read, or the cache cannot be written.
    """
    folder = cache_folder() / "datasets" / _key(dataset)
    if not (folder / _INDEX).exists():
        with writing(folder), claimed(folder, f"reading {dataset.where}"):
            if not (folder / _INDEX).exists():  # Another process may have been quicker.
                _store(dataset, folder)
    return list(_entries(dataset, folder))


def _key(dataset: ShardedDataset) -> str:
    """Hash of what changes with the files, and of the options that say how they are read."""
    columns = sorted((k, v) for k, v in dataset.options.items() if k.endswith(("image", "label")))
    digest = hashlib.sha256(repr((_VERSION, columns)).encode())
    for shard in dataset.shards:
        stat = shard.path.stat()
        facts = (str(shard.path.absolute()), *shard[1:], stat.st_size, stat.st_mtime_ns)
        digest.update(repr(facts).encode())
    return digest.hexdigest()[:32]


def _store(dataset: ShardedDataset, folder: pathlib.Path) -> None:
    """Writes the images, then the index, which makes the copy complete."""
    from array_record.python.array_record_module import ArrayRecordWriter

    console.say(f"reading {dataset.where} into {folder} (once)")
    index: dict[str, list] = {name: [] for name in _SCHEMA.names}
    file = folder / _IMAGES
    total = sum(shard.path.stat().st_size for shard in dataset.shards)
    bar = {"total": total, "unit": "B", "unit_scale": True, "disable": None, "leave": False}
    try:
        # Images are compressed already.
        writer = ArrayRecordWriter(str(file), "group_size:1,uncompressed")
        try:
            with tqdm.tqdm(**bar) as progress:
                for row in dataset.rows():
                    writer.write(row.image)
                    known = row._asdict() | {"checksum": zlib.crc32(row.image)}
                    for name, values in index.items():
                        values.append(known[name])
                    progress.update(len(row.image))
        finally:
            writer.close()
        if not index["name"]:
            raise UserError(f"{dataset.where} has no images")
        sync(file)
        with replacing(folder / _INDEX) as temporary:
            table = pyarrow.table(index, _SCHEMA)
            pyarrow.parquet.write_table(
                table, temporary, compression="zstd", write_page_checksum=True
            )
    except RuntimeError as error:  # Of ArrayRecord's writer.
        raise UserError(f"cannot write to {folder} ({error})") from error
    finally:
        if not (folder / _INDEX).exists():
            file.unlink(missing_ok=True)


def _entries(dataset: ShardedDataset, folder: pathlib.Path) -> Iterator[Entry]:
    """Reads the index; of several splits, only those that the options name."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    try:
        index = pyarrow.parquet.read_table(folder / _INDEX, page_checksum_verification=True)
        columns = [index[name].to_pylist() for name in _SCHEMA.names]
        images = ArrayRecordDataSource([str(folder / _IMAGES)])
        if len(images) != len(index):
            raise ValueError(f"{len(images)} images, but {len(index)} in the index")
    except Exception as error:  # pyarrow and ArrayRecord raise almost anything.
        raise UserError(
            f"the copy of {dataset.where} in {folder} is damaged ({error}); remove that folder"
        ) from error
    splits = dataset.chosen(columns[2])
    # One split, or several that are named, is none: classes are held out.
    split = len(splits) > 1 and "split" not in dataset.options
    for i, (*known, checksum) in enumerate(zip(*columns, strict=True)):
        if known[2] in splits:
            entry = Entry(*known, StoredImage(images, i, checksum))
            yield entry if split else entry._replace(split=None)
