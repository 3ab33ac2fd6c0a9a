"""The table of images that all kinds of datasets are read into, and the images' pixels."""

import bisect
import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tqdm
from jaxtyping import Float, Int, Shaped, UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.data.views import TEST_VIEWS
from hypjax.errors import UserError, counted, explained
from hypjax.system.array_cache import ArrayCache
from hypjax.system.files import locked
from hypjax.system.machine import usable_cores
from hypjax.types import Frame, View, class_name, coarse_levels, split_names

_CHUNK = 4 * usable_cores()  # Images that are decoded together, then written to the host cache.


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How images are decoded, and where decoded pixels are cached."""

    channels: int = 3  # 1 for greyscale, 3 for RGB.
    fast: bool = False  # Whether JPEGs are decoded no larger than needed; pixels differ slightly.
    cache_dir: pathlib.Path | None = None  # Folder of the host cache; None: no cache.


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A table with a row for each image, in a fixed order, and the images themselves."""

    # Image files as bytes or paths, or as dicts of "bytes" and "path"; or images in memory.
    records: Sequence[Any]
    positions: Int[np.ndarray, " images"]  # Index of each image's record; not all may be used.
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
    source: str | None = None  # Hash of the records, if known.
    # Region of each image that views see: left, top, right, bottom, in pixels; None: the image.
    boxes: Int[np.ndarray, "images 4"] | None = None
    # Given pairs of images that show the same object, as indices of records.
    pairs: Int[np.ndarray, "pairs 2"] | None = None
    vectors: Float[np.ndarray, "images dim"] | None = None  # Another model's embeddings, float32.

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def num_classes(self) -> int:
        """Number of distinct labels."""
        return len(np.unique(self.labels))

    def coarse_labels_of_classes(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of each class's coarse classes, at each level from the finest, from 0 on."""
        if self.coarse_labels is None:
            return ()
        _, first_rows = np.unique(self.labels, return_index=True)
        levels = coarse_levels(self.coarse_labels[first_rows])
        return tuple(tuple(np.unique(x, return_inverse=True)[1].tolist()) for x in levels)

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
        """Hash of the images' files, classes, splits and order."""
        columns = (self.file_versions, self.class_names, self.splits, self.coarse_labels)
        return hash_facts(zip(*(x.tolist() for x in columns if x is not None), strict=True))

    def name(self, i: int) -> str:
        """Returns the i-th image's name for messages."""
        return str(self.names[i])

    def path(self, i: int) -> str:
        """Returns the i-th image's path or URL; '' for images in memory and for features."""
        has_file = self.file_versions is not None and self.file_versions[i]
        return self.name(i) if has_file and self.vectors is None else ""

    def class_name(self, i: int) -> str:
        """Returns the name of the i-th image's class."""
        return str(self.class_names[i])

    def content(self, i: int) -> Any:
        """Returns the bytes of the i-th image's file, or the image in memory."""
        record = self.records[int(self.positions[i])]
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
                image = pixels.from_array(self._cached(i, channels))
            box = self._box(i, image.height, image.width)
            return image if box == (0, 0, *image.size) else image.crop(box)

    def crop(
        self,
        i: int,
        box: Sequence[int],
        side: int,
        channels: int,
        size: tuple[int, int] | None = None,
    ) -> UInt8[np.ndarray, "side side channels"]:
        """Crops a box (top, left, height, width) of the i-th image and resizes it to a square.

        If `size` (height, width) is given, the image is resized to it before the crop. Unless the
        dataset is decoded `fast`, pixels equal Pillow's crop followed by its bicubic resize.
        """
        return self._show(i, lambda *original: Frame(size or original, tuple(box)), side, channels)

    def test_view(self, i: int, view: View) -> UInt8[np.ndarray, "side side channels"]:
        """Returns the test view of the i-th image, see `hypjax.data.views`."""
        frame_of = TEST_VIEWS[view.test]
        return self._show(i, lambda *size: frame_of(*size, view), view.side, view.channels)

    def _show(
        self, i: int, frame_of: Callable[[int, int], Frame], side: int, channels: int
    ) -> UInt8[np.ndarray, "side side channels"]:
        """Shows the i-th image in the frame that `frame_of` computes from its height and width."""
        with explained(f"cannot read {self.name(i)}"):
            if self.decoded is not None:
                # Slices of a memory map read only the pixels of the box.
                array = self._cached(i, channels)
                left, top, right, bottom = self._box(i, *array.shape[:2])
                array = array[top:bottom, left:right]
                size, box = frame_of(*array.shape[:2])
                if size == array.shape[:2]:
                    top, left, height, width = box
                    region = array[top : top + height, left : left + width]
                    return pixels.resize(pixels.from_array(region), side)
                return pixels.show(pixels.from_array(array), Frame(size, box), side)
            if self.fast:
                # The frame's box is relative to the image's box, the decoder's to the file.
                left, top, right, bottom = self._box(i, *self.sizes[i].tolist())
                size = bottom - top, right - left
                y, x, height, width = frame_of(*size).box_within(size)
                box = top + y, left + x, height, width
                shown = pixels.show_fast(self.content(i), channels, box, side, self.upright)
                if shown is not None:
                    return shown
        image = self.image(i, channels)
        return pixels.show(image, frame_of(image.height, image.width), side)

    def _box(self, i: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns left, top, right and bottom of the i-th image's box, within the image."""
        if self.boxes is None:
            return 0, 0, width, height
        box = self.boxes[i].tolist()
        left, top, right, bottom = box
        left, top, right, bottom = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        if left >= right or top >= bottom:
            raise ValueError(f"its box {box} is not in the image")
        return left, top, right, bottom

    def _cached(self, i: int, channels: int) -> UInt8[np.ndarray, "height width channels"]:
        return self.decoded[int(self.positions[i])].reshape(*self.sizes[i], channels)

    def take(self, rows: Int[np.ndarray, " rows"]) -> "Dataset":
        """Returns the images in the given rows."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns = {name: np.asarray(x)[rows] for name, x in columns.items() if x is not None}
        return dataclasses.replace(self, **columns)

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
    *("file_versions", "checksums", "boxes", "vectors"),
)


class Chained(Sequence):
    """A concatenation of sequences that does not copy them."""

    def __init__(self, parts: Iterable[Sequence[Any]]) -> None:
        self._parts = list(parts)
        self._starts = [0, *np.cumsum([len(part) for part in self._parts]).tolist()]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Any:
        part = bisect.bisect_right(self._starts, i) - 1
        return self._parts[part][i - self._starts[part]]


def table_of_names(
    records: Sequence[Any],
    names: Sequence[object],
    classes: Sequence[str],
    *,
    splits: Iterable[object] = (),
    coarse_labels: Iterable[object] = (),
    file_versions: Iterable[object] | None = None,
    vectors: Float[np.ndarray, "images dim"] | None = None,
) -> Dataset:
    """Makes a table of images of unknown sizes; without `file_versions`, they are in memory."""
    optional = {"splits": split_names(splits), "coarse_labels": [*map(class_name, coarse_labels)]}
    optional = {k: np.array(x, object) if any(x) else None for k, x in optional.items()}
    versions = [""] * len(names) if file_versions is None else map(repr, file_versions)
    return Dataset(
        records=records,
        positions=np.arange(len(names)),
        labels=np.unique(classes, return_inverse=True)[1],
        sizes=np.zeros((len(names), 2), np.int32),
        names=np.array([str(name) for name in names], object),
        class_names=np.array(classes, object),
        file_versions=np.array([*versions], object),
        upright=True,
        vectors=vectors,
        **optional,
    )


def union(datasets: Sequence[Dataset]) -> Dataset:
    """Joins datasets that share their records: each image once, without labels."""
    names = ("positions", "labels", "sizes", "names", "class_names")
    columns = {name: np.concatenate([getattr(x, name) for x in datasets]) for name in names}
    columns["labels"] = np.zeros_like(columns["labels"])
    concatenated = dataclasses.replace(datasets[0], **(dict.fromkeys(_COLUMNS) | columns))
    return concatenated.take(np.unique(columns["positions"], return_index=True)[1])


def stacked(tables: Sequence[Dataset]) -> Dataset:
    """Concatenates tables of images to be embedded; classes with equal names become one."""
    if len(tables) == 1:
        return tables[0]
    if len({table.vectors is None for table in tables}) > 1:
        raise UserError("images and features cannot be embedded together; give one of them")

    def column(name: str) -> list[Any]:
        values = []
        for table in tables:
            present = getattr(table, name)
            values += [None] * len(table) if present is None else list(present)
        return values

    first_records = np.cumsum([0, *(len(table.records) for table in tables[:-1])])
    stack = table_of_names(
        Chained(table.records for table in tables),
        column("names"),
        [name or "" for name in column("class_names")],
        splits=column("splits"),
        coarse_labels=column("coarse_labels"),
        vectors=None if tables[0].vectors is None else np.array(column("vectors")),
    )
    boxes = None
    if any(table.boxes is not None for table in tables):
        full = [np.hstack([np.zeros_like(x.sizes), x.sizes[:, ::-1]]) for x in tables]
        boxes = [y if x.boxes is None else x.boxes for x, y in zip(tables, full, strict=True)]
    offsets = zip(first_records, tables, strict=True)
    return dataclasses.replace(
        stack,
        positions=np.concatenate([offset + table.positions for offset, table in offsets]),
        sizes=np.concatenate([table.sizes for table in tables]),
        file_versions=np.array(column("file_versions"), object),
        boxes=boxes and np.concatenate(boxes),
        upright=tables[0].upright,
        fast=tables[0].fast,
    )


def hash_facts(facts: Iterable[Any]) -> str:
    """Hashes values by their `repr`, which must be complete, to 32 hexadecimal digits."""
    return hashlib.sha256("".join(map(repr, facts)).encode()).hexdigest()[:32]


def decoded_as(dataset: Dataset, decoding: Decoding) -> Dataset:
    """Sets how images are decoded, and names their host cache, which `fill_cache` must fill."""
    decoded = None
    if decoding.cache_dir is not None:
        name = f"{dataset.source}-{decoding.channels}-{pixels.DECODER}"
        decoded = ArrayCache(decoding.cache_dir / name, len(dataset))
    return dataclasses.replace(dataset, fast=decoding.fast, decoded=decoded)


def fill_cache(dataset: Dataset, channels: int) -> None:
    """Decodes a dataset's images into its host cache, unless it has none or a complete one."""
    cache = dataset.decoded
    if cache is None or cache.is_complete():
        return
    uncached = dataclasses.replace(dataset, decoded=None, boxes=None)
    options = {"desc": "decoding images once", "unit": "image", "disable": None, "leave": False}
    advice = "; choose another --config.run.cache_dir, or set --config.run.cache=none"
    with (
        explained("cannot keep decoded images", advice),
        cache.filling(locked(cache.folder, "decoding images")) as done,
        tqdm.tqdm(total=len(dataset), initial=done, **options) as bar,
        concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool,
    ):
        for first in range(done, len(dataset), _CHUNK):
            rows = range(first, min(first + _CHUNK, len(dataset)))
            images = [*pool.map(lambda i: pixels.array(uncached.image(i, channels)), rows)]
            cache.append(images)
            bar.update(len(images))
