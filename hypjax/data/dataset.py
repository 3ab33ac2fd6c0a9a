"""The table of images that all kinds of datasets are read into, and the images' pixels."""

import bisect
import concurrent.futures
import dataclasses
import hashlib
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.data.views import TEST_VIEWS
from hypjax.errors import UserError, counted, explained
from hypjax.system.array_cache import ArrayCache
from hypjax.system.files import checksum, locked
from hypjax.system.machine import usable_cores
from hypjax.system.progress import image_bar
from hypjax.types import Frame, View, class_name, coarse_levels, one_spelling, split_names

_CHUNK = 4 * usable_cores()  # Images that are decoded together, then written to the host cache.


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How images are decoded, and where decoded pixels are cached."""

    channels: int = 3  # 1 for greyscale, 3 for RGB.
    fast: bool = False  # Whether JPEGs are decoded no larger than needed; pixels differ slightly.
    cache_dir: pathlib.Path | None = None  # Folder of the host cache; None: no cache.


class Region(NamedTuple):
    """A record: a box (left, top, right, bottom) of an image file, see `pixels.region`."""

    path: str
    box: tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A table with a row for each image, in a fixed order, and the images themselves."""

    # Image files as bytes or paths, as dicts of "bytes" and "path", or regions of files; or images
    # in memory.
    records: Sequence[Any]
    positions: Int[np.ndarray, " images"]  # Index of each image's record; records may be unused.
    labels: Int[np.ndarray, " images"]
    sizes: Int[np.ndarray, "images 2"]  # Heights and widths, in pixels; 0 if unknown.
    names: Shaped[np.ndarray, " images"]  # Strings: paths, or names for messages.
    class_names: Shaped[np.ndarray, " images"]  # Strings; '' if unknown.
    coarse_labels: Shaped[np.ndarray, " images"] | None = None  # Names of coarse classes.
    splits: Shaped[np.ndarray, " images"] | None = None  # Names of splits; '' without a split.
    # Strings that change whenever the images' files change; '' for images in memory.
    file_versions: Shaped[np.ndarray, " images"] | None = None
    checksums: Int[np.ndarray, " images"] | None = None  # Checksums of the files; None if unknown.
    upright: bool = False  # Whether images are rotated as EXIF says, as viewers do.
    fast: bool = False  # Whether JPEGs are decoded no larger than needed, see `Decoding`.
    # Host cache: exact pixels of all records in a memory-mapped file, which all processes share.
    decoded: ArrayCache | None = None
    records_fingerprint: str | None = None  # Of the image files, if known; see `fingerprint`.
    # Region of each image that views see: left, top, right, bottom, in pixels; None: the image.
    boxes: Int[np.ndarray, "images 4"] | None = None
    # Given pairs of images that show the same object, as indices of records.
    pairs: Int[np.ndarray, "pairs 2"] | None = None
    vectors: Float[np.ndarray, "images dim"] | None = None  # Another model's embeddings, float32.
    captions: Shaped[np.ndarray, " images"] | None = None  # Tuples of strings; () without any.
    # Names of the images that captioned regions are parts of; of other rows, their own names.
    owners: Shaped[np.ndarray, " images"] | None = None
    # Vectors of captions in a file of features, by caption; None if captions are to be embedded.
    caption_vectors: Mapping[str, Float[np.ndarray, " dim"]] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def num_classes(self) -> int:
        """Number of distinct labels."""
        return len(np.unique(self.labels))

    def coarse_labels_of_classes(self) -> tuple[tuple[int, ...], ...]:
        """At each level, the finest first, the number (from 0) of each class's coarse class."""
        if self.coarse_labels is None:
            return ()
        _, first_rows = np.unique(self.labels, return_index=True)
        levels = coarse_levels(self.coarse_labels[first_rows])
        return tuple(tuple(np.unique(names, return_inverse=True)[1].tolist()) for names in levels)

    def describe(self) -> str:
        """States the numbers of classes and images in words."""
        if self.num_classes == 1:
            return counted(len(self), "image")
        text = counted(self.num_classes, "class")
        if self.coarse_labels is not None:
            text += f" in {counted(len(np.unique(self.coarse_labels)), 'coarse class')}"
        return f"{text}, {counted(len(self), 'image')}"

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the images' files, classes, splits and order."""
        return fingerprint_of(self._rows())

    @property
    def versions(self) -> Int[np.ndarray, " images"]:
        """Hash of each image's file, class and split; 0 for images in memory."""
        on_disk = [False] * len(self) if self.file_versions is None else self.file_versions
        pairs = zip(on_disk, self._rows(), strict=True)
        return np.array([checksum(repr(x).encode()) if file else 0 for file, x in pairs], np.int64)

    def _rows(self) -> Iterable[tuple[Any, ...]]:
        columns = (self.file_versions, self.class_names, self.splits, self.coarse_labels)
        return zip(*(column.tolist() for column in columns if column is not None), strict=True)

    def name(self, i: int) -> str:
        """Returns the i-th image's name for messages."""
        return str(self.names[i])

    def path(self, i: int) -> str:
        """Returns the i-th image's path or URL; '' for images in memory and for features."""
        has_file = self.file_versions is not None and self.file_versions[i] != ""
        return self.name(i) if has_file and self.vectors is None else ""

    def class_name(self, i: int) -> str:
        """Returns the name of the i-th image's class."""
        return str(self.class_names[i])

    def content(self, i: int) -> Any:
        """Returns the bytes of the i-th image's file, or the image in memory."""
        record = self.records[int(self.positions[i])]
        if record is None:
            raise ValueError("its row has no image")
        if isinstance(record, Region):
            return pixels.region(pixels.read_image(record.path, channels=3), record.box)
        if isinstance(record, dict):  # The library `datasets` stores images so.
            record = record["path"] if record["bytes"] is None else record["bytes"]
        return pixels.read_bytes(record) if isinstance(record, str | os.PathLike) else record

    def image(self, i: int, channels: int) -> Image.Image:
        """Returns the i-th image, cropped to its box; raises a UserError if it cannot be read."""
        with explained(f"cannot read {self.name(i)}"):
            if self.decoded is None:
                image = pixels.decode(self.content(i), channels, upright=self.upright)
                height, width = self.sizes[i].tolist()
                if height and image.size != (width, height):
                    new_size = f"{image.width}×{image.height} pixels"
                    raise ValueError(f"it is {new_size}, but was {width}×{height} before")
            else:
                image = pixels.from_array(self._cached_pixels(self.decoded, i, channels))
            box = self._box(i, image.height, image.width)
            return image if box == (0, 0, *image.size) else image.crop(box)

    def crop(
        self, i: int, frame: Frame, side: int, channels: int
    ) -> UInt8[np.ndarray, "side side channels"]:
        """Crops the i-th image to a frame and resizes it to a square, exactly unless `fast`."""
        return self._view(i, lambda height, width: frame, side, channels)

    def test_view(self, i: int, view: View) -> UInt8[np.ndarray, "side side channels"]:
        """Returns the test view of the i-th image, see `hypjax.data.views`."""
        frame_of = TEST_VIEWS[view.test]
        return self._view(
            i, lambda *size: frame_of(size[0], size[1], view), view.side, view.channels
        )

    def _view(
        self, i: int, frame_of: Callable[[int, int], Frame], side: int, channels: int
    ) -> UInt8[np.ndarray, "side side channels"]:
        """Crops the i-th image to the frame that `frame_of` computes from its height and width."""
        with explained(f"cannot read {self.name(i)}"):
            if self.decoded is not None:
                # Slices of a memory map read only the pixels of the box.
                array = self._cached_pixels(self.decoded, i, channels)
                left, top, right, bottom = self._box(i, *array.shape[:2])
                array = array[top:bottom, left:right]
                frame = frame_of(*array.shape[:2])
                if frame.size == array.shape[:2] and not frame.is_padded:  # It is only cropped.
                    top, left, height, width = frame.box
                    region = array[top : top + height, left : left + width]
                    return pixels.resize(pixels.from_array(region), side)
                return pixels.show(pixels.from_array(array), frame, side)
            if self.fast and not isinstance(self.records[int(self.positions[i])], Region):
                # The frame's box is relative to the image's box, the decoder's to the file.
                left, top, right, bottom = self._box(i, *self.sizes[i].tolist())
                frame = frame_of(bottom - top, right - left)
                y, x, *size = frame.box_within((bottom - top, right - left))
                box = top + y, left + x, size[0], size[1]
                view = pixels.show_fast(self.content(i), channels, box, side, self.upright)
                if view is not None and not frame.is_padded:
                    return view
            image = self.image(i, channels)
            return pixels.show(image, frame_of(image.height, image.width), side)

    def _box(self, i: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns left, top, right and bottom of the i-th image's box, within the image."""
        if self.boxes is None:
            return 0, 0, width, height
        left, top, right, bottom = self.boxes[i].tolist()
        box = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"its box {[left, top, right, bottom]} is not in the image")
        return box

    def _cached_pixels(
        self, cache: ArrayCache, i: int, channels: int
    ) -> UInt8[np.ndarray, "height width channels"]:
        position = int(self.positions[i])
        if (content := cache[position]) is None:
            uncached = dataclasses.replace(self, decoded=None, boxes=None)
            content = pixels.array(uncached.image(i, channels))
            cache.replace(position, content)
        return content.reshape(*self.sizes[i], channels)

    def take(self, rows: Int[np.ndarray, " rows"]) -> "Dataset":
        """Returns the images in the given rows."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        taken = {name: np.asarray(x)[rows] for name, x in columns.items() if x is not None}
        return dataclasses.replace(self, **taken)

    def whole(self) -> "Dataset":
        """Returns the images without captioned regions of them."""
        if self.owners is None:
            return self
        rows = np.flatnonzero(self.owners == self.names)
        return dataclasses.replace(self.take(rows), owners=None)

    def __getitem__(self, rows: slice) -> "Dataset":
        """Returns the images in a slice of the rows."""
        return self.take(np.arange(len(self))[rows])

    def renumbered(self) -> "Dataset":
        """Returns the same images, with labels numbered from 0 without gaps."""
        return dataclasses.replace(self, labels=np.unique(self.labels, return_inverse=True)[1])

    def with_classes(self, classes: Int[np.ndarray, " classes"]) -> "Dataset":
        """Returns the images of the given classes, renumbered from 0 without gaps."""
        return self.take(np.flatnonzero(np.isin(self.labels, classes))).renumbered()


# The fields of a `Dataset` that have a row for each image.
_COLUMNS = (
    *("positions", "labels", "sizes", "names", "class_names", "coarse_labels", "splits"),
    *("file_versions", "checksums", "boxes", "vectors", "captions", "owners"),
)


class Chained(Sequence):
    """A concatenation of sequences that does not copy them."""

    def __init__(self, sequences: Iterable[Sequence[Any]]) -> None:
        self._sequences = list(sequences)
        self._starts = [0, *np.cumsum([len(sequence) for sequence in self._sequences]).tolist()]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: Any) -> Any:
        k = bisect.bisect_right(self._starts, i) - 1
        return self._sequences[k][i - self._starts[k]]


class _Chosen(Sequence):
    """Some items of a sequence, which are not copied."""

    def __init__(self, items: Sequence[Any], indices: Int[np.ndarray, " n"]) -> None:
        self._items, self._indices = items, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: Any) -> Any:
        return self._items[int(self._indices[i])]


def table_of_names(
    records: Sequence[Any],
    names: Sequence[object],
    class_names: Sequence[str],
    *,
    splits: Iterable[object] = (),
    coarse_labels: Iterable[object] = (),
    file_versions: Iterable[object] | None = None,
    vectors: Float[np.ndarray, "images dim"] | None = None,
) -> Dataset:
    """Makes a table of images of unknown sizes; without `file_versions`, they are in memory."""
    split_column = split_names(splits)
    coarse_column = one_spelling(class_name(label) for label in coarse_labels)
    class_names = one_spelling(class_names)
    versions = [""] * len(names) if file_versions is None else map(repr, file_versions)
    return Dataset(
        records=records,
        positions=np.arange(len(names)),
        labels=np.unique(class_names, return_inverse=True)[1],
        sizes=np.zeros((len(names), 2), np.int32),
        names=np.array([str(name) for name in names], object),
        class_names=np.array(class_names, object),
        coarse_labels=np.array(coarse_column, object) if any(coarse_column) else None,
        splits=np.array(split_column, object) if any(split_column) else None,
        file_versions=np.array([*versions], object),
        upright=True,
        vectors=vectors,
    )


def union(datasets: Sequence[Dataset]) -> Dataset:
    """Joins datasets that share their records: each record once, by position; labels are 0."""
    positions = np.concatenate([dataset.positions for dataset in datasets])
    joined = dataclasses.replace(
        datasets[0],
        positions=positions,
        labels=np.zeros_like(positions),
        sizes=np.concatenate([dataset.sizes for dataset in datasets]),
        names=np.concatenate([dataset.names for dataset in datasets]),
        class_names=np.concatenate([dataset.class_names for dataset in datasets]),
        coarse_labels=None,
        splits=None,
        file_versions=None,
        checksums=None,
        boxes=None,
        vectors=None,
        captions=None,
        owners=None,
    )
    return joined.take(np.unique(positions, return_index=True)[1])


def stacked(tables: Sequence[Dataset]) -> Dataset:
    """Concatenates tables of images to be embedded; classes with equal names become one."""
    if len(tables) == 1:
        return tables[0]
    if len({table.vectors is None for table in tables}) > 1:
        raise UserError("images and features cannot be embedded together; give one of them")
    class_names = one_spelling(itertools.chain.from_iterable(x.class_names for x in tables))
    first_records = np.cumsum([0, *(len(table.records) for table in tables[:-1])])
    firsts_and_tables = zip(first_records, tables, strict=True)
    return Dataset(
        records=Chained(table.records for table in tables),
        positions=np.concatenate([first + table.positions for first, table in firsts_and_tables]),
        labels=np.unique(class_names, return_inverse=True)[1],
        sizes=np.concatenate([table.sizes for table in tables]),
        names=np.concatenate([table.names for table in tables]),
        class_names=np.array(class_names, object),
        coarse_labels=_stacked_column("coarse_labels", tables),
        splits=_stacked_column("splits", tables),
        file_versions=_stacked_column("file_versions", tables),
        boxes=_stacked_column("boxes", tables),
        vectors=_stacked_column("vectors", tables),
        captions=_stacked_column("captions", tables),
        upright=tables[0].upright,
        fast=tables[0].fast,
    )


def _stacked_column(name: str, tables: Sequence[Dataset]) -> Shaped[np.ndarray, "n ..."] | None:
    """Concatenates a column. Tables without it get '' or, as boxes, whole images."""
    columns = [getattr(table, name) for table in tables]
    if all(column is None for column in columns):
        return None
    for i, table in enumerate(tables):
        if columns[i] is None and name == "boxes":
            columns[i] = np.hstack([np.zeros_like(table.sizes), table.sizes[:, ::-1]])
        elif columns[i] is None:
            columns[i] = np.full(len(table), "", object)
    return np.concatenate(columns)


def fingerprint_of(values: Iterable[Any]) -> str:
    """Hashes values by their `repr`, which must not abbreviate, to 32 hexadecimal digits."""
    return hashlib.sha256("".join(map(repr, values)).encode()).hexdigest()[:32]


def decoded_as(dataset: Dataset, decoding: Decoding) -> Dataset:
    """Sets how images are decoded, and names their host cache, which `fill_cache` must fill."""
    decoded = None
    if decoding.cache_dir is not None:
        name = f"{dataset.records_fingerprint}-{decoding.channels}-{pixels.DECODER}"
        decoded = ArrayCache(decoding.cache_dir / name, len(dataset))
        # The cache has no place for records that are left out, such as unreadable ones.
        records = _Chosen(dataset.records, dataset.positions)
        dataset = dataclasses.replace(dataset, records=records, positions=np.arange(len(dataset)))
    return dataclasses.replace(dataset, fast=decoding.fast, decoded=decoded)


def fill_cache(dataset: Dataset, channels: int) -> None:
    """Decodes a dataset's images into its host cache, unless it has none or a complete one."""
    cache = dataset.decoded
    if cache is None or cache.is_complete():
        return
    uncached = dataclasses.replace(dataset, decoded=None, boxes=None)
    advice = "; choose another --config.run.cache_dir, or set --config.run.cache=none"
    with (
        explained("cannot keep decoded images", advice),
        cache.filling(locked(cache.folder, "decoding images")) as num_cached,
        image_bar(len(dataset), "decoding images once", num_cached) as bar,
        concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool,
    ):
        for first in range(num_cached, len(dataset), _CHUNK):
            rows = range(first, min(first + _CHUNK, len(dataset)))
            images = [*pool.map(lambda i: pixels.array(uncached.image(i, channels)), rows)]
            cache.append(images)
            bar.update(len(images))
