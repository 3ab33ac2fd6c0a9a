"""Datasets in memory: records read by position, with the labels and sizes that plans need."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from hypjax.data import fast_jpeg, pixels
from hypjax.data.host_cache import DamagedCacheError, DecodedImages
from hypjax.data.views import TEST_VIEWS, Frame
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.types import View

_FEW_CLASSES = 8  # Of fewer training classes, a share for validation holds out none.


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How images are decoded, and where decoded pixels are cached.

    Attributes:
        channels: 1 for greyscale, 3 for RGB.
        fast: Whether JPEGs are decoded no larger than needed; pixels then differ slightly.
        cache_dir: Folder of the host cache; None without that cache.
    """

    channels: int
    fast: bool
    cache_dir: pathlib.Path | None


@dataclasses.dataclass(frozen=True)
class HeldOutClasses:
    """Classes to hold out of a dataset's training classes; see `hold_out`.

    Attributes:
        test: Number or share of test classes, if the dataset has no test part.
        validation: Number or share of validation classes, if it has no validation part.
        seed: Seed of the choice.
    """

    test: float
    validation: float
    seed: int


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Images of one split in a fixed order.

    Attributes:
        records: Random access to all records of the split; `image` holds the encoded bytes.
        positions: Position of each image among the records.
        labels: Class of each image.
        sizes: Height and width of each image, in pixels.
        names: Name of each record for messages; by position if None.
        superlabels: Group of each image's class, if classes are grouped.
        class_names: Name of each record's class; None if classes have none.
        group_names: Names of the groups, by number, if classes are grouped.
        upright: Whether images are rotated as EXIF says, as viewers do.
        fast: Whether JPEGs are decoded no larger than needed; pixels then differ slightly.
        decoded: Decoded pixels of all records, if they are cached.
    """

    records: Sequence[Mapping[str, Any]]
    positions: Int[np.ndarray, " images"]
    labels: Int[np.ndarray, " images"]
    sizes: Int[np.ndarray, "images 2"]
    names: Sequence[str] | None = None
    superlabels: Int[np.ndarray, " images"] | None = None
    class_names: Sequence[str] | None = None
    group_names: Sequence[str] | None = None
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
        """Returns the numbers of classes and images, in words."""
        text = f"{self.num_classes} classes"
        if self.superlabels is not None:
            text += f" in {len(np.unique(self.superlabels))} groups"
        return f"{text}, {len(self)} images"

    def name(self, i: int) -> str:
        """Returns the i-th image's name for messages."""
        record = int(self.positions[i])
        return f"record {record}" if self.names is None else str(self.names[record])

    def class_name(self, i: int) -> str:
        """Returns the name of the i-th image's class."""
        if self.class_names is None:
            return f"class {self.labels[i]}"
        return str(self.class_names[int(self.positions[i])])

    def image(self, i: int, channels: int) -> Image.Image:
        """Returns the whole i-th image.

        Raises:
            UserError: If the image cannot be read; the message names it.
        """
        with self._naming_errors(i):
            if (cached := self._cached(i)) is not None:
                return pixels.from_array(cached)
            return self._decode(i, self._encoded(i), channels)

    def crop(
        self,
        i: int,
        box: Sequence[int],
        side: int,
        channels: int,
        size: tuple[int, int] | None = None,
    ) -> UInt8[np.ndarray, "side side channels"]:
        """Returns a box of the i-th image, resized to a square.

        Unless `fast`, pixels are those of Pillow's crop followed by its bicubic resize.

        Args:
            i: Index of the image.
            box: Top, left, height and width.
            side: Side of the square.
            channels: 1 or 3.
            size: Height and width to which the image is resized before it is cropped; None keeps
                its own.

        Raises:
            UserError: If the image cannot be read; the message names it.
        """
        return self._show(i, lambda *own: Frame(size or own, tuple(box)), side, channels)

    def test_view(self, i: int, view: View) -> UInt8[np.ndarray, "side side channels"]:
        """Returns the test view of the i-th image, see `hypjax.data.views`.

        Raises:
            UserError: If the image cannot be read; the message names it.
        """
        frame = TEST_VIEWS[view.test]
        return self._show(i, lambda *own: frame(*own, view), view.side, view.channels)

    def _show(
        self, i: int, frame: Callable[[int, int], Frame], side: int, channels: int
    ) -> UInt8[np.ndarray, "side side channels"]:
        """Returns the part of the i-th image that a function of its height and width selects."""
        with self._naming_errors(i):
            if (whole := self._cached(i)) is not None:
                own = whole.shape[:2]
                size, box = frame(*own)
                if size == own:
                    top, left, height, width = box
                    region = whole[top : top + height, left : left + width]
                    return pixels.resize(pixels.from_array(region), side)
                return pixels.show(pixels.from_array(whole), Frame(size, box), side)
            encoded = self._encoded(i)
            if self.fast:
                own = tuple(map(int, self.sizes[i]))
                box = frame(*own).box_within(own)
                fast = fast_jpeg.view(encoded, channels, box, side, self.upright)
                if fast is not None:
                    return fast
            image = self._decode(i, encoded, channels)
            return pixels.show(image, frame(image.height, image.width), side)

    def _cached(self, i: int) -> UInt8[np.ndarray, "height width channels"] | None:
        """Returns the decoded pixels of the i-th image, if they are cached and undamaged."""
        if self.decoded is None:
            return None
        try:
            return self.decoded[int(self.positions[i])]
        except DamagedCacheError:
            return None

    def _decode(self, i: int, encoded: bytes, channels: int) -> Image.Image:
        image = pixels.decode(encoded, channels, upright=self.upright)
        height, width = (int(length) for length in self.sizes[i])
        if height and image.size != (width, height):
            raise ValueError(
                f"it is {image.width}×{image.height} pixels, but was {width}×{height} before"
            )
        return image

    def _encoded(self, i: int) -> bytes:
        return self.records[int(self.positions[i])]["image"]

    @contextlib.contextmanager
    def _naming_errors(self, i: int) -> Iterator[None]:
        """Turns errors of reading the i-th image into a message that names it."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Decoders raise almost anything on damaged files.
            raise UserError(f"cannot read {self.name(i)} ({pixels.reason(error)})") from error

    def take(self, chosen: Int[np.ndarray, " chosen"]) -> "Dataset":
        """Returns the images at the given indices."""
        return dataclasses.replace(
            self,
            positions=self.positions[chosen],
            labels=self.labels[chosen],
            sizes=self.sizes[chosen],
            superlabels=None if self.superlabels is None else self.superlabels[chosen],
        )

    def renumbered(self) -> "Dataset":
        """Returns the same images with classes renumbered from 0 without gaps."""
        return dataclasses.replace(self, labels=np.unique(self.labels, return_inverse=True)[1])

    def with_classes(self, classes: Int[np.ndarray, " classes"]) -> "Dataset":
        """Returns the images of the given classes, which are renumbered from 0."""
        return self.take(np.flatnonzero(np.isin(self.labels, classes))).renumbered()


class Splits(NamedTuple):
    """The parts of a dataset.

    Attributes:
        train: Images to learn from.
        validation: Images of held-out training classes, for choosing a model; None if no classes
            are held out.
        test: Images to report on, never to choose by.
        gallery: Images that the test images search; if None, they search each other.
        fingerprint: Hash that differs if any image of the dataset differs.
        notes: Remarks that accompany every result computed from the dataset.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset
    gallery: Dataset | None
    fingerprint: str
    notes: tuple[str, ...] = ()


def with_host_cache(dataset: Dataset, key: str, decoding: Decoding) -> Dataset:
    """Returns a dataset that reads decoded images from the host cache, if there is one.

    `fill_cache` must then decode the images before they are read.

    Args:
        dataset: All images of a source, in its order.
        key: Name of the cache's file; differs if any image differs.
        decoding: Names the cache's folder.
    """
    if decoding.cache_dir is None:
        return dataset
    file = f"{key}-{decoding.channels}-{pixels.DECODER}-checked.bin"
    decoded = DecodedImages(decoding.cache_dir / file, dataset.sizes, decoding.channels)
    return dataclasses.replace(dataset, decoded=decoded)


def fill_cache(dataset: Dataset, channels: int) -> None:
    """Decodes a dataset's images into its host cache, if it has one that is not filled yet.

    Raises:
        UserError: If there is not enough space, or an image cannot be read.
    """
    if dataset.decoded is not None:
        files = dataclasses.replace(dataset, decoded=None)
        dataset.decoded.fill(lambda i: pixels.array(files.image(i, channels)))


def hold_out(
    dataset: Dataset, amount: float, seed: int, name: str
) -> tuple[Dataset, Dataset | None]:
    """Holds out random classes of a dataset.

    Args:
        dataset: The dataset.
        amount: Number of classes; below 1, their share, but at least two classes; 0 for none.
        seed: Seed of the choice. It is not the run's seed, so that runs with different seeds are
            compared on the same classes.
        name: Name of the held-out part, test or validation, for messages.

    Returns:
        The remaining images and the held-out ones, None if there are none.

    Raises:
        UserError: If fewer than two classes would remain.
    """
    if amount == 0:
        return dataset.renumbered(), None
    classes = np.unique(dataset.labels)
    count = int(amount) if amount >= 1 else max(2, round(amount * len(classes)))
    if count > len(classes) - 2:
        most = max(len(classes) - 2, 0)
        raise UserError(
            f"config.data.{name}_classes is {amount:g}, {count} of {len(classes)} classes, but two "
            f"must remain to train on; set --config.data.{name}_classes={most}"
            + (" or less" if most else "")
        )
    shuffled = np.random.default_rng(seed).permutation(classes)
    return dataset.with_classes(shuffled[count:]), dataset.with_classes(shuffled[:count])


def hold_out_validation(
    dataset: Dataset, held_out: HeldOutClasses
) -> tuple[Dataset, Dataset | None]:
    """Holds out validation classes; a share of few classes holds out none.

    Args:
        dataset: Training images.
        held_out: Classes to hold out.

    Returns:
        The remaining images and the held-out ones, None if there are none.

    Raises:
        UserError: If a number of classes would leave fewer than two.
    """
    amount, classes = held_out.validation, dataset.num_classes
    if 0 < amount < 1 and classes < _FEW_CLASSES:
        console.say(f"no class is held out for validation: there are only {classes} to train on")
        amount = 0
    return hold_out(dataset, amount, held_out.seed, "validation")


def check_classes(name: str, splits: Splits) -> None:
    """Checks that parts can be trained on and searched, and warns of classes with one image.

    Args:
        name: Name of the dataset for messages.
        splits: Its parts.

    Raises:
        UserError: If a part has fewer than two classes, or no query has an image to find.
    """
    train, validation, test, gallery, *_ = splits
    for part, images in (("train", train), ("validation", validation), ("test", test)):
        if images is not None and images.num_classes < 2:
            raise UserError(
                f"the {part} part of {name} has {images.num_classes} class; it needs two or more"
            )
    for part, queries, items in (("validation", validation, None), ("test", test, gallery)):
        if queries is not None and not _any_match(queries, items):
            raise UserError(
                f"no image in the {part} part of {name} has another image of its class to find"
            )
    single = int(np.sum(np.bincount(train.labels) == 1))
    if single:
        console.warn(
            f"{single} of {train.num_classes} training classes have one image, "
            "which is compared with itself"
        )


def _any_match(queries: Dataset, gallery: Dataset | None) -> bool:
    """Whether any query has an image of its class to find."""
    if gallery is None:
        return np.bincount(queries.labels).max() > 1
    return bool(np.isin(queries.labels, gallery.labels).any())
