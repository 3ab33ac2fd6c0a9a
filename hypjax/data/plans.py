"""Plans: a batch's images and their crops, as a pure function of (seed, step).

Worker processes, or the device, only execute plans, so that pixels do not depend on the number of
workers or on resuming. `TuplePlans` also depend on the tuples mined for the epoch.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, PyTree, Shaped

from hypjax.data.views import TrainView
from hypjax.errors import counted
from hypjax.types import IMAGES, Batch

# Independent streams of a run's random numbers.
_CLASSES, _IMAGES, _CROPS, _PAIRS, _POOL, CAPTIONS, _BOXES = range(7)
_NO_TUPLES = np.zeros((0, 0), np.int32)


def padded_rows(
    values: Shaped[np.ndarray, "batch ..."], rows: range, padding: object
) -> Shaped[np.ndarray, "rows ..."]:
    """Returns the given rows of an array, with padding for rows beyond its end."""
    padded = np.full((len(rows), *values.shape[1:]), padding, values.dtype)
    present = values[rows.start : rows.stop]
    padded[: len(present)] = present
    return padded


class Plan(NamedTuple):
    """The images of a step, and how each is cropped and mirrored."""

    ids: Int[np.ndarray, " batch"]  # Indices in the training set.
    labels: Int[np.ndarray, " batch"]  # Training classes.
    sizes: Int[np.ndarray, "batch 2"]  # Heights and widths to resize to before the crop.
    boxes: Int[np.ndarray, "batch 4"]  # Top, left, height and width, in the resized image.
    flips: Bool[np.ndarray, " batch"]  # Whether to mirror each image left to right.

    def batch(self, images: PyTree, rows: range) -> Batch:
        """Returns the batch, with these rows of what the tower of images takes."""
        flips = padded_rows(self.flips, rows, False)
        return Batch({IMAGES: images}, self.labels, self.ids, flips)


@dataclasses.dataclass(frozen=True, eq=False)
class Plans(abc.ABC):
    """Computes the plan of any step of a run."""

    labels: Int[np.ndarray, " images"]  # Class of each training image, from 0 without gaps.
    sizes: Int[np.ndarray, "images 2"]  # Heights and widths of the images before the crop.
    batch_size: int
    crop: TrainView  # Distribution of crops and flips.
    seed: int
    epoch: ClassVar[str] = "an epoch"

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches in an epoch."""
        return len(self.labels) // self.batch_size

    def describe(self) -> str:
        """Says how many batches an epoch has."""
        return f"batches in {self.epoch}: {self.batches_per_epoch}"

    @abc.abstractmethod
    def choose_images(self, step: int) -> Int[np.ndarray, " batch"]:
        """Returns the indices of a step's images."""

    def __call__(self, step: int) -> Plan:
        """Returns the plan of a step, counted from 0."""
        ids = self.choose_images(step)
        sizes, labels = self.sizes[ids], self.labels[ids].astype(np.int32)
        rng = self.rng(_CROPS, step)
        boxes = self.crop.boxes(rng, sizes)
        flips = rng.random(len(ids)) < self.crop.flip
        return Plan(ids.astype(np.int32), labels, sizes, boxes, flips)

    def rng(self, stream: int, index: int) -> np.random.Generator:
        """Returns the random generator of a stream for a step or an epoch."""
        return np.random.default_rng((self.seed, stream, index))


@dataclasses.dataclass(frozen=True, eq=False)
class ShuffledPlans(Plans):
    """Plain shuffling: an epoch splits a permutation of all images into full batches."""

    def choose_images(self, step: int) -> Int[np.ndarray, " batch"]:
        """Returns the step's slice of the epoch's permutation of all images."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        permutation = self.rng(_IMAGES, epoch).permutation(len(self.labels))
        return permutation[batch * self.batch_size : (batch + 1) * self.batch_size]


@dataclasses.dataclass(frozen=True, eq=False)
class BoxPlans(Plans):
    """Images, then a random box of each (HyCoCLIP): row i + n of 2n is of image i.

    Of an image without boxes, that row is the image again.
    """

    owners: Int[np.ndarray, " images"]  # The row of each box's image; of an image, its own.

    @functools.cached_property
    def _boxes(self) -> dict[int, Int[np.ndarray, " _"]]:
        """Rows of each image's boxes, or the image itself, by the image's row."""
        is_image = self.owners == np.arange(len(self.owners))
        boxes = {row: [row] for row in np.flatnonzero(is_image).tolist()}
        for row in np.flatnonzero(~is_image).tolist():
            boxes[int(self.owners[row])].append(row)
        return {row: np.array(rows[1:] or rows) for row, rows in boxes.items()}

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches of the images."""
        return len(self._boxes) // (self.batch_size // 2)

    def choose_images(self, step: int) -> Int[np.ndarray, " batch"]:
        """Returns the step's slice of the epoch's permutation of the images, and their boxes."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        count = self.batch_size // 2
        images = self.rng(_IMAGES, epoch).permutation([*self._boxes])
        images, rng = images[batch * count : (batch + 1) * count], self.rng(_BOXES, step)
        return np.concatenate([images, [rng.choice(self._boxes[row]) for row in images.tolist()]])


@dataclasses.dataclass(frozen=True, eq=False)
class ClassPlans(Plans):
    """Batches of several classes, with `samples_per_class` images of each.

    Images of one class are distinct if the class has enough images. They are adjacent: losses rely
    on this order and cannot check it, because labels are traced in a compiled step.
    """

    samples_per_class: int
    repeats: bool = False  # Whether images of a class are drawn with replacement (HIER).

    @property
    def classes_per_batch(self) -> int:
        """Number of classes in a batch."""
        return self.batch_size // self.samples_per_class

    @functools.cached_property
    def images_of_class(self) -> list[Int[np.ndarray, " class_images"]]:
        """For each class, the indices of its images."""
        ids_by_class = np.argsort(self.labels, kind="stable")
        return np.split(ids_by_class, np.cumsum(np.bincount(self.labels))[:-1])

    def describe(self) -> str:
        """Also says whether batches repeat images."""
        sizes = np.bincount(self.labels)
        text, few = super().describe(), int(np.sum(sizes < self.samples_per_class))
        if few:
            fewer = f"fewer than {self.samples_per_class} images (the smallest {sizes.min()})"
            text += f"; {counted(few, 'class')} with {fewer}, which a batch repeats"
        return text

    @abc.abstractmethod
    def choose_classes(self, step: int) -> Int[np.ndarray, " classes"]:
        """Returns the step's classes, which are distinct."""

    def choose_images(self, step: int) -> Int[np.ndarray, " batch"]:
        """Draws the indices of the step's images, class by class."""
        rng = self.rng(_IMAGES, step)
        samples = []
        for label in self.choose_classes(step):
            images = self.images_of_class[label]
            replace = self.repeats or len(images) < self.samples_per_class
            samples.append(rng.choice(images, self.samples_per_class, replace=replace))
        return np.concatenate(samples)


class EpochClassPlans(ClassPlans):
    """Hyp-ViT's sampling: an epoch splits a permutation of all classes into full batches."""

    epoch = "a pass over all classes"

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches in a permutation of all classes."""
        return len(self.images_of_class) // self.classes_per_batch

    def choose_classes(self, step: int) -> Int[np.ndarray, " classes"]:
        """Returns the step's slice of the epoch's permutation of all classes."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        permutation = self.rng(_CLASSES, epoch).permutation(len(self.images_of_class))
        return permutation[batch * self.classes_per_batch : (batch + 1) * self.classes_per_batch]


class DrawnClassPlans(ClassPlans):
    """Classes drawn independently for each batch (HIER; IRT on SOP and In-Shop)."""

    def choose_classes(self, step: int) -> Int[np.ndarray, " classes"]:
        """Draws distinct classes uniformly at random."""
        rng = self.rng(_CLASSES, step)
        return rng.choice(len(self.images_of_class), self.classes_per_batch, replace=False)


@dataclasses.dataclass(frozen=True, eq=False)
class CoarsePairPlans(ClassPlans):
    """HAPPIER's sampling: half of a batch's classes from each of two coarse classes.

    An epoch has five batches for each pair of coarse classes, in random order. All batches have the
    same size: if a coarse class has too few classes, the other coarse class fills the batch, and
    classes with too few images repeat images. The released code makes these batches smaller.
    """

    # The coarse class of each class, from 0 without gaps.
    coarse: Int[np.ndarray, " classes"] = dataclasses.field(kw_only=True)

    @functools.cached_property
    def _coarse_pairs(self) -> Int[np.ndarray, "batches 2"]:
        return np.array([*itertools.combinations(range(self.coarse.max() + 1), 2)] * 5)

    batches_per_epoch = property(lambda self: len(self._coarse_pairs))

    def choose_classes(self, step: int) -> Int[np.ndarray, " classes"]:
        """Draws classes of the step's pair of coarse classes uniformly at random."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        pair = self.rng(_PAIRS, epoch).permutation(self._coarse_pairs)[batch]
        rng, count = self.rng(_CLASSES, step), self.classes_per_batch
        first, second = (rng.permutation(np.flatnonzero(self.coarse == label)) for label in pair)
        # Half of the batch, unless one coarse class has too few classes.
        count_of_first = np.clip(count // 2, count - len(second), len(first))
        return np.concatenate([first[:count_of_first], second[: count - count_of_first]])


CLASS_PLANS: Mapping[str, Callable[..., ClassPlans]] = {
    "epoch_classes": EpochClassPlans,
    "drawn_classes": DrawnClassPlans,
}


@dataclasses.dataclass(frozen=True, eq=False)
class TuplePlans(Plans):
    """Tuples of adjacent images: anchor, positive, mined negatives (Radenović et al., 2019)."""

    pairs: Int[np.ndarray, "pairs 2"]  # Images that show the same object: anchor and positive.
    tuples: int  # Number of random pairs, at most all, for which an epoch mines negatives.
    negatives: int  # Number of negatives in a tuple.
    pool_size: int  # Images from which an epoch's negatives are mined.
    # The epoch's tuples; empty until they are mined.
    table: Int[np.ndarray, "tuples size"] = dataclasses.field(default_factory=lambda: _NO_TUPLES)

    @property
    def tuple_size(self) -> int:
        """Number of images in a tuple."""
        return 2 + self.negatives

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches of an epoch's tuples."""
        return self.tuples // (self.batch_size // self.tuple_size)

    def candidates(
        self, epoch: int
    ) -> tuple[Int[np.ndarray, "tuples 2"], Int[np.ndarray, " pool"]]:
        """Draws an epoch's pairs of anchor and positive, and its pool of possible negatives."""
        pool = self.rng(_POOL, epoch).permutation(len(self.labels))[: self.pool_size]
        return self.rng(_PAIRS, epoch).permutation(self.pairs)[: self.tuples], pool

    def choose_images(self, step: int) -> Int[np.ndarray, " batch"]:
        """Returns the indices of the step's images, tuple by tuple."""
        tuples_per_batch = self.batch_size // self.tuple_size
        first = (step % self.batches_per_epoch) * tuples_per_batch
        return self.table[first : first + tuples_per_batch].reshape(-1)
