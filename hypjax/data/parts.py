"""The parts of a dataset: training, validation and test images, and the searches to be scored."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from hypjax.data.dataset import Dataset, stacked
from hypjax.errors import UserError, counted
from hypjax.system import console
from hypjax.types import GroundTruth

_FEW_CLASSES = 8  # With fewer training classes, a share for validation holds out none.
_TOO_FEW_CLASSES = 5  # With fewer, what the head learns rarely transfers to new classes.
_LEAST = 4  # Images of a class that is split: two to train on, and two that can find each other.
_LEAST_VALIDATED = 8  # Training images of a class from which some are held out to validate.
_HELD_OUT = 0.25  # Share of a class's images to test on.
SAME_CLASSES = "tested on other images of the classes that were trained on (data.split=images)"
Images = TypeVar("Images")
OwnRows = Sequence[Sequence[int]]  # Rows of a gallery with each query's file; () if unknown.
_Halves = tuple[Dataset, Dataset]  # The remaining and the held-out images.


@dataclasses.dataclass(frozen=True)
class HeldOutClasses:
    """How many training classes to hold out, as numbers or shares."""

    test: float = 0  # If the dataset has no test part.
    validation: float = 0  # If it has no validation part.
    seed: int = 0
    by_image: bool = False  # Hold out images of all classes instead.


class Task(NamedTuple, Generic[Images]):
    """A search among datasets or embeddings that is to be scored."""

    queries: Images
    gallery: Images | None = None  # If None, the queries search each other.
    ground_truth: GroundTruth | None = None  # If None, a query should find the images of its class.
    own_rows: OwnRows = ()  # Gallery rows with each query's own file, which it does not find.

    @property
    def num_items(self) -> int:
        """Number of images that a query can find."""
        if self.gallery is None:
            return len(self.queries) - 1
        return len(self.gallery) - max(map(len, self.own_rows), default=0)


class Splits(NamedTuple):
    """The parts of a dataset."""

    train: Dataset | None  # None if models can only be scored.
    validation: Dataset | None  # Held-out training classes or images, if any, to choose a model.
    test: Dataset  # Images to report on, never to choose by.
    gallery: Dataset | None  # What the test images search, if not each other.
    fingerprint: str  # Hash that differs if any image of the dataset differs.
    notes: tuple[str, ...] = ()  # Remarks that accompany every result computed from the dataset.
    ground_truth: GroundTruth | None = None  # What each test image should find, if not its class.
    name: str = ""  # Under which scores by ground truth are listed.
    benchmarks: Sequence["Splits"] = ()  # Further datasets with ground truth.
    own_rows: OwnRows = ()  # See `Task`.
    repeats: tuple[str, ...] = ()  # Remarks on images that occur more than once.

    def training_images(self) -> Dataset:
        """The images to learn from; raises UserError if there are none."""
        if self.train is None:
            raise UserError(
                f"{self.name} has no training images; use --mode=evaluate, or name another dataset "
                "in data.name and this one in eval.benchmarks"
            )
        return self.train

    def images(self, *, scored: bool = False) -> Dataset:
        """All images, or only the test's (`scored`), without classes if they have ground truth."""
        parts = {"test": self.test}
        if self.gallery is not None:
            parts = {"query": self.test, "gallery": self.gallery}
        if not scored:
            parts = {"train": self.train, "validation": self.validation, **parts}
        tables = []
        for name, part in parts.items():
            if part is None:
                continue
            if self.ground_truth is not None and part.num_classes == 1:
                part = dataclasses.replace(part, class_names=np.full(len(part), "", object))
            versions = [f"{self.fingerprint} {name} {i}" for i in part.positions]
            versions, names = np.array(versions, object), np.full(len(part), name, object)
            tables.append(dataclasses.replace(part, file_versions=versions, splits=names))
        return stacked(tables)

    @property
    def task(self) -> Task:
        """The search of the test images."""
        return Task(self.test, self.gallery, self.ground_truth, self.own_rows)

    @property
    def tasks(self) -> dict[str, Task]:
        """All searches to report on, by the dataset's name."""
        return {splits.name: splits.task for splits in (self, *self.benchmarks)}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the images of this dataset and of its benchmarks."""
        further = {f"images of {splits.name}": splits.fingerprint for splits in self.benchmarks}
        return {"images": self.fingerprint, **further}


def divide(
    where: str, parts: Mapping[str, Dataset], held_out: HeldOutClasses
) -> tuple[Dataset | None, Dataset | None, Dataset, Dataset | None]:
    """Returns training, validation and test images and the gallery, as `Splits` holds them.

    Without a test or validation part, classes or images are held out of `train`.
    """
    train, validation = parts.get("train"), parts.get("validation")
    test, gallery = parts.get("test"), None
    if {"query", "gallery"} <= parts.keys():
        test, gallery = parts["query"], parts["gallery"]
    if test is None:
        if held_out.by_image:
            return *_split_images(train, held_out), gallery
        train, test = _hold_out_test(where, train, held_out)
    elif held_out.by_image:
        raise UserError(f"{where} has splits already; leave out --config.data.split=images")
    if train is not None:
        train, amount = train.renumbered(), held_out.validation
        if validation is None and 0 < amount < 1 and train.num_classes < _FEW_CLASSES:
            console.say(
                f"no class is held out for validation: there are only {train.num_classes} to train "
                "on; to validate on other images of them, set --config.data.split=images"
            )
        elif validation is None and amount:
            train, validation = _hold_out(train, amount, held_out.seed, "validation")
    return train, validation, test, gallery


def _hold_out_test(where: str, images: Dataset, held_out: HeldOutClasses) -> _Halves:
    """Holds out test classes, and warns if few remain."""
    if images.num_classes < 4 or not held_out.test:
        only = f" ({images.class_name(0)})" if images.num_classes == 1 else ""
        raise UserError(
            f"{where} has {counted(images.num_classes, 'class')}{only} and no test images; with "
            "four or more, some can be held out (--config.data.test_classes=0.25); with fewer, "
            "test on other images of the same classes (--config.data.split=images)"
        )
    train, test = _hold_out(images, held_out.test, held_out.seed, "test")
    if train.num_classes < _TOO_FEW_CLASSES:
        console.warn(
            f"{train.num_classes} training classes are too few: the model may end below the "
            "untrained one; add classes, or set --config.data.split=images"
        )
    return train, test


def _hold_out(images: Dataset, amount: float, seed: int, part: str) -> _Halves:
    """Holds out a number of random classes or, below 1, a share of them, but at least two."""
    # The seed is not the run's: runs with different seeds are compared on the same classes.
    classes = np.unique(images.labels)
    count = int(amount) if amount >= 1 else max(2, round(amount * len(classes)))
    if count > len(classes) - 2:
        raise UserError(
            f"config.data.{part}_classes is {amount:g}, {count} of {len(classes)} classes, but two "
            "must remain to train on; lower it, or add classes"
        )
    shuffled = np.random.default_rng(seed).permutation(classes)
    return images.with_classes(shuffled[count:]), images.with_classes(shuffled[:count])


def _split_images(images: Dataset, held_out: HeldOutClasses) -> tuple[Dataset, ...]:
    """Training, validation and test images of the same classes; validation is a share, or None."""
    draw = np.random.default_rng(held_out.seed)
    train, test = _hold_out_images(images, _HELD_OUT, _LEAST, draw)
    if test.num_classes < 2:
        raise UserError(
            f"config.data.split is images, which needs two classes with {_LEAST} or more images, "
            f"but classes with so many: {test.num_classes}; add images"
        )
    if num_small := images.num_classes - test.num_classes:
        console.say(f"classes with fewer than {_LEAST} images: {num_small}, only trained on")
    validation = None
    if held_out.validation:
        rest, chosen = _hold_out_images(train, held_out.validation, _LEAST_VALIDATED, draw)
        if chosen.num_classes > 1:
            train, validation = rest, chosen
        else:
            console.say(
                "no image is held out for validation: fewer than two classes have "
                f"{_LEAST_VALIDATED} training images"
            )
    return train.renumbered(), validation, test


def _hold_out_images(
    images: Dataset, share: float, least: int, draw: np.random.Generator
) -> _Halves:
    """Holds out a share, but at least two, of the images of each class with `least` or more."""
    chosen = []
    for label in np.unique(images.labels):
        members = draw.permutation(np.flatnonzero(images.labels == label))
        count = max(2, round(share * len(members)))
        chosen.append(members[: count if len(members) >= least else 0])
    held_out = np.sort(np.concatenate(chosen))
    rest = np.setdiff1d(np.arange(len(images)), held_out)
    return images.take(rest), images.take(held_out)


def check_classes(name: str, splits: Splits) -> None:
    """Rejects parts that cannot be trained on or searched."""
    parts = {"train": splits.train, "validation": splits.validation}
    if splits.ground_truth is None:
        parts["test"] = splits.test
    elif not any(map(len, [*splits.ground_truth.easy, *splits.ground_truth.hard])):
        raise UserError(f"no query of {name} has an image to find in this copy")
    for part, images in parts.items():
        if images is None:
            continue
        if images.num_classes < 2:
            classes = counted(images.num_classes, "class")
            raise UserError(f"the {part} part of {name} has {classes}; it needs two or more")
        if part == "test" and splits.gallery is not None:
            can_match = np.isin(images.labels, splits.gallery.labels).any()
        else:
            can_match = part == "train" or np.bincount(images.labels).max() > 1
        if not can_match:
            raise UserError(f"no image in the {part} part of {name} has an image to find")
