"""Datasets on disk: records by position, beside what plans need to know of them."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8
from ml_collections import ConfigDict
from PIL import Image

from hypjax.data import fast_jpeg, pixels
from hypjax.data.host_cache import DecodedImages
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.types import View


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Some records of one split, in a fixed order.

    Attributes:
        records: Random access to the split's records; `image` holds the encoded bytes.
        positions: Which records these are.
        labels: Class of each of them.
        sizes: Height and width of each of them, in pixels.
        names: What messages call the records; None: by position.
        superlabels: Group that the class of each belongs to, where classes are grouped.
        upright: Whether images are turned as EXIF says, as a viewer does.
        fast: Whether JPEGs are decoded no larger than needed; pixels then differ a little.
        decoded: The records' pixels, where they are kept decoded.
    """

    records: Sequence[Mapping[str, Any]]
    positions: Int[np.ndarray, " images"]
    labels: Int[np.ndarray, " images"]
    sizes: Int[np.ndarray, "images 2"]
    names: Sequence[str] | None = None
    superlabels: Int[np.ndarray, " images"] | None = None
    upright: bool = False
    fast: bool = False
    decoded: DecodedImages | None = None

    def __len__(self) -> int:
        """Number of images."""
        return len(self.positions)

    @property
    def num_classes(self) -> int:
        """Number of distinct labels."""
        return len(np.unique(self.labels))

    def describe(self) -> str:
        """How much there is, in words."""
        told = f"{self.num_classes} classes"
        if self.superlabels is not None:
            told += f" in {len(np.unique(self.superlabels))} groups"
        return f"{told}, {len(self)} images"

    def name(self, i: int) -> str:
        """What to call the i-th image in a message."""
        record = int(self.positions[i])
        return f"record {record}" if self.names is None else str(self.names[record])

    def image(self, i: int, channels: int) -> Image.Image:
        """The i-th image, whole.

        Raises:
            UserError: It cannot be read; the message names it.
        """
        with self._naming(i):
            if self.decoded is not None:
                return pixels.from_array(self.decoded[int(self.positions[i])])
            return self._decode(i, self._encoded(i), channels)

    def crop(
        self, i: int, box: Int[np.ndarray, "4"], side: int, channels: int
    ) -> UInt8[np.ndarray, "side side channels"]:
        """A box (top, left, height, width) of the i-th image, resized to a square.

        The same pixels as Pillow's crop followed by its bicubic resize, unless `fast`.

        Raises:
            UserError: The image cannot be read; the message names it.
        """
        with self._naming(i):
            if self.decoded is not None:
                top, left, height, width = box
                whole = self.decoded[int(self.positions[i])]
                part = pixels.from_array(whole[top : top + height, left : left + width])
            else:
                encoded = self._encoded(i)
                if self.fast:
                    view = fast_jpeg.view(encoded, channels, tuple(box), side, self.upright)
                    if view is not None:
                        return view
                part = pixels.crop(self._decode(i, encoded, channels), box)
            return pixels.resize(part, side)

    def central_view(self, i: int, view: View) -> UInt8[np.ndarray, "side side channels"]:
        """The test view of the i-th image: its shorter side resized, then a square of its centre.

        Raises:
            UserError: The image cannot be read; the message names it.
        """
        with self._naming(i):
            side, shorter_side, channels = view
            if self.decoded is not None:
                return pixels.central_view(self.image(i, channels), shorter_side, side)
            encoded = self._encoded(i)
            if self.fast:
                box = pixels.central_box(tuple(map(int, self.sizes[i])), shorter_side, side)
                cut = fast_jpeg.view(encoded, channels, box, side, self.upright)
                if cut is not None:
                    return cut
            return pixels.central_view(self._decode(i, encoded, channels), shorter_side, side)

    def _decode(self, i: int, encoded: bytes, channels: int) -> Image.Image:
        image = pixels.decode(encoded, channels, upright=self.upright)
        height, width = (int(length) for length in self.sizes[i])
        if height and image.size != (width, height):
            raise ValueError(
                f"it has {image.width}×{image.height} pixels, and had {width}×{height} before"
            )
        return image

    def _encoded(self, i: int) -> bytes:
        return self.records[int(self.positions[i])]["image"]

    @contextlib.contextmanager
    def _naming(self, i: int) -> Iterator[None]:
        """Tells which image it is that cannot be read."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Decoders of damaged files raise whatever they meet.
            raise UserError(f"cannot read {self.name(i)} ({pixels.reason(error)})") from error

    def take(self, chosen: Int[np.ndarray, " chosen"]) -> "Dataset":
        """Some of the images, by their place."""
        return dataclasses.replace(
            self,
            positions=self.positions[chosen],
            labels=self.labels[chosen],
            sizes=self.sizes[chosen],
            superlabels=None if self.superlabels is None else self.superlabels[chosen],
        )

    def renumbered(self) -> "Dataset":
        """The same with classes numbered from 0 without gaps."""
        return dataclasses.replace(self, labels=np.unique(self.labels, return_inverse=True)[1])

    def of_classes(self, classes: Int[np.ndarray, " classes"]) -> "Dataset":
        """The images of some classes, which are numbered anew from 0."""
        return self.take(np.flatnonzero(np.isin(self.labels, classes))).renumbered()


class Splits(NamedTuple):
    """The parts of a benchmark.

    Attributes:
        train: To learn from.
        validation: Training classes held out to choose by; None where none are.
        test: To report, and never to choose by.
        gallery: What the test images search; None: one another.
        fingerprint: Differs where any image of the dataset does.
        notes: What every result computed from it has to say.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset
    gallery: Dataset | None
    fingerprint: str
    notes: tuple[str, ...] = ()


def with_cache(dataset: Dataset, key: str, config: ConfigDict) -> Dataset:
    """The same, reading decoded images, where `run.cache` is host; they are yet to be decoded.

    Args:
        dataset: All images of a source, in its order.
        key: Names the cache's file; it differs where any image does.
        config: The run's whole configuration.
    """
    if config.run.cache != "host":
        return dataset
    folder = pathlib.Path(config.run.cache_dir or cache_folder() / "decoded").expanduser()
    channels = config.data.channels
    file = f"{key}-{channels}-{pixels.DECODER}.bin"
    decoded = DecodedImages(folder / file, dataset.sizes, channels)
    return dataclasses.replace(dataset, decoded=decoded)


def fill_cache(dataset: Dataset, channels: int) -> None:
    """Decodes the images of what `with_cache` returned, unless that was done before.

    Raises:
        UserError: There is no space for them, or an image cannot be read.
    """
    if dataset.decoded is not None:
        files = dataclasses.replace(dataset, decoded=None)
        dataset.decoded.fill(lambda i: pixels.array(files.image(i, channels)))


def hold_out(
    dataset: Dataset, amount: float, seed: int, name: str
) -> tuple[Dataset, Dataset | None]:
    """Takes some classes, chosen at random, out of a dataset.

    Args:
        dataset: Where to take them from.
        amount: How many classes, from 1 on; below 1, their share, but two at least. 0: none.
        seed: Of the choice. It is not a run's, so that runs with other seeds are compared on the
            same classes.
        name: Of the part that is taken out: test or validation.

    Returns:
        The rest, and what was taken out.

    Raises:
        UserError: Fewer than two classes would be left.
    """
    if amount == 0:
        return dataset.renumbered(), None
    classes = np.unique(dataset.labels)
    count = int(amount) if amount >= 1 else max(2, round(amount * len(classes)))
    if count > len(classes) - 2:
        least = "two at least, so " if amount < 1 else ""
        raise UserError(
            f"config.data.{name}_classes is {amount:g}, {least}{count} of {len(classes)} classes, "
            "but two must remain to train on; "
            f"set --config.data.{name}_classes={max(len(classes) - 2, 0)} or less"
        )
    shuffled = np.random.default_rng(seed).permutation(classes)
    return dataset.of_classes(shuffled[count:]), dataset.of_classes(shuffled[:count])


def check_classes(name: str, splits: Splits) -> None:
    """Refuses parts that cannot be trained on or searched, and tells of classes with one image.

    Args:
        name: What messages call the dataset.
        splits: Its parts.

    Raises:
        UserError: A part has fewer than two classes, or nothing to find.
    """
    train, validation, test, gallery, *_ = splits
    for part, images in (("train", train), ("validation", validation), ("test", test)):
        if images is not None and images.num_classes < 2:
            raise UserError(
                f"the {part} part of {name} has {images.num_classes} class; it needs two or more"
            )
    for part, queries, items in (("validation", validation, None), ("test", test, gallery)):
        if queries is not None and not _matches(queries, items):
            raise UserError(
                f"no image in the {part} part of {name} has another of its class to find"
            )
    single = int(np.sum(np.bincount(train.labels) == 1))
    if single:
        console.warn(
            f"{single} of {train.num_classes} training classes have one image, "
            "which is compared with itself under another crop"
        )


def _matches(queries: Dataset, gallery: Dataset | None) -> bool:
    """Whether any query has an item of its class to find."""
    if gallery is None:
        return np.bincount(queries.labels).max() > 1
    return bool(np.isin(queries.labels, gallery.labels).any())
